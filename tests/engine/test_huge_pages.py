"""Pages are there before they are touched, with what was in them."""

from __future__ import annotations

import mmap
import resource
import sys
import threading

import pytest
import torch

from argosy.engine.execution.huge_pages import PagePrefaulter, huge_zeros

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="pages are taken ahead on Linux only"
)

ROWS = 4096
WIDTH = 4096
"""Bytes of a row: 512 rows to a large page."""


def faults() -> int:
    """Of this thread, so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def touch(tables: torch.Tensor, begin: int, end: int) -> int:
    """How many faults it takes to write into these rows."""
    before = faults()
    for row in range(begin, end):
        for table in tables:
            table[row, 0] = 1
    return faults() - before


def small_pages(rows: int) -> torch.Tensor:
    """Two tables on pages of 4 KiB, so that a row not taken ahead costs a fault."""
    return torch.frombuffer(mmap.mmap(-1, 2 * rows * WIDTH), dtype=torch.uint8).view(2, rows, WIDTH)


def possible() -> bool:
    """Whether this system takes pages ahead at all (Linux 5.14 and later)."""
    reached = PagePrefaulter([*small_pages(1)]).ensure(0)
    assert reached is not None
    return reached.result()


def test_rows_ahead_cost_no_fault() -> None:
    if not possible():
        pytest.skip("this system cannot take pages ahead (before Linux 5.14)")
    tables = small_pages(ROWS)
    ahead = PagePrefaulter([*tables])
    tables[0, 7, 7] = 42
    reached = ahead.ensure(0)
    assert reached is not None
    assert reached.result()
    assert touch(tables, 0, 1024) < 100
    assert tables[0, 7, 7] == 42
    assert int(tables.sum()) == 42 + 2 * 1024


def test_nothing_is_asked_for_twice_and_nothing_beyond_the_end() -> None:
    tables = huge_zeros((2, ROWS, WIDTH), torch.uint8)
    ahead = PagePrefaulter([*tables])
    assert ahead.ensure(0) is not None
    assert ahead.ensure(1) is None
    assert ahead.ensure(511) is None
    last = ahead.ensure(ROWS - 1)
    assert last is not None
    assert last.result() == possible()
    assert ahead.ensure(ROWS - 1) is None


@pytest.mark.parametrize("shape", [(1, 1, 3), (2, 1, 5), (3, 7, 4 << 20)])
def test_small_and_odd_tables(shape: tuple[int, ...]) -> None:
    tables = huge_zeros(shape, torch.uint8)
    ahead = PagePrefaulter([*tables])
    reached = ahead.ensure(shape[1] - 1)
    assert reached is not None
    assert reached.result() == possible()
    assert not tables.any()


def test_where_no_thread_is_left_pages_are_taken_as_they_are_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    tables = huge_zeros((1, 2, WIDTH), torch.uint8)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    ahead = PagePrefaulter([*tables])
    assert ahead.ensure(0) is None
    assert ahead.ensure(1) is None


def test_where_there_are_no_tables_there_is_nothing_to_do() -> None:
    assert PagePrefaulter([]).ensure(0) is None
