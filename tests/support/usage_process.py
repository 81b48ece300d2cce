"""Process that writes a usage log until `tests/chaos/test_usage_kills.py` kills it."""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path

import msgspec
import structlog

from argosy.protocol import TokenUsage
from argosy.store import UsageLog, UsageRecord, UsageSlot
from tests.support.usage_log_harness import NOW, RATES, new_record

CONCURRENT_REQUESTS = 8


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
            running[name] = log.allocate_slot(new_record(name), RATES), 0
            continue
        name = random.choice(list(running))
        slot, tokens = running.pop(name)
        if choice < 0.1:
            announce("finish", name)
            slot.finish("completed", "here", NOW)
            continue
        tokens += random.randrange(1, 9)
        announce("count", name, tokens)
        slot.set_counts(TokenUsage(tokens, tokens // 2, tokens))
        running[name] = slot, tokens


def announce(*words: object) -> None:
    os.write(1, " ".join(map(str, words)).encode() + b"\n")


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    folder, store = sys.argv[1:]
    count_until_killed(Path(folder), Path(store))
