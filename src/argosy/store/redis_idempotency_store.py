"""Idempotency store that gateways share in Redis. While Redis is unavailable, each gateway uses its own memory."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
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
"""Maximum wait for a reply of Redis. Responses may be large."""
STARTUP_TIMEOUT_S = 2.0
PURGE_BATCH_SIZE = 500
"""Keys that are deleted by one command."""
RETRY_INTERVAL_S = 0.25
"""Interval of reconnection attempts while Redis is unavailable."""
CLAIM_TTL_S = 8.0
"""Time without renewal after which a claim expires, because its gateway has died."""

_RENEW_SCRIPT = """
for i, name in ipairs(KEYS) do
  if redis.call('GET', name) == ARGV[i + 1] then
    redis.call('PEXPIRE', name, ARGV[1])
  end
end
"""
_Existing = InFlightClaim | CachedResponse | None
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(InFlightClaim | CachedResponse).decode


class RedisIdempotencyStore:
    """Idempotency store of several gateways in Redis 6 or later, or Valkey.

    The responses of this gateway are stored in `local` as well. `max_bytes` limits each of the two. Not thread-safe:
    use it from one event loop.
    """

    def __init__(
        self,
        url: str,
        password: str | None,
        config: IdempotencyConfig,
        local: MemoryIdempotencyStore,
        *,
        namespace: str = "answer",
        timeout_s: float = COMMAND_TIMEOUT_S,
        claim_ttl_s: float = CLAIM_TTL_S,
    ) -> None:
        """Raise ValueError if the URL is not a Redis URL."""
        self._redis = create_redis_client(url, password, max(timeout_s, STARTUP_TIMEOUT_S))
        self._config = config
        self._local = local
        self._timeout_s = timeout_s
        self._claim_ttl_s = claim_ttl_s
        self._prefix = f"{KEY_PREFIX}{namespace}"
        script = files("argosy.store").joinpath("idempotency.lua").read_text()
        self._write_script = self._redis.register_script(script)
        self._renew_script = self._redis.register_script(_RENEW_SCRIPT)
        self.is_connected: bool | None = None
        """Whether the last command succeeded. None before the first command."""
        self._pending_writes: dict[str, asyncio.Task[_Existing]] = {}
        """Last pending write of each key."""
        self._renewal_task: asyncio.Task[None] | None = None

    async def claim(self, key: str, claim: InFlightClaim) -> InFlightClaim | CachedResponse | None:
        """Claim a key locally and in Redis, within the command timeout."""
        existing = await self._local.claim(key, claim)
        if existing is not None or not self.is_connected:
            return existing
        try:
            existing = await asyncio.shield(self._start_write(key, claim, claim, self._claim_ttl_s))
        except asyncio.CancelledError:
            self.settle_claim(key, claim, None)
            raise
        if existing is not None:
            self._local.settle_claim(key, claim, None)
        return existing

    async def forget(self, key: str) -> None:
        """Remove a response locally and in Redis. Without Redis other gateways keep it."""
        await self._local.forget(key)
        if key in self._pending_writes:
            await asyncio.wait({self._pending_writes[key]})
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._redis.delete(self._redis_key(key))
        except (RedisError, OSError, TimeoutError):
            self.is_connected = False

    async def purge(self, matches: Callable[[str], bool]) -> int:
        """Remove responses locally and in Redis. Returns the larger number."""
        purged = await self._local.purge(matches)
        try:
            async with asyncio.timeout(STARTUP_TIMEOUT_S):
                members = [each async for each, _ in self._redis.zscan_iter(f"{self._prefix}s")]
                prefix = f"{self._prefix}:"
                names = {each.decode().partition(" ")[2] for each in members}
                found = [name for name in names if matches(name.removeprefix(prefix))]
                for start in range(0, len(found), PURGE_BATCH_SIZE):
                    await self._redis.delete(*found[start : start + PURGE_BATCH_SIZE])
        except (RedisError, OSError, TimeoutError):
            self.is_connected = False
            raise
        return max(purged, len(found))

    def reserve_bytes(self, size_bytes: int) -> bool:
        """Reserve memory in this gateway."""
        return self._local.reserve_bytes(size_bytes)

    def release_bytes(self, size_bytes: int) -> None:
        """Release memory in this gateway."""
        self._local.release_bytes(size_bytes)

    def settle_claim(self, key: str, claim: InFlightClaim, response: CachedResponse | None) -> None:
        """End a claim. Other gateways see the result shortly afterwards."""
        self._local.settle_claim(key, claim, response)
        if self.is_connected:
            self._start_write(key, claim, response, self._config.retention_s)

    async def start(self) -> None:
        """Connect within `STARTUP_TIMEOUT_S`, or reconnect in the background."""
        await self._renew_claims(STARTUP_TIMEOUT_S)
        self._renewal_task = asyncio.create_task(self._run_renewals())

    async def close(self) -> None:
        """Finish pending writes and disconnect."""
        if self._renewal_task is not None:
            await cancel_task(self._renewal_task)
        while self._pending_writes:
            await asyncio.wait(self._pending_writes.values())
        await self._redis.aclose()

    async def _run_renewals(self) -> None:
        while True:
            await asyncio.sleep(self._claim_ttl_s / 4 if self.is_connected else RETRY_INTERVAL_S)
            if not self.is_connected:
                # A server that rejects writes is no longer the primary. Reconnect, as the host name may have moved.
                with contextlib.suppress(RedisError, OSError):
                    await self._redis.connection_pool.disconnect()
            await self._renew_claims(self._timeout_s)

    async def _renew_claims(self, timeout_s: float) -> None:
        """Extend the TTL of all running claims, which also checks the connection."""
        claims = dict(self._local.claims)
        arguments = [int(self._claim_ttl_s * 1000), *map(_encode, claims.values())]
        await self._run_script(
            self._renew_script, [self._redis_key(name) for name in claims], arguments, timeout_s
        )

    def _start_write(
        self,
        key: str,
        claim: InFlightClaim,
        value: _Existing,
        ttl_s: float,
    ) -> asyncio.Task[_Existing]:
        """Start a task that writes a value after pending writes of the key. Cancelled waiters do not stop it."""
        previous = self._pending_writes.get(key)
        task = asyncio.create_task(self._write_after(previous, key, claim, value, ttl_s))
        self._pending_writes[key] = task
        task.add_done_callback(partial(self._on_written, key))
        return task

    def _on_written(self, key: str, task: asyncio.Task[_Existing]) -> None:
        if self._pending_writes.get(key) is task:
            del self._pending_writes[key]

    async def _write_after(
        self,
        previous: asyncio.Task[_Existing] | None,
        key: str,
        claim: InFlightClaim,
        value: _Existing,
        ttl_s: float,
    ) -> _Existing:
        """Write a value after `previous`.

        Returns:
            The value of another claim that holds the key, or None on success or if Redis is unavailable.
        """
        if previous is not None:
            await asyncio.wait({previous})
        keys = [self._redis_key(key), f"{self._prefix}s", f"{self._prefix}s:bytes"]
        encoded = b"" if value is None else _encode(value)
        arguments = [_encode(claim), encoded, math.ceil(ttl_s * 1000), self._config.max_bytes]
        existing = await self._run_script(self._write_script, keys, arguments, self._timeout_s)
        try:
            return None if existing is None else _decode(existing)
        except msgspec.DecodeError:  # written by another version
            return None

    async def _run_script(
        self, script: AsyncScript, keys: list[str], arguments: list[Any], timeout_s: float
    ) -> bytes | None:
        """Run a script. Returns its reply, or None if Redis is unavailable."""
        try:
            async with asyncio.timeout(timeout_s):
                reply: bytes | None = await script(keys=keys, args=arguments)
        except Exception as error:  # noqa: BLE001 - requests continue after any error
            if self.is_connected is not False:
                log.warning("idempotency_store_degraded", reason=describe_error(error))
            self.is_connected = False
            return None
        if self.is_connected is False:
            log.info("idempotency_store_recovered")
        self.is_connected = True
        return reply

    def _redis_key(self, key: str) -> str:
        return f"{self._prefix}:{key}"
