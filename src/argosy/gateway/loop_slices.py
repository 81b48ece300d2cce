"""Slices of long work on the event loop, so that it delays no other task for long."""

from __future__ import annotations

import asyncio
import time

MAX_SLICE_S = 0.001


class LoopSlices:
    """Gives the event loop to others after each `MAX_SLICE_S` of work."""

    def __init__(self) -> None:
        self._began_at = time.perf_counter()

    async def pause(self) -> None:
        """Give way if the slice is used up."""
        if time.perf_counter() - self._began_at > MAX_SLICE_S:
            await asyncio.sleep(0)
            self._began_at = time.perf_counter()
