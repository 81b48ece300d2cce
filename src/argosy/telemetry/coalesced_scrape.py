"""Metrics as text for many who ask at once: it is made once for all who come meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine


class CoalescedScrape:
    """What `make` gives, which takes a while. Belongs to one event loop."""

    def __init__(self, render: Callable[[], Coroutine[None, None, bytes]]) -> None:
        self._render = render
        self._task: asyncio.Task[bytes] | None = None

    async def get_text(self) -> bytes:
        """What is being made, or is from now on; whoever leaves spoils it for nobody. Raises what `make` raises."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._render())
        return await asyncio.shield(self._task)
