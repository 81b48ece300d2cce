"""Tasks of processes that use one store at the same time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from threading import Barrier
from typing import Any

from argosy.store import Store, ledger, open_store
from tests.support.usage_rows import usage_row

Task = Callable[..., Any]
"""`task(store, number, *arguments)`, where `number` is that of the process."""
START_S = 60


class StoreProcesses(ProcessPoolExecutor):
    """Two processes, which are started by the first task."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        super().__init__(2, context, _set_barrier, (context.Barrier(2),))

    def run(self, task: Task, url: str, *arguments: object) -> list[Any]:
        """Run a task in both processes at the same time, and return their results."""
        running = [self.submit(_run_task, task, url, number, *arguments) for number in range(2)]
        return [each.result() for each in running]


_barriers: list[Barrier] = []


def _set_barrier(barrier: Barrier) -> None:
    _barriers.append(barrier)


def _run_task(task: Task, url: str, number: int, *arguments: object) -> object:
    with closing(open_store(url)) as store:
        _barriers[0].wait(START_S)
        return task(store, number, *arguments)


def migrate(store: Store, _: int) -> None:
    store.migrate()


def bootstrap(store: Store, number: int) -> str | None:
    created = store.accounts.bootstrap(actor=f"process {number}")
    return None if created is None else created[1]


def create_organisations(store: Store, number: int, count: int) -> None:
    for i in range(count):
        store.accounts.create_organisation(f"{number}-{i}", actor=f"process {number}")


def add_records(store: Store, number: int, distance: int, count: int) -> int:
    first = number * distance
    rows = [usage_row(f"request-{i}") for i in range(first, first + count)]
    return sum(store.ledger.add_records(rows[i : i + 7]) for i in range(0, len(rows), 7))


def roll_up(store: Store, _: int, before: float, batch_rows: int) -> int:
    ledger.ROLL_UP_BATCH_ROWS, ledger.ROLL_UP_PAUSE_S = batch_rows, 0
    return store.ledger.roll_up(before)
