"""What gateways share at once: how much of each limit is in use, and kept answers. One alone needs no Redis."""

from __future__ import annotations

from typing import Protocol

from argosy.policy import Counter
from argosy.store.idempotency_store import Answers, IdempotencyConfig, MemoryAnswers
from argosy.store.quota_meters import Wants, own_counter
from argosy.store.records import Limit

NO_CLIENT = "Redis needs a client. Install it: pip install 'argosy[redis]'."


class SharedState(Protocol):
    """Where the counters of limits come from, and where they get their room."""

    @property
    def up(self) -> bool | None:
        """Whether somebody can say now how much is in use by all gateways; None: this one is alone."""

    def counter(self, limit: Limit) -> Counter:
        """A new counter for a limit; one for the same limit at other gateways counts with it.

        Raises ValueError when the limit has no window, and needs one.
        """

    async def obtain(self, wants: Wants) -> bool:
        """Get as much room as there is for these. Returns soon; False when nobody could say how much there is."""

    def short(self, wants: Wants, now: float) -> bool:
        """Whether there is not so much, as far as was heard just now: to ask again would not help."""

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

    up = None

    def counter(self, limit: Limit) -> Counter:
        """See `SharedState`."""
        return own_counter(limit)

    async def obtain(self, wants: Wants) -> bool:  # noqa: ARG002 - there is no more
        """See `SharedState`."""
        return True

    def short(self, wants: Wants, now: float) -> bool:  # noqa: ARG002 - it knows it all
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
        from argosy.store.redis_quota_backend import RedisState
    except ModuleNotFoundError as error:
        raise ValueError(NO_CLIENT) from error
    return RedisState(url, password)


def open_answers(config: IdempotencyConfig, url: str | None, password: str | None) -> Answers:
    """Those that gateways share at a URL of Redis, as `open_shared` takes it; None: this gateway's own.

    Raises ValueError when it is no such URL, or redis-py is not installed.
    """
    own = MemoryAnswers(config)
    if url is None:
        return own
    try:
        from argosy.store.redis_idempotency_store import RedisAnswers
    except ModuleNotFoundError as error:
        raise ValueError(NO_CLIENT) from error
    return RedisAnswers(url, password, config, own)
