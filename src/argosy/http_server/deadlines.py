"""Deadlines of equal length for any number of items, on a single event loop timer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
MIN_TIMER_DELAY_S = 0.001
"""Shortest timer delay. libuv's timers fire up to 1 ms early, so a shorter one would only fire again and again."""


class Deadlines(Generic[T]):
    """Calls `on_expired` with each item that is not removed within `timeout_s` seconds. Not thread-safe.

    All items have the same timeout, so the first item added is the first to expire. Adding or removing an item costs
    one dictionary operation. A timer per item would cost more than most requests spend waiting.
    """

    def __init__(self, timeout_s: float, on_expired: Callable[[T], object]) -> None:
        self._timeout_s = timeout_s
        self._on_expired = on_expired
        self._due: dict[T, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, item: T) -> None:
        """Set the deadline of `item` to `timeout_s` seconds from now, and cancel its earlier deadline."""
        if item in self._due:
            del self._due[item]
        self._due[item] = time.monotonic() + self._timeout_s
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._on_timer)

    def __len__(self) -> int:
        """Return the number of items with a deadline."""
        return len(self._due)

    def __contains__(self, item: T) -> bool:
        """Return whether an item has a deadline."""
        return item in self._due

    def remove(self, item: T) -> None:
        """Cancel the deadline of `item`, if it has one."""
        self._due.pop(item, None)

    def _on_timer(self) -> None:
        now = time.monotonic()
        try:
            while self._due:
                item, due_at = next(iter(self._due.items()))
                if due_at > now:
                    return
                del self._due[item]
                # `add` starts no timer within this call, since `_timer` is still set.
                self._on_expired(item)
        finally:
            self._timer = None
            if self._due:
                delay_s = next(iter(self._due.values())) - now
                self._timer = asyncio.get_running_loop().call_later(
                    max(delay_s, MIN_TIMER_DELAY_S), self._on_timer
                )
