"""Zeroed memory on large pages: a table that is read all over costs few address translations.

The system clears a page when it is first touched: 2 MiB at a time, in each layer of a KV cache at once, which stops a
step for tens of milliseconds on a virtual machine. So pages are taken ahead of their use, in a thread beside.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
"""Bytes of a large page."""
MADV_POPULATE_WRITE = 23
"""`MADV_POPULATE_WRITE`, since Linux 5.14: take the pages now, and leave what is in them."""


def huge_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros, on transparent huge pages where the system has them.

    Memory is taken as it is touched, where torch would write all of it now.
    """
    if sys.platform != "linux" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(
        -1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    with contextlib.suppress(OSError):  # a system without them says so
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class PagePrefaulter:
    """Takes the pages of tables before their rows are used. Memory is taken as it is needed, not all of it at once.

    Tables are of one shape and dtype, contiguous and on the CPU; row i of each is used together with row i of the
    others, and rows are used from the first one on. Where the system cannot do it, or has no thread left, pages are
    taken as they are touched.
    """

    def __init__(self, tables: Sequence[Tensor]) -> None:
        self._tables = tables
        self._rows = len(tables[0]) if tables else 0
        self._row_bytes = tables[0].stride(0) * tables[0].itemsize if tables else 0
        """Bytes of a row."""
        self._page_rows = max(1, HUGE_PAGE_BYTES // max(1, self._row_bytes))
        """Rows for which one large page lasts."""
        self._requested_rows = 0
        self._executor: ThreadPoolExecutor | None = None
        if sys.platform == "linux" and self._rows:
            self._madvise = ctypes.CDLL(None).madvise  # does not hold the interpreter's lock
            self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="pages")

    def ensure(self, row: int) -> Future[bool] | None:
        """Rows up to this one are used now: the pages of those after it are taken, if that was not asked before.

        The future tells whether the system did it; None: there was nothing to do.
        """
        end = min(self._rows, (row // self._page_rows + 3) * self._page_rows)
        if self._executor is None or end <= self._requested_rows:
            return None
        begin, self._requested_rows = self._requested_rows, end
        try:
            return self._executor.submit(self._prefault, begin, end)
        except RuntimeError:  # no thread is left for it, or the process is about to end
            self._executor = None
            return None

    def _prefault(self, begin: int, end: int) -> bool:
        for row in range(begin, end, self._page_rows):
            for table in self._tables:
                start = table.data_ptr() + row * self._row_bytes
                stop = table.data_ptr() + min(row + self._page_rows, end) * self._row_bytes
                start -= start % mmap.PAGESIZE
                if self._madvise(start, stop - start, MADV_POPULATE_WRITE) != 0:
                    self._requested_rows = self._rows  # it will not be able to do the others either
                    return False
        return True
