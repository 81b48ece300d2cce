"""Output of a process that also goes to a terminal or pipe, whose reader may be slow."""

from __future__ import annotations

import os
import select

MAX_WAIT_MS = 1000
PIECE_BYTES = 4096
"""Number of bytes that a pipe that is ready takes without blocking (POSIX's PIPE_BUF on Linux)."""


class ForwardedOutput:
    """Writes to a descriptor that other processes share. Never fails, and never blocks for long.

    A monitor that is blocked could not end its process. Output that a stopped reader does not take is dropped; the log
    has it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._is_stopped = False

    def write(self, data: bytes) -> None:
        """Write output, or drop it if the reader has stopped or is gone."""
        while data:
            if not self._poll.poll(0 if self._is_stopped else MAX_WAIT_MS):
                self._is_stopped = True
                return
            self._is_stopped = False
            try:
                data = data[os.write(self._fd, data[:PIECE_BYTES]) :]
            except OSError:
                return
