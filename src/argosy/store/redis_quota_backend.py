"""Limits that many gateways share through Redis: one exchange at a time, repeated until it is answered."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import uuid
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
"""Longest that an exchange may take; who comes while one is under way waits for the next one too."""
GATEWAY_TTL_S = 5.0
"""A gateway that was silent for so long has died: what it ran at a time is free."""
EXCHANGE_INTERVAL_S = 0.05
STARTUP_TIMEOUT_S = 2.0
MAX_REQUESTS_PER_EXCHANGE = 500
"""Asks in one exchange."""


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
    """Done when it was answered, or Redis was given up on."""


_decode = msgspec.msgpack.Decoder(_ExchangeReply).decode


class RedisQuotaBackend:
    """A `SharedState` in Redis 6 or later, or Valkey. Belongs to one event loop.

    Counts are exact while Redis is up and keeps its memory. A Redis that comes back empty learns what was used from the
    ledger, within seconds. A gateway that dies takes with it what it was granted and had not used: for a lease's time,
    or of a day's or month's limit until that is over.
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
        """See `SharedState`: as of the last exchange, at most a second ago."""
        self._pending_leases: dict[LeasedQuota, None] = {}
        """Leases to ask for with the next message, in order."""
        self._active_leases: dict[LeasedQuota, None] = {}
        """Those that hold or owe something."""
        self._unanswered_message: _ExchangeMessage | None = None
        self._last_exchange_at = -math.inf
        self._next_exchange: asyncio.Future[None] | None = None
        """Done when the next message was answered."""
        self._wake_event = asyncio.Event()
        self._startup_done = asyncio.Event()
        self._exchange_task: asyncio.Task[None] | None = None

    def create_meter(self, limit: Limit) -> QuotaMeter:
        """See `SharedState`. One for the same limit and another model (its alias moved) counts by itself."""
        own = create_local_meter(limit)
        name = f"{KEY_PREFIX}limit:{limit.id}" + (f":{limit.model}" if limit.model else "")
        if isinstance(own, ConcurrencyMeter):
            return ConcurrencyLease(name, own, self._gateway_ttl_s)
        lease = WindowLease(name, own)
        lease.on_report_due = partial(self._active_leases.__setitem__, lease, None)
        return lease

    async def acquire(self, demand: QuotaDemand) -> bool:
        """See `SharedState`: within two exchanges."""
        if not self.is_connected:
            return False
        if self.is_short(demand, self._clock()):
            return True
        for lease, units in _to_leases(demand):
            self._request_units(lease, units)
        if self._next_exchange is None:
            self._next_exchange = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next_exchange)
        return self.is_connected

    def is_short(self, demand: QuotaDemand, now: float) -> bool:
        """See `SharedState`."""
        return any(lease.is_exhausted(units, now) for lease, units in _to_leases(demand))

    def overdraw(self, demand: QuotaDemand, now: float) -> bool:
        """See `SharedState`: until Redis has said that there is not so much."""
        if not self.is_connected:
            return False
        leases = _to_leases(demand)
        if not all(lease.can_overdraw(units, now) for lease, units in leases):
            return False
        for lease, units in leases:
            lease.overdraw(units, now)
            self._request_units(lease, units)
        return True

    def allow_degraded(self, demand: QuotaDemand, now: float) -> bool:
        """See `SharedState`: up to this gateway's even share."""
        leases = _to_leases(demand)
        if self.is_connected or not all(
            lease.is_within_even_share(units, self._gateway_count, now) for lease, units in leases
        ):
            return False
        for lease, units in leases:
            lease.overdraw(units, now)
            self._active_leases[lease] = None
        return True

    async def start(self) -> None:
        """See `SharedState`."""
        self._exchange_task = asyncio.create_task(self._run_exchanges())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STARTUP_TIMEOUT_S):
                await self._startup_done.wait()

    async def close(self) -> None:
        """See `SharedState`."""
        if self._exchange_task is not None:
            await cancel_task(self._exchange_task)
        with contextlib.suppress(RedisError, OSError):
            if self.is_connected:
                for _ in range(2):  # with the second all are seen to be idle
                    self._pending_leases |= self._active_leases
                    while self._pending_leases or self._unanswered_message:
                        await self._run_exchange()
                await self._redis.zrem(f"{KEY_PREFIX}gateways", self._gateway_id)
        self._release_waiters()
        await self._redis.aclose()

    def _request_units(self, lease: LeasedQuota, units: int) -> None:
        lease.request_units(units)
        self._pending_leases[lease] = self._active_leases[lease] = None
        self._wake_event.set()

    # --- exchanges -------------------------------------------------------------------------------

    async def _run_exchanges(self) -> None:
        failures = 0
        while True:
            try:
                if not self.is_connected:
                    # What is asked of a Redis that hangs would be done much later.
                    await self._redis.ping()
                await self._run_exchange()
            except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait for it
                self._on_disconnected(error)
                failures += 1
                # Who answers that it must not be written to, is no primary any more: its name may be another's.
                with contextlib.suppress(RedisError, OSError):
                    await self._redis.connection_pool.disconnect()
                draw = random.random()  # noqa: S311 - jitter
                await asyncio.sleep(backoff_s(failures, draw, max_s=2.0))
            else:
                self._on_connected()
                failures = 0
                await self._wait_for_next()

    async def _wait_for_next(self) -> None:
        """Until somebody wants something, or it is time to be heard of."""
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
        """Say what is to be said, or what was not answered yet. Raises what redis-py raises."""
        message = self._unanswered_message = self._unanswered_message or self._compose_message()
        packed = await self._script(keys=message.keys, args=[message.body])
        answer = _decode(packed)
        self._unanswered_message = None
        self._gateway_count = answer.gateways
        self._last_exchange_at = now = self._clock()
        for (lease, ask), grant in zip(message.requests, answer.grants, strict=True):
            lease.apply_grant(ask, grant, message.sent_at, now)
            if lease.is_idle:
                self._active_leases.pop(lease, None)
        _resolve_future(message.completion)

    def _compose_message(self) -> _ExchangeMessage:
        now = self._clock()
        leases = list(self._pending_leases)[:MAX_REQUESTS_PER_EXCHANGE]
        for lease in leases:
            del self._pending_leases[lease]
        asked = [(lease, lease.build_request(now)) for lease in leases]
        self._message_number += 1
        message = {
            "gateway": self._gateway_id,
            "number": self._message_number,
            "alive_s": self._gateway_ttl_s,
            "asks": [ask for _, ask in asked],
        }
        body = msgspec.msgpack.encode(message)
        own = f"{KEY_PREFIX}gateway:{self._gateway_id}"
        keys = [own, f"{KEY_PREFIX}gateways", *(lease.name for lease, _ in asked)]
        heard: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self._pending_leases:  # else those who wait wait for the next one
            heard, self._next_exchange = self._next_exchange or heard, None
        return _ExchangeMessage(keys, body, asked, now, heard)

    def _on_disconnected(self, error: Exception) -> None:
        if self.is_connected or not self._startup_done.is_set():
            self._startup_done.set()
            log.warning("quota_backend_unavailable", reason=describe_error(error))
        self._release_waiters()

    def _release_waiters(self) -> None:
        """Nobody waits any longer."""
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


def _to_leases(demand: QuotaDemand) -> list[tuple[LeasedQuota, int]]:
    """All counters of this state are leases."""
    return [(cast("LeasedQuota", counter), units) for counter, units in demand]
