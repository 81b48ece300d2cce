"""Waiting for conditions that have no event."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path


async def until(condition: Callable[[], object], interval_s: float = 0.01) -> None:
    """Wait until `condition` holds. The test's own timeout is the only limit.

    The interval is longer for a condition that takes long to compute, which would slow what it waits for.
    """
    while not condition():  # noqa: ASYNC110 - the condition has no event
        await asyncio.sleep(interval_s)


def wait_for(condition: Callable[[], object], interval_s: float = 0.02) -> None:
    """Wait in a thread until a condition holds. Fails after a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(interval_s)


async def stable_value(read_value: Callable[[], int]) -> int:
    """Return a value once it has not changed for 0.2 seconds."""
    previous = None
    while (current := read_value()) != previous:
        previous = current
        await asyncio.sleep(0.2)
    return current


def is_listening(path: Path) -> bool:
    """Return whether a server listens at a Unix socket. The file exists slightly earlier."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0
