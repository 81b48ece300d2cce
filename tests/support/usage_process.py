"""Processes that keep usage and come to harm: started by `test_usage_kills.py`, told what to do by their arguments."""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import threading
from pathlib import Path

import msgspec
import structlog

from argosy.policy import Rates
from argosy.store import UsageLog, UsageLogFullError, UsageRecord, UsageSlot
from argosy.store import usage_log as spool_module

RATES = Rates(3, 1, 5)


def row(request: str) -> UsageRecord:
    return UsageRecord(
        request=request, started_at=0.0, ended_at=0.0, status="interrupted", model="m"
    )


def count_until_killed(folder: Path, store: Path) -> None:
    """Begin, count and end requests without end, and say so on standard output before each; drain meanwhile."""
    spool = UsageLog(folder)
    spool.recover()
    kept = os.open(store, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def keep(rows: list[UsageRecord]) -> None:
        # A write may be torn by the kill: what comes after it begins on a line of its own.
        os.write(kept, b"".join(b"\n" + msgspec.json.encode(one) for one in rows) + b"\n")

    def drain() -> None:
        while True:
            spool.drain(keep)

    threading.Thread(target=drain, daemon=True).start()
    running: dict[str, tuple[UsageSlot, int]] = {}
    for number in range(sys.maxsize):
        name, what = f"{os.getpid()}-{number}", random.random()
        if len(running) < 8:
            say("begin", name)
            running[name] = spool.allocate_slot(row(name), RATES), 0
            continue
        name = random.choice(list(running))
        slot, tokens = running.pop(name)
        if what < 0.1:
            say("end", name)
            slot.finish("completed", "here", 1.0)
            continue
        tokens += random.randrange(1, 9)
        say("count", name, tokens)
        slot.set_counts(tokens, tokens // 2, tokens)
        running[name] = slot, tokens


def say(*words: object) -> None:
    os.write(1, " ".join(map(str, words)).encode() + b"\n")


def fill_the_disk(folder: Path) -> None:
    """Go on with no room for files, up to the bound in memory; then there is room again."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, most))
    rows: list[UsageRecord] = []
    spool = UsageLog(folder)
    slot = spool.allocate_slot(row("first"))
    slot.set_counts(4, 0, 2)
    slot.finish("completed", "here", 1.0)
    full = {"in_memory": spool.unpersisted_records, "files": len(list(folder.glob("*.usage")))}
    spool.drain(rows.extend)
    slots = [spool.allocate_slot(row(str(number))) for number in range(bound())]
    try:
        spool.allocate_slot(row("one too many"))
    except UsageLogFullError:
        full["refused"] = 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    spool.drain(rows.extend)
    spool.allocate_slot(row("last")).finish("completed", "here", 1.0)
    room = {"in_memory": spool.unpersisted_records, "files": len(list(folder.glob("*.usage")))}
    for one in slots:
        one.finish("completed", "here", 1.0)
    spool.drain(rows.extend)
    spool.drain(rows.extend)
    room["left_in_memory"] = spool.unpersisted_records
    spool.close()
    print(json.dumps({"full": full, "room": room, "rows": len({one.request for one in rows})}))  # noqa: T201 - read by the test


def bound() -> int:
    return spool_module.MAX_MEMORY_TABLES * (spool_module.SLOTS_PER_TABLE - 1)


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    task, folder, *store = sys.argv[1:]
    if task == "count":
        count_until_killed(Path(folder), Path(*store))
    else:
        fill_the_disk(Path(folder))
