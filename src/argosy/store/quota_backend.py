"""What gateways share at once: how much of each limit is in use, and kept answers. One alone needs no Redis."""

from __future__ import annotations

from typing import Protocol

from argosy.policy import QuotaMeter
from argosy.store.idempotency_store import (
    IdempotencyConfig,
    IdempotencyStore,
    MemoryIdempotencyStore,
)
from argosy.store.quota_meters import QuotaDemand, create_local_meter
from argosy.store.records import Limit

NO_REDIS_CLIENT = "Redis needs a client. Install it: pip install 'argosy[redis]'."


class QuotaBackend(Protocol):
    """Where the counters of limits come from, and where they get their room."""

    @property
    def is_connected(self) -> bool | None:
        """Whether somebody can say now how much is in use by all gateways; None: this one is alone."""

    def create_meter(self, limit: Limit) -> QuotaMeter:
        """A new counter for a limit; one for the same limit at other gateways counts with it.

        Raises ValueError when the limit has no window, and needs one.
        """

    async def acquire(self, demand: QuotaDemand) -> bool:
        """Get as much room as there is for these. Returns soon; False when nobody could say how much there is."""

    def is_short(self, demand: QuotaDemand, now: float) -> bool:
        """Whether there is not so much, as far as was heard just now: to ask again would not help."""

    def overdraw(self, demand: QuotaDemand, now: float) -> bool:
        """Give room to something that runs, at this very moment, while more is asked for; False: it must stop."""

    def allow_degraded(self, demand: QuotaDemand, now: float) -> bool:
        """Give room at this very moment although nobody can say how much there is; False: it would be too much."""

    async def start(self) -> None:
        """Be ready, or nearly so: a state that cannot be reached is looked for from now on."""

    async def close(self) -> None:
        """Give back what is held."""


class LocalQuotaBackend:
    """One gateway alone: its own counters know it all."""

    is_connected = None

    def create_meter(self, limit: Limit) -> QuotaMeter:
        """See `SharedState`."""
        return create_local_meter(limit)

    async def acquire(self, demand: QuotaDemand) -> bool:  # noqa: ARG002 - there is no more
        """See `SharedState`."""
        return True

    def is_short(self, demand: QuotaDemand, now: float) -> bool:  # noqa: ARG002 - it knows it all
        """See `SharedState`."""
        return True

    def overdraw(self, demand: QuotaDemand, now: float) -> bool:  # noqa: ARG002 - there is no more
        """See `SharedState`."""
        return False

    def allow_degraded(self, demand: QuotaDemand, now: float) -> bool:  # noqa: ARG002 - never needed
        """See `SharedState`."""
        return False

    async def start(self) -> None:
        """See `SharedState`."""

    async def close(self) -> None:
        """See `SharedState`."""


def create_quota_backend(url: str | None, password: str | None = None) -> QuotaBackend:
    """The state at a URL of Redis (`redis://`, `rediss://`, `unix://`); None: this gateway is alone.

    Raises ValueError when it is no such URL, or redis-py is not installed.
    """
    if url is None:
        return LocalQuotaBackend()
    try:
        from argosy.store.redis_quota_backend import RedisQuotaBackend
    except ModuleNotFoundError as error:
        raise ValueError(NO_REDIS_CLIENT) from error
    return RedisQuotaBackend(url, password)


def create_idempotency_store(
    config: IdempotencyConfig, url: str | None, password: str | None
) -> IdempotencyStore:
    """Those that gateways share at a URL of Redis, as `open_shared` takes it; None: this gateway's own.

    Raises ValueError when it is no such URL, or redis-py is not installed.
    """
    own = MemoryIdempotencyStore(config)
    if url is None:
        return own
    try:
        from argosy.store.redis_idempotency_store import RedisIdempotencyStore
    except ModuleNotFoundError as error:
        raise ValueError(NO_REDIS_CLIENT) from error
    return RedisIdempotencyStore(url, password, config, own)
