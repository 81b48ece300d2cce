"""Protocol between a server and its render processes: frames of bytes on a socket, and the bounds of a render."""

from __future__ import annotations

import socket
import struct
import time
from typing import Literal

MAX_CPU_S = 1.0
"""CPU time to compile and render one prompt. The kernel ends the process after it."""
SLOW_CPU_S = 0.05
"""CPU time after which a render is slow. It continues with low priority, in a process that serves no other request."""
SLOW_NICENESS = 10
MAX_MEMORY_BYTES = 512 << 20
"""Memory for one prompt, beside that of the idle process."""
MAX_OUTPUT_CHARS = 32 << 20
"""Longest prompt in characters."""
MAX_SOURCE_CHARS = 1 << 20
"""Longest template in characters."""

Moment = tuple[str, float | None, str | None]
"""Local time as ISO 8601, offset from UTC in seconds, and name of the time zone. Offset None is a naive time."""
ReplyKind = Literal["text", "failed", "syntax_error", "memory", "output", "slow"]
"""Kind of a reply. `slow` precedes the others: the process has lowered its priority."""
_KINDS: tuple[ReplyKind, ...] = ("text", "failed", "syntax_error", "memory", "output", "slow")
_HEADER = struct.Struct("<BI")


class FrameSocket:
    """Socket that carries frames of a kind and a payload."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, payload: bytes | bytearray, kind: ReplyKind = "text") -> None:
        """Send a frame.

        Raises:
            OSError: The peer has closed the socket, or does not read it in time.
        """
        self._socket.sendall(_HEADER.pack(_KINDS.index(kind), len(payload)) + payload)

    def receive(self, timeout_s: float | None = None) -> tuple[ReplyKind, bytes]:
        """Receive a frame.

        Raises:
            TimeoutError: The frame is not complete after `timeout_s`.
            EOFError: The peer has closed the socket.
            OSError: The connection is broken.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        kind, size = _HEADER.unpack(self._receive_exactly(_HEADER.size, deadline))
        return _KINDS[kind], bytes(self._receive_exactly(size, deadline))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _receive_exactly(self, size: int, deadline: float | None) -> bytearray:
        data = bytearray(size)
        view, received = memoryview(data), 0
        while received < size:
            if deadline is not None:
                self._socket.settimeout(max(deadline - time.monotonic(), 1e-6))
            count = self._socket.recv_into(view[received:])
            if not count:
                raise EOFError
            received += count
        self._socket.settimeout(None)
        return data
