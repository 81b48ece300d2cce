"""Protocol between a server and its render processes: kinds of replies, and the bounds of a render.

A request is a pickled tuple, because the server is trusted. A reply is its kind, a line break and its text. The size
precedes each.
"""

from __future__ import annotations

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
MAX_REPLY_BYTES = 4 * MAX_OUTPUT_CHARS + 100
"""Longest reply, with its kind."""
MAX_SOURCE_CHARS = 1 << 20
"""Longest template in characters."""

ReplyKind = Literal["text", "failed", "memory", "output", "slow"]
"""Kind of a reply. `slow` precedes the others: the process has lowered its priority."""
SIZE_BYTES = 4


def frame(payload: bytes) -> bytes:
    """Return a payload behind its size."""
    return len(payload).to_bytes(SIZE_BYTES, "little") + payload
