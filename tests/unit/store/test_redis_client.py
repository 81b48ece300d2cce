"""Cancellation of the background tasks of Redis clients."""

from __future__ import annotations

import asyncio

from argosy.store.redis_client import cancel_task


async def test_task_that_loses_cancellations_is_cancelled_again() -> None:
    """`asyncio.wait_for` of Python 3.11 may lose a cancellation."""
    started = asyncio.Event()

    async def lose_two_cancellations() -> None:
        for _ in range(2):
            try:
                started.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue
        await asyncio.Event().wait()

    task = asyncio.create_task(lose_two_cancellations())
    await started.wait()
    await cancel_task(task)
    assert task.cancelled()
    await cancel_task(task)
