"""Rendering of metrics that concurrent scrapes share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine


class CoalescedScrape:
    """Result of `render`, computed once for all concurrent callers. Not thread-safe: use it from one event loop."""

    def __init__(self, render: Callable[[], Coroutine[None, None, bytes]]) -> None:
        self._render = render
        self._task: asyncio.Task[bytes] | None = None

    async def get_text(self) -> bytes:
        """Return the result of the running `render` call, or of a new one if none is running.

        A cancelled caller does not cancel the rendering for the others. Exceptions of `render` propagate.
        """
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._render())
        return await asyncio.shield(self._task)
