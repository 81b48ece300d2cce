"""Processes that write a usage log until they are killed or the disk is full.

`tests/chaos/test_usage_kills.py` starts them. Their arguments select the task.
"""

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
from argosy.protocol import TokenUsage
from argosy.store import UsageLog, UsageLogFullError, UsageRecord, UsageSlot, usage_log

RATES = Rates(3, 1, 5)
CONCURRENT_REQUESTS = 8


def record(request: str) -> UsageRecord:
    return UsageRecord(
        request=request, started_at=0.0, ended_at=0.0, status="interrupted", model="m"
    )


def count_until_killed(folder: Path, store: Path) -> None:
    """Begin, count and finish requests forever, and drain the log into the file `store` on a second thread.

    A line on standard output announces each operation before it runs.
    """
    log = UsageLog(folder)
    log.recover()
    store_descriptor = os.open(store, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write_to_store(records: list[UsageRecord]) -> None:
        # The kill may tear a write, so that the next one begins on a line of its own.
        lines = b"".join(b"\n" + msgspec.json.encode(record) for record in records) + b"\n"
        os.write(store_descriptor, lines)

    def drain_forever() -> None:
        while True:
            log.drain(write_to_store)

    threading.Thread(target=drain_forever, daemon=True).start()
    running: dict[str, tuple[UsageSlot, int]] = {}
    for number in range(sys.maxsize):
        name, choice = f"{os.getpid()}-{number}", random.random()
        if len(running) < CONCURRENT_REQUESTS:
            announce("begin", name)
            running[name] = log.allocate_slot(record(name), RATES), 0
            continue
        name = random.choice(list(running))
        slot, tokens = running.pop(name)
        if choice < 0.1:
            announce("finish", name)
            slot.finish("completed", "here", 1.0)
            continue
        tokens += random.randrange(1, 9)
        announce("count", name, tokens)
        slot.set_counts(TokenUsage(tokens, tokens // 2, tokens))
        running[name] = slot, tokens


def announce(*words: object) -> None:
    os.write(1, " ".join(map(str, words)).encode() + b"\n")


def fill_disk(folder: Path) -> None:
    """Allocate slots without space for files until memory is full too. Then continue with space.

    A JSON object on standard output reports both phases.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard_limit))
    records: list[UsageRecord] = []
    log = UsageLog(folder)
    slot = log.allocate_slot(record("first"))
    slot.set_counts(TokenUsage(4, 0, 2))
    slot.finish("completed", "here", 1.0)
    full = {"in_memory": log.unpersisted_records, "files": count_files(folder)}
    log.drain(records.extend)
    slots = [log.allocate_slot(record(str(number))) for number in range(max_records_in_memory())]
    try:
        log.allocate_slot(record("excess"))
    except UsageLogFullError:
        full["rejected"] = 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard_limit, hard_limit))
    log.drain(records.extend)
    log.allocate_slot(record("last")).finish("completed", "here", 1.0)
    recovered = {"files": count_files(folder)}
    for slot in slots:
        slot.finish("completed", "here", 1.0)
    log.drain(records.extend)
    log.drain(records.extend)
    recovered["in_memory"] = log.unpersisted_records
    log.close()
    requests = len({record.request for record in records})
    report = {"full": full, "recovered": recovered, "records": requests}
    print(json.dumps(report))  # noqa: T201 - read by the test


def count_files(folder: Path) -> int:
    return len(list(folder.glob("*.usage")))


def max_records_in_memory() -> int:
    return usage_log.MAX_MEMORY_TABLES * (usage_log.SLOTS_PER_TABLE - 1)


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    task, folder, *store = sys.argv[1:]
    if task == "count":
        count_until_killed(Path(folder), Path(*store))
    else:
        fill_disk(Path(folder))
