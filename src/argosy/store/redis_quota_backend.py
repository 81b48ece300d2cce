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

from argosy.policy import Ask, Concurrency, Counter, Grant, Lease, Shared, SlotLease, backoff_s
from argosy.store.clock import Clock, steady
from argosy.store.quota_meters import Wants, own_counter
from argosy.store.records import Limit
from argosy.store.redis_client import PREFIX, end, reason, redis_client

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.store")

WAIT_S = 0.05
"""Longest that an exchange may take; who comes while one is under way waits for the next one too."""
ALIVE_S = 5.0
"""A gateway that was silent for so long has died: what it ran at a time is free."""
TICK_S = 0.05
START_S = 2.0
MOST = 500
"""Asks in one exchange."""


class _Answer(msgspec.Struct, frozen=True):
    gateways: int
    grants: list[Grant]


@dataclass(frozen=True, slots=True)
class _Message:
    keys: list[str]
    body: bytes
    leases: list[tuple[Shared, Ask]]
    asked_at: float
    heard: asyncio.Future[None]
    """Done when it was answered, or Redis was given up on."""


_decode = msgspec.msgpack.Decoder(_Answer).decode


class RedisState:
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
        clock: Clock = steady,
        wait_s: float = WAIT_S,
        alive_s: float = ALIVE_S,
    ) -> None:
        self._redis = redis_client(url, password, wait_s)
        self._clock = clock
        self._alive_s = alive_s
        script = files("argosy.store").joinpath("leases.lua").read_text()
        self._script = self._redis.register_script(script)
        self._gateway = uuid.uuid4().hex
        self._number = 0
        self._gateways = 1
        self.up = False
        """See `SharedState`: as of the last exchange, at most a second ago."""
        self._wanting: dict[Shared, None] = {}
        """Leases to ask for with the next message, in order."""
        self._active: dict[Shared, None] = {}
        """Those that hold or owe something."""
        self._message: _Message | None = None
        self._heard_at = -math.inf
        self._next: asyncio.Future[None] | None = None
        """Done when the next message was answered."""
        self._wake = asyncio.Event()
        self._found = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def counter(self, limit: Limit) -> Counter:
        """See `SharedState`. One for the same limit and another model (its alias moved) counts by itself."""
        own = own_counter(limit)
        name = f"{PREFIX}limit:{limit.id}" + (f":{limit.model}" if limit.model else "")
        if isinstance(own, Concurrency):
            return SlotLease(name, own, self._alive_s)
        lease = Lease(name, own)
        lease.on_news = partial(self._active.__setitem__, lease, None)
        return lease

    async def obtain(self, wants: Wants) -> bool:
        """See `SharedState`: within two exchanges."""
        if not self.up:
            return False
        if self.short(wants, self._clock()):
            return True
        for lease, units in _leases(wants):
            self._want(lease, units)
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next)
        return self.up

    def short(self, wants: Wants, now: float) -> bool:
        """See `SharedState`."""
        return any(lease.dry(units, now) for lease, units in _leases(wants))

    def lend(self, wants: Wants, now: float) -> bool:
        """See `SharedState`: until Redis has said that there is not so much."""
        if not self.up:
            return False
        leases = _leases(wants)
        if not all(lease.lends(units, now) for lease, units in leases):
            return False
        for lease, units in leases:
            lease.lend(units, now)
            self._want(lease, units)
        return True

    def trust(self, wants: Wants, now: float) -> bool:
        """See `SharedState`: up to this gateway's even share."""
        leases = _leases(wants)
        if self.up or not all(lease.affords(units, self._gateways, now) for lease, units in leases):
            return False
        for lease, units in leases:
            lease.lend(units, now)
            self._active[lease] = None
        return True

    async def start(self) -> None:
        """See `SharedState`."""
        self._task = asyncio.create_task(self._run())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                await self._found.wait()

    async def close(self) -> None:
        """See `SharedState`."""
        if self._task is not None:
            await end(self._task)
        with contextlib.suppress(RedisError, OSError):
            if self.up:
                for _ in range(2):  # with the second all are seen to be idle
                    self._wanting |= self._active
                    while self._wanting or self._message:
                        await self._exchange()
                await self._redis.zrem(f"{PREFIX}gateways", self._gateway)
        self._release()
        await self._redis.aclose()

    def _want(self, lease: Shared, units: int) -> None:
        lease.want(units)
        self._wanting[lease] = self._active[lease] = None
        self._wake.set()

    # --- exchanges -------------------------------------------------------------------------------

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                if not self.up:
                    # What is asked of a Redis that hangs would be done much later.
                    await self._redis.ping()
                await self._exchange()
            except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait for it
                self._lost(error)
                failures += 1
                # Who answers that it must not be written to, is no primary any more: its name may be another's.
                with contextlib.suppress(RedisError, OSError):
                    await self._redis.connection_pool.disconnect()
                draw = random.random()  # noqa: S311 - jitter
                await asyncio.sleep(backoff_s(failures, draw, most_s=2.0))
            else:
                self._reached()
                failures = 0
                await self._rest()

    async def _rest(self) -> None:
        """Until somebody wants something, or it is time to be heard of."""
        while not self._wanting:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S if self._active else self._alive_s / 5):
                    await self._wake.wait()
            now = self._clock()
            self._wanting |= {lease: None for lease in self._active if lease.due(now)}
            if now >= self._heard_at + self._alive_s / 5:
                return

    async def _exchange(self) -> None:
        """Say what is to be said, or what was not answered yet. Raises what redis-py raises."""
        message = self._message = self._message or self._compose()
        packed = await self._script(keys=message.keys, args=[message.body])
        answer = _decode(packed)
        self._message = None
        self._gateways = answer.gateways
        self._heard_at = now = self._clock()
        for (lease, ask), grant in zip(message.leases, answer.grants, strict=True):
            lease.answer(ask, grant, message.asked_at, now)
            if lease.idle:
                self._active.pop(lease, None)
        _resolve(message.heard)

    def _compose(self) -> _Message:
        now = self._clock()
        leases = list(self._wanting)[:MOST]
        for lease in leases:
            del self._wanting[lease]
        asked = [(lease, lease.ask(now)) for lease in leases]
        self._number += 1
        message = {
            "gateway": self._gateway,
            "number": self._number,
            "alive_s": self._alive_s,
            "asks": [ask for _, ask in asked],
        }
        body = msgspec.msgpack.encode(message)
        own = f"{PREFIX}gateway:{self._gateway}"
        keys = [own, f"{PREFIX}gateways", *(lease.name for lease, _ in asked)]
        heard: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self._wanting:  # else those who wait wait for the next one
            heard, self._next = self._next or heard, None
        return _Message(keys, body, asked, now, heard)

    def _lost(self, error: Exception) -> None:
        if self.up or not self._found.is_set():
            self._found.set()
            log.warning("shared_state_lost", reason=reason(error))
        self._release()

    def _release(self) -> None:
        """Nobody waits any longer."""
        self.up = False
        if self._message is not None:
            _resolve(self._message.heard)
        if self._next is not None:
            _resolve(self._next)
            self._next = None

    def _reached(self) -> None:
        if not self.up:
            log.info("shared_state_reached", gateways=self._gateways)
        self.up = True
        self._found.set()


def _resolve(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _leases(wants: Wants) -> list[tuple[Shared, int]]:
    """All counters of this state are leases."""
    return [(cast("Shared", counter), units) for counter, units in wants]
