"""Deadlines of one length for any number of things, on a single timer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
MIN_TIMER_DELAY_S = 0.001
"""Timers ring up to so much too early (libuv's): to wait for less would be to go round and round until it is time."""


class Deadlines(Generic[T]):
    """Calls `expired` with what was added and not removed within `seconds`; belongs to one event loop.

    All wait equally long, so the first in is the first due: to add or remove costs a dictionary's entry,
    where a timer each would cost more than most requests wait for.
    """

    def __init__(self, timeout_s: float, on_expired: Callable[[T], object]) -> None:
        self._timeout_s = timeout_s
        self._on_expired = on_expired
        self._due: dict[T, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, item: T) -> None:
        """It is due in `seconds` from now; earlier deadlines of it are void."""
        self._due.pop(item, None)
        self._due[item] = time.monotonic() + self._timeout_s
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._on_timer)

    def __len__(self) -> int:
        """How many wait."""
        return len(self._due)

    def remove(self, item: T) -> None:
        """It need not be waited for."""
        self._due.pop(item, None)

    def _on_timer(self) -> None:
        now = time.monotonic()
        try:
            while self._due:
                thing, due = next(iter(self._due.items()))
                if due > now:
                    return
                del self._due[thing]
                self._on_expired(thing)  # what that adds needs no timer: this is one until its end
        finally:
            self._timer = None
            if self._due:
                next_s = next(iter(self._due.values())) - now
                self._timer = asyncio.get_running_loop().call_later(
                    max(next_s, MIN_TIMER_DELAY_S), self._on_timer
                )
