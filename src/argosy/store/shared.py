"""What gateways share at once: how much of each limit is in use. One alone counts in memory; many ask Redis."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from argosy.policy import Concurrency, Counter, Period, Window
from argosy.store.records import Limit

SECONDS = {"second": 1.0, "minute": 60.0, "hour": 3600.0}

Wants = Sequence[tuple[Counter, int]]
"""Counters of a state, and how many units somebody needs of each."""
Clock = Callable[[], float]
"""Seconds since the epoch."""


class SharedState(Protocol):
    """Where the counters of limits come from, and where they get their room."""

    def counter(self, limit: Limit) -> Counter:
        """A new counter for a limit; one for the same limit at other gateways counts with it.

        Raises ValueError when the limit has no window, and needs one.
        """

    async def obtain(self, wants: Wants) -> bool:
        """Get as much room as there is for these. Returns soon; False when nobody could say how much there is."""

    def lend(self, wants: Wants, now: float) -> bool:
        """Give room to something that runs, at this very moment, while more is asked for; False: it must stop."""

    def trust(self, wants: Wants, now: float) -> bool:
        """Give room at this very moment although nobody can say how much there is; False: it would be too much."""

    async def start(self) -> None:
        """Be ready, or nearly so: a state that cannot be reached is looked for from now on."""

    async def close(self) -> None:
        """Give back what is held."""


class MemoryState:
    """One gateway alone: its own counters know it all."""

    def counter(self, limit: Limit) -> Counter:
        """See `SharedState`."""
        return own_counter(limit)

    async def obtain(self, wants: Wants) -> bool:  # noqa: ARG002 - there is no more
        """See `SharedState`."""
        return True

    def lend(self, wants: Wants, now: float) -> bool:  # noqa: ARG002 - there is no more
        """See `SharedState`."""
        return False

    def trust(self, wants: Wants, now: float) -> bool:  # noqa: ARG002 - never needed
        """See `SharedState`."""
        return False

    async def start(self) -> None:
        """See `SharedState`."""

    async def close(self) -> None:
        """See `SharedState`."""


def open_shared(url: str | None, password: str | None = None) -> SharedState:
    """The state at a URL of Redis (`redis://`, `rediss://`, `unix://`); None: this gateway is alone.

    Raises ValueError when it is no such URL, or redis-py is not installed.
    """
    if url is None:
        return MemoryState()
    try:
        from argosy.store.redis_state import RedisState
    except ModuleNotFoundError as error:
        raise ValueError(
            "Redis needs a client. Install it: pip install 'argosy[redis]'."
        ) from error
    return RedisState(url, password)


def own_counter(limit: Limit) -> Window | Period | Concurrency:
    """What counts by itself. Raises ValueError when the limit has no window, and needs one."""
    if limit.unit == "concurrency":
        return Concurrency(limit.amount)
    if limit.window is None:
        raise ValueError(f"The limit {limit.id} on {limit.unit} has no window. Give it one.")
    if limit.window in {"day", "month"}:
        return Period(limit.amount, limit.window)
    return Window(limit.amount, SECONDS[limit.window])


class SteadyClock:
    """Seconds since the epoch that never go back: when the system is set back, they go on from where they are."""

    def __init__(self) -> None:
        self._ahead = 0.0
        self._last = 0.0

    def __call__(self) -> float:
        """Now."""
        now = time.time() + self._ahead
        if now < self._last:
            self._ahead += self._last - now
            now = self._last
        self._last = now
        return now


steady = SteadyClock()
"""The one by which limits are kept, here and at whoever shares them."""
