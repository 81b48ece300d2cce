"""Page prefaulting: memory is mapped before its first use, with its content unchanged."""

from __future__ import annotations

import mmap
import resource
import sys
import threading

import pytest
import torch

from argosy.engine.execution.kernels.huge_pages import PagePrefaulter, huge_zeros

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prefaulting works on Linux only")

ROWS = 4096
WIDTH = 4096
"""Bytes of a row. A huge page has 512 rows."""


def count_page_faults() -> int:
    """Return the number of minor page faults of this thread."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def count_faults_of_writes(tables: torch.Tensor, begin: int, end: int) -> int:
    """Write to rows and return the number of page faults."""
    before = count_page_faults()
    for row in range(begin, end):
        for table in tables:
            table[row, 0] = 1
    return count_page_faults() - before


def tables_on_small_pages(rows: int) -> torch.Tensor:
    """Return two tables on pages of 4 KiB, where a row that is not prefaulted causes a fault."""
    return torch.frombuffer(mmap.mmap(-1, 2 * rows * WIDTH), dtype=torch.uint8).view(2, rows, WIDTH)


def can_prefault() -> bool:
    """Return whether this system can prefault pages (Linux 5.14 and later)."""
    done = PagePrefaulter([*tables_on_small_pages(1)]).ensure(0)
    assert done is not None
    return done.result()


def test_prefaulted_rows_cause_no_faults() -> None:
    if not can_prefault():
        pytest.skip("this system cannot prefault pages (before Linux 5.14)")
    num_faults = []
    for _ in range(3):  # the system may take idle pages back
        tables = tables_on_small_pages(ROWS)
        prefaulter = PagePrefaulter([*tables])
        tables[0, 7, 7] = 42
        done = prefaulter.ensure(0)
        assert done is not None
        assert done.result()
        num_faults.append(count_faults_of_writes(tables, 0, 1024))
        assert tables[0, 7, 7] == 42
        assert int(tables.sum()) == 42 + 2 * 1024
    assert min(num_faults) < 100


def test_each_page_is_prefaulted_once_up_to_end() -> None:
    tables = huge_zeros((2, ROWS, WIDTH), torch.uint8)
    prefaulter = PagePrefaulter([*tables])
    assert prefaulter.ensure(0) is not None
    assert prefaulter.ensure(1) is None
    assert prefaulter.ensure(511) is None
    last = prefaulter.ensure(ROWS - 1)
    assert last is not None
    assert last.result() == can_prefault()
    assert prefaulter.ensure(ROWS - 1) is None


@pytest.mark.parametrize("shape", [(1, 1, 3), (2, 1, 5), (3, 7, 4 << 20)])
def test_small_and_odd_sized_tables_are_prefaulted(shape: tuple[int, ...]) -> None:
    tables = huge_zeros(shape, torch.uint8)
    prefaulter = PagePrefaulter([*tables])
    done = prefaulter.ensure(shape[1] - 1)
    assert done is not None
    assert done.result() == can_prefault()
    assert not tables.any()


def test_thread_start_failure_disables_prefaulting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail_to_start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    tables = huge_zeros((1, 2, WIDTH), torch.uint8)
    monkeypatch.setattr(threading.Thread, "start", fail_to_start)
    prefaulter = PagePrefaulter([*tables])
    assert prefaulter.ensure(0) is None
    assert prefaulter.ensure(1) is None


def test_prefaulter_without_tables_does_nothing() -> None:
    assert PagePrefaulter([]).ensure(0) is None
