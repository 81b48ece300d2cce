"""A process that uses a store: `python -m tests.support.store_process WHAT URL NUMBER ...`, and go on its stdin."""

from __future__ import annotations

import sys

from argosy.store import ledger as usage_module
from argosy.store import open_store
from tests.support.usage_rows import usage_row


def main(what: str, url: str, number: str, *arguments: str) -> None:
    store = open_store(url)
    say("ready")
    sys.stdin.readline()
    match what:
        case "migrate":
            store.migrate()
        case "first_run":
            made = store.accounts.bootstrap(actor=f"worker {number}")
            say("" if made is None else made[1])
        case "change":
            for i in range(int(arguments[0])):
                store.accounts.create_organisation(f"{number}-{i}", actor=f"worker {number}")
        case "add":
            first, count = int(number) * int(arguments[0]), int(arguments[1])
            rows = [usage_row(f"request-{i}") for i in range(first, first + count)]
            say(str(sum(store.ledger.add_records(rows[i : i + 7]) for i in range(0, count, 7))))
        case "forget":
            usage_module.ROLL_UP_BATCH_ROWS, usage_module.ROLL_UP_PAUSE_S = int(arguments[1]), 0
            say(str(store.ledger.roll_up(float(arguments[0]))))
    store.close()


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
