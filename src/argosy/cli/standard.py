"""Standard streams that no command dies of: nobody may read what it says, or the disk with its log may be full."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

LAST = 2
"""Descriptor of standard error."""


def keep_standard_streams() -> None:
    """What cannot be written to standard error is lost from now on, and nothing else is.

    Those streams that are closed are opened on nothing, for this process and its children: else whatever is opened
    next would be taken for them.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= LAST:
        os.set_inheritable(opened, True)  # noqa: FBT003 - as the library has it
    os.close(opened)
    lossy = io.BufferedWriter(_Lossy(LAST, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(lossy, errors="backslashreplace", line_buffering=True)


class _Lossy(io.FileIO):
    """A file to which writing never fails."""

    def write(self, data: ReadableBuffer, /) -> int:
        """All of `data`, as far as anybody can tell."""
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes
