"""Answers that gateways keep together in Redis; while it is away, each keeps its own."""

from __future__ import annotations

import asyncio
import contextlib
import math
from functools import partial
from importlib.resources import files
from typing import Any

import msgspec
import structlog
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError

from argosy.store.idempotency_store import (
    CachedResponse,
    IdempotencyConfig,
    InFlightClaim,
    MemoryIdempotencyStore,
)
from argosy.store.redis_client import KEY_PREFIX, cancel_task, create_redis_client, describe_error

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.store")

COMMAND_TIMEOUT_S = 1.0
"""Longest that Redis is waited for: an answer may be large."""
STARTUP_TIMEOUT_S = 2.0
RETRY_INTERVAL_S = 0.25
"""How often a Redis that is away is looked for."""
CLAIM_TTL_S = 8.0
"""A claim that was not renewed for so long is that of a gateway that has died."""

_RENEW_SCRIPT = """
for i, name in ipairs(KEYS) do
  if redis.call('GET', name) == ARGV[i + 1] then
    redis.call('PEXPIRE', name, ARGV[1])
  end
end
"""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(InFlightClaim | CachedResponse).decode


class RedisIdempotencyStore:
    """The `Answers` of several gateways, in Redis 6 or later, or Valkey. Belongs to one event loop.

    What this gateway answered it keeps in `own` as well. Redis has at most as many bytes of answers as one gateway.
    """

    def __init__(
        self,
        url: str,
        password: str | None,
        config: IdempotencyConfig,
        local: MemoryIdempotencyStore,
        *,
        timeout_s: float = COMMAND_TIMEOUT_S,
        claim_ttl_s: float = CLAIM_TTL_S,
    ) -> None:
        """Raises ValueError when it is no URL of a Redis."""
        self._redis = create_redis_client(url, password, max(timeout_s, STARTUP_TIMEOUT_S))
        self._config = config
        self._local = local
        self._timeout_s = timeout_s
        self._claim_ttl_s = claim_ttl_s
        script = files("argosy.store").joinpath("answers.lua").read_text()
        self._write_script = self._redis.register_script(script)
        self._renew_script = self._redis.register_script(_RENEW_SCRIPT)
        self.is_connected: bool | None = None
        """Whether Redis answered when it was last asked; None: it never was."""
        self._pending_writes: dict[str, asyncio.Task[InFlightClaim | CachedResponse | None]] = {}
        """What is being put there, the last by each name."""
        self._renewal_task: asyncio.Task[None] | None = None

    async def claim(self, key: str, claim: InFlightClaim) -> InFlightClaim | CachedResponse | None:
        """See `Answers`: soon."""
        held = await self._local.claim(key, claim)
        if held is not None or not self.is_connected:
            return held
        try:
            held = await asyncio.shield(self._start_write(key, claim, claim, self._claim_ttl_s))
        except asyncio.CancelledError:
            self.settle_claim(key, claim, None)
            raise
        if held is not None:
            self._local.settle_claim(key, claim, None)
        return held

    def reserve_bytes(self, size_bytes: int) -> bool:
        """See `Answers`: in this gateway's memory."""
        return self._local.reserve_bytes(size_bytes)

    def release_bytes(self, size_bytes: int) -> None:
        """See `Answers`."""
        self._local.release_bytes(size_bytes)

    def settle_claim(self, key: str, claim: InFlightClaim, response: CachedResponse | None) -> None:
        """See `Answers`. Other gateways know it a moment later."""
        self._local.settle_claim(key, claim, response)
        if self.is_connected:
            self._start_write(key, claim, response, self._config.retention_s)

    async def start(self) -> None:
        """See `Answers`: a Redis that cannot be reached is looked for from now on."""
        await self._renew_claims(STARTUP_TIMEOUT_S)
        self._renewal_task = asyncio.create_task(self._run_renewals())

    async def close(self) -> None:
        """See `Answers`."""
        if self._renewal_task is not None:
            await cancel_task(self._renewal_task)
        while self._pending_writes:
            await asyncio.wait(self._pending_writes.values())
        await self._redis.aclose()

    async def _run_renewals(self) -> None:
        while True:
            await asyncio.sleep(self._claim_ttl_s / 4 if self.is_connected else RETRY_INTERVAL_S)
            if not self.is_connected:
                # Who answers that it must not be written to, is no primary any more: its name may be another's.
                with contextlib.suppress(RedisError, OSError):
                    await self._redis.connection_pool.disconnect()
            await self._renew_claims(self._timeout_s)

    async def _renew_claims(self, timeout_s: float) -> None:
        """Say of all claims that they are still running; it tells too whether Redis is there."""
        claims = dict(self._local.claims)
        told = [int(self._claim_ttl_s * 1000), *map(_encode, claims.values())]
        await self._run_script(
            self._renew_script, [_redis_key(name) for name in claims], told, timeout_s
        )

    def _start_write(
        self,
        key: str,
        claim: InFlightClaim,
        value: InFlightClaim | CachedResponse | None,
        ttl_s: float,
    ) -> asyncio.Task[InFlightClaim | CachedResponse | None]:
        """Put it there, after what is being put under the name: a task, whoever gives up waiting for it."""
        before = self._pending_writes.get(key)
        task = asyncio.create_task(self._write_after(before, key, claim, value, ttl_s))
        self._pending_writes[key] = task
        task.add_done_callback(partial(self._on_written, key))
        return task

    def _on_written(
        self, key: str, task: asyncio.Task[InFlightClaim | CachedResponse | None]
    ) -> None:
        if self._pending_writes.get(key) is task:
            del self._pending_writes[key]

    async def _write_after(
        self,
        previous: asyncio.Task[InFlightClaim | CachedResponse | None] | None,
        key: str,
        claim: InFlightClaim,
        value: InFlightClaim | CachedResponse | None,
        ttl_s: float,
    ) -> InFlightClaim | CachedResponse | None:
        """What somebody else has there; None too when Redis is away."""
        if previous is not None:
            await asyncio.wait({previous})
        keys = [_redis_key(key), f"{KEY_PREFIX}answers", f"{KEY_PREFIX}answers:bytes"]
        put = b"" if value is None else _encode(value)
        told = [_encode(claim), put, math.ceil(ttl_s * 1000), self._config.max_bytes]
        held = await self._run_script(self._write_script, keys, told, self._timeout_s)
        try:
            return None if held is None else _decode(held)
        except msgspec.DecodeError:  # of another version
            return None

    async def _run_script(
        self, script: AsyncScript, keys: list[str], arguments: list[Any], timeout_s: float
    ) -> bytes | None:
        """What a script answers; None too when Redis is away."""
        try:
            async with asyncio.timeout(timeout_s):
                answer: bytes | None = await script(keys=keys, args=arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait for it
            if self.is_connected is not False:
                log.warning("idempotency_store_degraded", reason=describe_error(error))
            self.is_connected = False
            return None
        if self.is_connected is False:
            log.info("idempotency_store_recovered")
        self.is_connected = True
        return answer


def _redis_key(key: str) -> str:
    return f"{KEY_PREFIX}answer:{key}"
