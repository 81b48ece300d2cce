"""Waiting for what tells nobody that it has come."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path


async def until(condition: Callable[[], object]) -> None:
    """Wait until it holds; the test's own time limit is the only one."""
    while not condition():  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.01)


async def still(count: Callable[[], int]) -> int:
    """What a count has come to once it has not changed for a while."""
    before = None
    while (now := count()) != before:
        before = now
        await asyncio.sleep(0.2)
    return now


def listens_at(path: Path) -> bool:
    """Whether somebody listens at a Unix socket, which is there a moment before they do."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0
