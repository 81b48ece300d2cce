"""Waiting for what tells nobody that it has come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PATIENCE_S = 30.0


async def until(condition: Callable[[], object]) -> None:
    """Wait for it. Raises TimeoutError when it does not come."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)


async def still(count: Callable[[], int]) -> int:
    """What a count has come to once it has not changed for a while."""
    before = None
    while (now := count()) != before:
        before = now
        await asyncio.sleep(0.2)
    return now
