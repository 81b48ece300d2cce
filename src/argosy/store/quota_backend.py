"""Interface to limit counters that gateways share, with a local implementation, and factories for shared state.

A gateway that runs alone needs no Redis.
"""

from __future__ import annotations

from typing import Protocol

from argosy.extras import install_command
from argosy.policy import QuotaMeter
from argosy.store.idempotency_store import (
    IdempotencyConfig,
    IdempotencyStore,
    MemoryIdempotencyStore,
)
from argosy.store.quota_meters import QuotaDemand, create_local_meter
from argosy.store.records import Limit

NO_REDIS_CLIENT = f"Redis needs a client library. Install it with: {install_command('redis')}"


class QuotaBackend(Protocol):
    """Source of quota meters, through which meters acquire units of shared limits."""

    @property
    def is_connected(self) -> bool | None:
        """Whether the shared counters are reachable. None if this gateway runs alone."""

    def create_meter(self, limit: Limit) -> QuotaMeter:
        """Create a meter for a limit, which shares its count with meters of the same limit at other gateways.

        Raises:
            ValueError: The limit's window is missing or unknown.
        """

    async def acquire(self, demand: QuotaDemand) -> bool:
        """Acquire available units for the demand. Returns promptly; False if the shared counters are unreachable."""

    def is_short(self, demand: QuotaDemand, now: float) -> bool:
        """Whether recent grants show that the demand exceeds what is available, so that acquiring would not help."""

    def overdraw(self, demand: QuotaDemand, now: float) -> bool:
        """Charge a running request immediately and request the units afterwards. False if the request must stop."""

    def allow_degraded(self, demand: QuotaDemand, now: float) -> bool:
        """Admit the demand while the shared counters are unreachable. False if it exceeds this gateway's share."""

    async def start(self) -> None:
        """Connect, or start reconnecting in the background if the shared counters are unreachable."""

    async def close(self) -> None:
        """Return all units that are held but not used."""


class LocalQuotaBackend:
    """Quota backend of a gateway that runs alone, whose local meters are complete."""

    is_connected = None

    def create_meter(self, limit: Limit) -> QuotaMeter:
        return create_local_meter(limit)

    async def acquire(self, demand: QuotaDemand) -> bool:  # noqa: ARG002 - all units are local
        return True

    def is_short(self, demand: QuotaDemand, now: float) -> bool:  # noqa: ARG002 - local meters are complete
        return True

    def overdraw(self, demand: QuotaDemand, now: float) -> bool:  # noqa: ARG002 - all units are local
        return False

    def allow_degraded(self, demand: QuotaDemand, now: float) -> bool:  # noqa: ARG002 - never disconnected
        return False

    async def start(self) -> None:
        """Do nothing, because there is no shared state."""

    async def close(self) -> None:
        """Do nothing, because there is no shared state."""


def create_quota_backend(url: str | None, password: str | None = None) -> QuotaBackend:
    """Create the quota backend at a Redis URL (`redis://`, `rediss://`, `unix://`), or a local one for None.

    Raises:
        ValueError: The URL is not valid, or redis-py is not installed.
    """
    if url is None:
        return LocalQuotaBackend()
    try:
        from argosy.store.redis_quota_backend import RedisQuotaBackend
    except ModuleNotFoundError as error:
        raise ValueError(NO_REDIS_CLIENT) from error
    return RedisQuotaBackend(url, password)


def create_idempotency_store(
    config: IdempotencyConfig, url: str | None, password: str | None, namespace: str = "answer"
) -> IdempotencyStore:
    """Create the idempotency store at a Redis URL as in `create_quota_backend`, or one in memory for None.

    Stores with different namespaces share no responses and no bounds.

    Raises:
        ValueError: The URL is not valid, or redis-py is not installed.
    """
    local = MemoryIdempotencyStore(config)
    if url is None:
        return local
    try:
        from argosy.store.redis_idempotency_store import RedisIdempotencyStore
    except ModuleNotFoundError as error:
        raise ValueError(NO_REDIS_CLIENT) from error
    return RedisIdempotencyStore(url, password, config, local, namespace=namespace)
