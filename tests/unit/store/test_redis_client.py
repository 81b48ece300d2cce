"""What is common to all that ask Redis."""

from __future__ import annotations

import asyncio

from argosy.store.redis_client import cancel_task


async def test_a_task_is_ended_though_it_loses_that_it_was_told() -> None:
    begun = asyncio.Event()

    async def ask() -> None:
        for _ in range(2):
            try:
                begun.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:  # as `wait_for` of Python 3.11 may
                continue
        await asyncio.Event().wait()

    task = asyncio.create_task(ask())
    await begun.wait()
    await cancel_task(task)
    assert task.cancelled()
    await cancel_task(task)
