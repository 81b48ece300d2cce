"""Recognizes errors that mean that memory ran out."""

from __future__ import annotations

import re

_OUT_OF_MEMORY_PATTERN = re.compile(
    r"(can.?t|cannot) allocate memory|out.of.memory|not enough memory|bad_alloc|CUBLAS_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
"""Matches the messages of the operating system, torch, CUDA, oneDNN and cuBLAS."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means out of memory. PyTorch raises a plain RuntimeError for it on the CPU."""
    return isinstance(error, MemoryError) or bool(_OUT_OF_MEMORY_PATTERN.search(str(error)))
