"""Zeroed memory on large pages: a table that is read all over costs few address translations."""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


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
