"""Zeroed memory on huge pages, which need few address translations, and prefaulting of these pages.

The system clears a page when it is first touched, 2 MiB at a time. A KV cache touches a page of each layer at once,
which stops a step for tens of milliseconds on a virtual machine. A background thread therefore touches pages before
they are used.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
"""Size of a huge page."""
MADV_POPULATE_WRITE = 23
"""Advice of madvise(2), since Linux 5.14, to allocate pages now without changing their content."""


def huge_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate a tensor of zeros, on transparent huge pages if the system supports them.

    Memory is allocated when it is first touched, whereas torch would write all of it at once.
    """
    if sys.platform != "linux" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(
        -1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    with contextlib.suppress(OSError):  # raised by a system without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class PagePrefaulter:
    """Prefaulter, which allocates the pages of tables shortly before their rows are used.

    Tables have one shape and dtype, and are contiguous and on the CPU. Row i of all tables is used at the same time,
    and rows are used in order. If the system does not support prefaulting or has no thread left, pages are allocated
    when they are touched.
    """

    def __init__(self, tables: Sequence[Tensor]) -> None:
        self._tables = tables
        self._rows = len(tables[0]) if tables else 0
        self._row_bytes = tables[0].stride(0) * tables[0].itemsize if tables else 0
        """Bytes per row of a table."""
        self._page_rows = max(1, HUGE_PAGE_BYTES // max(1, self._row_bytes))
        """Number of rows per huge page, at least 1."""
        self._requested_rows = 0
        self._executor: ThreadPoolExecutor | None = None
        if sys.platform == "linux" and self._rows:
            self._madvise = ctypes.CDLL(None).madvise  # releases the GIL
            self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="pages")

    def ensure(self, row: int) -> Future[bool] | None:
        """Prefault the pages of the rows after `row` in the background, unless requested before.

        Returns:
            A future that yields whether the system prefaulted them, or None if no work was needed.
        """
        end = min(self._rows, (row // self._page_rows + 3) * self._page_rows)
        if self._executor is None or end <= self._requested_rows:
            return None
        start, self._requested_rows = self._requested_rows, end
        try:
            return self._executor.submit(self._prefault, start, end)
        except RuntimeError:  # the system has no thread left, or the process exits
            self._executor = None
            return None

    def close(self) -> None:
        """Wait for the page that is being prefaulted, and prefault no more. The tables can be freed then."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None

    def _prefault(self, start: int, end: int) -> bool:
        for row in range(start, end, self._page_rows):
            for table in self._tables:
                address = table.data_ptr() + row * self._row_bytes
                end_address = table.data_ptr() + min(row + self._page_rows, end) * self._row_bytes
                address -= address % mmap.PAGESIZE
                if self._madvise(address, end_address - address, MADV_POPULATE_WRITE) != 0:
                    self._requested_rows = self._rows  # later calls would fail too
                    return False
        return True
