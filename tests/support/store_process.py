"""Process that uses a store beside others, for tests of concurrent writers.

Run `python -m tests.support.store_process TASK URL NUMBER ...`. The process prints `ready`, waits for a line on its
standard input and then runs the task.
"""

from __future__ import annotations

import sys

from argosy.store import ledger, open_store
from tests.support.usage_rows import usage_row


def main(task: str, url: str, number: str, *arguments: str) -> None:
    store = open_store(url)
    print_line("ready")
    sys.stdin.readline()
    match task:
        case "migrate":
            store.migrate()
        case "bootstrap":
            created = store.accounts.bootstrap(actor=f"worker {number}")
            print_line("" if created is None else created[1])
        case "create_organisations":
            for i in range(int(arguments[0])):
                store.accounts.create_organisation(f"{number}-{i}", actor=f"worker {number}")
        case "add_records":
            first, count = int(number) * int(arguments[0]), int(arguments[1])
            rows = [usage_row(f"request-{i}") for i in range(first, first + count)]
            added = sum(store.ledger.add_records(rows[i : i + 7]) for i in range(0, count, 7))
            print_line(str(added))
        case "roll_up":
            ledger.ROLL_UP_BATCH_ROWS, ledger.ROLL_UP_PAUSE_S = int(arguments[1]), 0
            print_line(str(store.ledger.roll_up(float(arguments[0]))))
        case _:
            raise ValueError(task)
    store.close()


def print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
