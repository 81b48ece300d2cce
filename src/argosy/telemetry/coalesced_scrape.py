"""Metrics as text for many who ask at once: it is made once for all who come meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine


class Scrape:
    """What `make` gives, which takes a while. Belongs to one event loop."""

    def __init__(self, make: Callable[[], Coroutine[None, None, bytes]]) -> None:
        self._make = make
        self._making: asyncio.Task[bytes] | None = None

    async def text(self) -> bytes:
        """What is being made, or is from now on; whoever leaves spoils it for nobody. Raises what `make` raises."""
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(self._make())
        return await asyncio.shield(self._making)
