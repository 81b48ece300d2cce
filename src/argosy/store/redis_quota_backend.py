"""Quota backend in Redis. A gateway runs one exchange at a time and repeats it until it is answered."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import cast

import msgspec
import structlog
from redis.exceptions import RedisError

from argosy.policy import (
    ConcurrencyLease,
    ConcurrencyMeter,
    LeasedQuota,
    LeaseGrant,
    LeaseRequest,
    QuotaMeter,
    WindowLease,
    backoff_s,
)
from argosy.store.clock import Clock, steady_clock
from argosy.store.quota_meters import QuotaDemand, create_local_meter
from argosy.store.records import Limit
from argosy.store.redis_client import KEY_PREFIX, cancel_task, create_redis_client, describe_error

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.store")

EXCHANGE_TIMEOUT_S = 0.05
"""Maximum duration of an exchange. A request that arrives during an exchange waits for the next one as well."""
GATEWAY_TTL_S = 5.0
"""Silence after which a gateway counts as dead and its concurrency slots become free."""
EXCHANGE_INTERVAL_S = 0.05
STARTUP_TIMEOUT_S = 2.0
MAX_REQUESTS_PER_EXCHANGE = 500
"""Maximum number of lease requests in one exchange."""


class _ExchangeReply(msgspec.Struct, frozen=True):
    gateways: int
    grants: list[LeaseGrant]


@dataclass(frozen=True, slots=True)
class _ExchangeMessage:
    keys: list[str]
    body: bytes
    requests: list[tuple[LeasedQuota, LeaseRequest]]
    sent_at: float
    completion: asyncio.Future[None]
    """Resolved when the message was answered or Redis became unavailable."""


_decode = msgspec.msgpack.Decoder(_ExchangeReply).decode


class RedisQuotaBackend:
    """Quota backend in Redis 6 or later, or Valkey. Not thread-safe: use it from one event loop.

    Counts are exact while Redis runs and keeps its memory. A Redis that restarts empty is seeded from the ledger within
    seconds. Units that a dead gateway was granted and had not used stay charged. For a sliding window they return after
    the lease time, for a daily or monthly limit at the end of the period. Units of daily and monthly budgets return
    after `gateway_ttl_s`.
    """

    def __init__(
        self,
        url: str,
        password: str | None = None,
        *,
        clock: Clock = steady_clock,
        timeout_s: float = EXCHANGE_TIMEOUT_S,
        gateway_ttl_s: float = GATEWAY_TTL_S,
    ) -> None:
        self._redis = create_redis_client(url, password, timeout_s)
        self._clock = clock
        self._gateway_ttl_s = gateway_ttl_s
        script = files("argosy.store").joinpath("leases.lua").read_text()
        self._script = self._redis.register_script(script)
        self._gateway_id = uuid.uuid4().hex
        self._message_number = 0
        self._gateway_count = 1
        self.is_connected = False
        """Whether the last exchange, at most a second ago, succeeded."""
        self._pending_leases: dict[LeasedQuota, None] = {}
        """Leases of the next message, in order."""
        self._active_leases: dict[LeasedQuota, None] = {}
        """Leases that hold units or must report usage."""
        self._unanswered_message: _ExchangeMessage | None = None
        self._last_exchange_at = -math.inf
        self._next_exchange: asyncio.Future[None] | None = None
        """Resolved when the next message was answered."""
        self._wake_event = asyncio.Event()
        self._startup_done = asyncio.Event()
        self._exchange_task: asyncio.Task[None] | None = None

    def create_meter(self, limit: Limit) -> QuotaMeter:
        """Create a meter. Meters of one limit for different models, as after an alias moved, count separately."""
        meter = create_local_meter(limit)
        name = f"{KEY_PREFIX}limit:{limit.id}" + (f":{limit.model}" if limit.model else "")
        if isinstance(meter, ConcurrencyMeter):
            return ConcurrencyLease(name, meter, self._gateway_ttl_s)
        lease = WindowLease(name, meter)
        lease.on_report_due = partial(self._active_leases.__setitem__, lease, None)
        return lease

    async def acquire(self, demand: QuotaDemand) -> bool:
        """Acquire available units within two exchanges."""
        if not self.is_connected:
            return False
        if self.is_short(demand, self._clock()):
            return True
        for lease, units, free_units in _to_leases(demand):
            self._request_units(lease, units, free_units)
        if self._next_exchange is None:
            self._next_exchange = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next_exchange)
        return self.is_connected

    def is_short(self, demand: QuotaDemand, now: float) -> bool:
        return any(lease.is_exhausted(units, now) for lease, units, _ in _to_leases(demand))

    def overdraw(self, demand: QuotaDemand, now: float) -> bool:
        """Charge a running request immediately, until a grant shows that the units are not available."""
        if not self.is_connected:
            return False
        leases = _to_leases(demand)
        if not all(lease.can_overdraw(units, now) for lease, units, _ in leases):
            return False
        for lease, units, free_units in leases:
            lease.overdraw(units, now)
            self._request_units(lease, units, free_units)
        return True

    def allow_degraded(self, demand: QuotaDemand, now: float) -> bool:
        """Admit demand up to this gateway's even share of the limit."""
        leases = _to_leases(demand)
        if self.is_connected or not all(
            lease.is_within_even_share(free_units, self._gateway_count, now)
            for lease, _, free_units in leases
        ):
            return False
        for lease, units, _ in leases:
            lease.overdraw(units, now)
            self._active_leases[lease] = None
        return True

    async def start(self) -> None:
        """Start the exchanges and wait at most `STARTUP_TIMEOUT_S` for the first one."""
        self._exchange_task = asyncio.create_task(self._run_exchanges())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STARTUP_TIMEOUT_S):
                await self._startup_done.wait()

    async def close(self) -> None:
        """Stop the exchanges, return unused units and deregister this gateway."""
        if self._exchange_task is not None:
            await cancel_task(self._exchange_task)
        with contextlib.suppress(RedisError, OSError):
            if self.is_connected:
                for _ in range(2):  # the second round confirms that all leases are idle
                    self._pending_leases |= self._active_leases
                    while self._pending_leases or self._unanswered_message:
                        await self._run_exchange()
                await self._redis.zrem(f"{KEY_PREFIX}gateways", self._gateway_id)
        self._release_waiters()
        await self._redis.aclose()

    def _request_units(self, lease: LeasedQuota, units: int, free_units: int) -> None:
        lease.request_units(units, free_units)
        self._pending_leases[lease] = self._active_leases[lease] = None
        self._wake_event.set()

    # --- exchanges -------------------------------------------------------------------------------

    async def _run_exchanges(self) -> None:
        failures = 0
        while True:
            try:
                if not self.is_connected:
                    # A hanging Redis would run the script much later.
                    await self._redis.ping()
                await self._run_exchange()
            except Exception as error:  # noqa: BLE001 - after any error, waiters must be released
                self._on_disconnected(error)
                failures += 1
                # A server that rejects writes is no longer the primary. Reconnect, as the host name may have moved.
                with contextlib.suppress(RedisError, OSError):
                    await self._redis.connection_pool.disconnect()
                jitter = random.random()  # noqa: S311 - not for security
                await asyncio.sleep(backoff_s(failures, jitter, max_s=2.0))
            else:
                self._on_connected()
                failures = 0
                await self._wait_for_next()

    async def _wait_for_next(self) -> None:
        """Wait until leases are pending or the next heartbeat is due."""
        while not self._pending_leases:
            self._wake_event.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(
                    EXCHANGE_INTERVAL_S if self._active_leases else self._gateway_ttl_s / 5
                ):
                    await self._wake_event.wait()
            now = self._clock()
            self._pending_leases |= {
                lease: None for lease in self._active_leases if lease.is_due(now)
            }
            if now >= self._last_exchange_at + self._gateway_ttl_s / 5:
                return

    async def _run_exchange(self) -> None:
        """Send the next message, or the unanswered one again, and apply the grants. Raises redis-py's errors."""
        message = self._unanswered_message = self._unanswered_message or self._compose_message()
        encoded = await self._script(keys=message.keys, args=[message.body])
        reply = _decode(encoded)
        self._unanswered_message = None
        self._gateway_count = reply.gateways
        self._last_exchange_at = now = self._clock()
        for (lease, request), grant in zip(message.requests, reply.grants, strict=True):
            lease.apply_grant(request, grant, message.sent_at, now)
            if lease.is_idle:
                self._active_leases.pop(lease, None)
        _resolve_future(message.completion)

    def _compose_message(self) -> _ExchangeMessage:
        now = self._clock()
        leases = list(self._pending_leases)[:MAX_REQUESTS_PER_EXCHANGE]
        for lease in leases:
            del self._pending_leases[lease]
        requests = [(lease, lease.build_request(now)) for lease in leases]
        self._message_number += 1
        message = {
            "gateway": self._gateway_id,
            "number": self._message_number,
            "alive_s": self._gateway_ttl_s,
            "asks": [request for _, request in requests],
        }
        body = msgspec.msgpack.encode(message)
        gateway_key = f"{KEY_PREFIX}gateway:{self._gateway_id}"
        keys = [gateway_key, f"{KEY_PREFIX}gateways", *(lease.name for lease, _ in requests)]
        completion: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self._pending_leases:  # otherwise waiters need the next message as well
            completion, self._next_exchange = self._next_exchange or completion, None
        return _ExchangeMessage(keys, body, requests, now, completion)

    def _on_disconnected(self, error: Exception) -> None:
        if self.is_connected or not self._startup_done.is_set():
            self._startup_done.set()
            log.warning("quota_backend_unavailable", reason=describe_error(error))
        self._release_waiters()

    def _release_waiters(self) -> None:
        """Mark Redis as disconnected and release all callers that wait for an exchange."""
        self.is_connected = False
        if self._unanswered_message is not None:
            _resolve_future(self._unanswered_message.completion)
        if self._next_exchange is not None:
            _resolve_future(self._next_exchange)
            self._next_exchange = None

    def _on_connected(self) -> None:
        if not self.is_connected:
            log.info("quota_backend_connected", gateways=self._gateway_count)
        self.is_connected = True
        self._startup_done.set()


def _resolve_future(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _to_leases(demand: QuotaDemand) -> Sequence[tuple[LeasedQuota, int, int]]:
    """Cast the meters, because all meters of this backend are leases."""
    return cast("Sequence[tuple[LeasedQuota, int, int]]", demand)
