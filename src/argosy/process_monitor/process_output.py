"""Where a monitor writes the output of its process: a log file that is rotated by size, and a terminal or pipe."""

from __future__ import annotations

import contextlib
import os
import re
import select
from pathlib import Path

from argosy.folders import open_private_log

MAX_LAST_LINE_LEN = 300
_TAIL_BYTES = 4096
_FRAME = " \t│|"
_WORD = re.compile(r"\w")
MAX_WAIT_MS = 1000
PIECE_BYTES = 4096
"""Number of bytes that a pipe that is ready takes without blocking (POSIX's PIPE_BUF on Linux)."""


class RotatingLog:
    """Appends to a file, and renames it to `<name>.1` when it is full. Writing never fails.

    The writer owns the pipe of the process, so no line is lost at a rotation, as copying and truncating would lose it.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._fd = self._open()
        self._lost_bytes = 0
        self._tail = b""

    @property
    def last_line(self) -> str:
        """Last line with words, without frames of terminals, and without its beginning if it is long."""
        lines = self._tail.decode(errors="replace").splitlines()
        texts = [line.strip(_FRAME) for line in lines if _WORD.search(line)]
        return texts[-1][-MAX_LAST_LINE_LEN:] if texts else ""

    def write(self, data: bytes) -> None:
        """Append output. Output that cannot be written, because the disk is full, is counted and dropped."""
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        try:
            self._rotate_if_full()
            if self._lost_bytes:
                self._append(b"[%d bytes of output could not be written]\n" % self._lost_bytes)
                self._lost_bytes = 0
            self._append(data)
        except OSError:
            self._lost_bytes += len(data)

    def _append(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._fd, data) :]

    def _rotate_if_full(self) -> None:
        if os.fstat(self._fd).st_size >= self._max_bytes:
            self._path.replace(_rotated(self._path))
            new = self._open()
            os.close(self._fd)
            self._fd = new

    def _open(self) -> int:
        return open_private_log(self._path)


def read_log_end(path: Path, max_bytes: int) -> bytes:
    """Return the last bytes of a log and of the older file that its rotation left."""
    end, read = b"", set[int]()
    for file in (path, _rotated(path)):
        with contextlib.suppress(FileNotFoundError), file.open("rb") as log:
            inode = os.fstat(log.fileno()).st_ino
            if inode in read:  # it was rotated meanwhile
                break
            read.add(inode)
            wanted = max_bytes - len(end)
            log.seek(max(0, log.seek(0, os.SEEK_END) - wanted))
            end = log.read(wanted) + end
    return end


def _rotated(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


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
