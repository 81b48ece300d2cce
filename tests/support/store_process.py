"""Process that uses stores beside others, for tests of concurrent writers.

Run `python -m tests.support.store_process`. For each task it reads a line with a JSON array: the task, the URL, its own
number, and arguments. It writes `"ready"`, waits for another line, runs the task, and writes the result.
"""

from __future__ import annotations

import json
import sys

from argosy.store import Store, ledger, open_store
from tests.support.usage_rows import usage_row


def main() -> None:
    while line := sys.stdin.readline():
        task, url, number, *arguments = json.loads(line)
        store = open_store(url)
        write("ready")
        sys.stdin.readline()
        result = run_task(store, task, number, *arguments)
        store.close()
        write(result)


def run_task(store: Store, task: str, number: int, *arguments: float) -> str | int | None:
    match task, arguments:
        case "migrate", ():
            store.migrate()
            return None
        case "bootstrap", ():
            created = store.accounts.bootstrap(actor=f"worker {number}")
            return None if created is None else created[1]
        case "create_organisations", (count,):
            for i in range(int(count)):
                store.accounts.create_organisation(f"{number}-{i}", actor=f"worker {number}")
            return None
        case "add_records", (distance, count):
            first = number * int(distance)
            rows = [usage_row(f"request-{i}") for i in range(first, first + int(count))]
            return sum(store.ledger.add_records(rows[i : i + 7]) for i in range(0, len(rows), 7))
        case "roll_up", (before, batch_rows):
            ledger.ROLL_UP_BATCH_ROWS, ledger.ROLL_UP_PAUSE_S = int(batch_rows), 0
            return store.ledger.roll_up(before)
    raise ValueError(task)


def write(value: str | int | None) -> None:
    sys.stdout.write(f"{json.dumps(value)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
