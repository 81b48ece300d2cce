"""Pipes without a reader."""

from __future__ import annotations

import contextlib
import os
import select


def fill(pipe: int) -> int:
    """Fill a pipe's buffer and return the number of bytes written."""
    os.set_blocking(pipe, False)
    written = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            written += os.write(pipe, b"." * select.PIPE_BUF)
    os.set_blocking(pipe, True)
    return written
