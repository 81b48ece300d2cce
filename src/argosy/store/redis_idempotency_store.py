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

from argosy.store.idempotency_store import Answer, Claim, IdempotencyConfig, MemoryAnswers
from argosy.store.redis_client import PREFIX, end, reason, redis_client

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.store")

WAIT_S = 1.0
"""Longest that Redis is waited for: an answer may be large."""
START_S = 2.0
AGAIN_S = 0.25
"""How often a Redis that is away is looked for."""
ALIVE_S = 8.0
"""A claim that was not renewed for so long is that of a gateway that has died."""

_RENEW = """
for i, name in ipairs(KEYS) do
  if redis.call('GET', name) == ARGV[i + 1] then
    redis.call('PEXPIRE', name, ARGV[1])
  end
end
"""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Claim | Answer).decode


class RedisAnswers:
    """The `Answers` of several gateways, in Redis 6 or later, or Valkey. Belongs to one event loop.

    What this gateway answered it keeps in `own` as well. Redis has at most as many bytes of answers as one gateway.
    """

    def __init__(
        self,
        url: str,
        password: str | None,
        config: IdempotencyConfig,
        own: MemoryAnswers,
        *,
        wait_s: float = WAIT_S,
        alive_s: float = ALIVE_S,
    ) -> None:
        """Raises ValueError when it is no URL of a Redis."""
        self._redis = redis_client(url, password, max(wait_s, START_S))
        self._config = config
        self._own = own
        self._wait_s = wait_s
        self._alive_s = alive_s
        script = files("argosy.store").joinpath("answers.lua").read_text()
        self._put_script = self._redis.register_script(script)
        self._renew_script = self._redis.register_script(_RENEW)
        self.up: bool | None = None
        """Whether Redis answered when it was last asked; None: it never was."""
        self._putting: dict[str, asyncio.Task[Claim | Answer | None]] = {}
        """What is being put there, the last by each name."""
        self._task: asyncio.Task[None] | None = None

    async def claim(self, name: str, claim: Claim) -> Claim | Answer | None:
        """See `Answers`: soon."""
        held = await self._own.claim(name, claim)
        if held is not None or not self.up:
            return held
        try:
            held = await asyncio.shield(self._put(name, claim, claim, self._alive_s))
        except asyncio.CancelledError:
            self.settle(name, claim, None)
            raise
        if held is not None:
            self._own.settle(name, claim, None)
        return held

    def hold(self, size: int) -> bool:
        """See `Answers`: in this gateway's memory."""
        return self._own.hold(size)

    def release(self, size: int) -> None:
        """See `Answers`."""
        self._own.release(size)

    def settle(self, name: str, claim: Claim, answer: Answer | None) -> None:
        """See `Answers`. Other gateways know it a moment later."""
        self._own.settle(name, claim, answer)
        if self.up:
            self._put(name, claim, answer, self._config.seconds)

    async def start(self) -> None:
        """See `Answers`: a Redis that cannot be reached is looked for from now on."""
        await self._renew(START_S)
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """See `Answers`."""
        if self._task is not None:
            await end(self._task)
        while self._putting:
            await asyncio.wait(self._putting.values())
        await self._redis.aclose()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._alive_s / 4 if self.up else AGAIN_S)
            if not self.up:
                # Who answers that it must not be written to, is no primary any more: its name may be another's.
                with contextlib.suppress(RedisError, OSError):
                    await self._redis.connection_pool.disconnect()
            await self._renew(self._wait_s)

    async def _renew(self, wait_s: float) -> None:
        """Say of all claims that they are still running; it tells too whether Redis is there."""
        claims = dict(self._own.running)
        told = [int(self._alive_s * 1000), *map(_encode, claims.values())]
        await self._ask(self._renew_script, [_key(name) for name in claims], told, wait_s)

    def _put(
        self, name: str, claim: Claim, new: Claim | Answer | None, seconds: float
    ) -> asyncio.Task[Claim | Answer | None]:
        """Put it there, after what is being put under the name: a task, whoever gives up waiting for it."""
        before = self._putting.get(name)
        task = asyncio.create_task(self._put_after(before, name, claim, new, seconds))
        self._putting[name] = task
        task.add_done_callback(partial(self._was_put, name))
        return task

    def _was_put(self, name: str, task: asyncio.Task[Claim | Answer | None]) -> None:
        if self._putting.get(name) is task:
            del self._putting[name]

    async def _put_after(
        self,
        before: asyncio.Task[Claim | Answer | None] | None,
        name: str,
        claim: Claim,
        new: Claim | Answer | None,
        seconds: float,
    ) -> Claim | Answer | None:
        """What somebody else has there; None too when Redis is away."""
        if before is not None:
            await asyncio.wait({before})
        keys = [_key(name), f"{PREFIX}answers", f"{PREFIX}answers:bytes"]
        put = b"" if new is None else _encode(new)
        told = [_encode(claim), put, math.ceil(seconds * 1000), self._config.bytes]
        held = await self._ask(self._put_script, keys, told, self._wait_s)
        try:
            return None if held is None else _decode(held)
        except msgspec.DecodeError:  # of another version
            return None

    async def _ask(
        self, script: AsyncScript, keys: list[str], told: list[Any], wait_s: float
    ) -> bytes | None:
        """What a script answers; None too when Redis is away."""
        try:
            async with asyncio.timeout(wait_s):
                answer: bytes | None = await script(keys=keys, args=told)
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait for it
            if self.up is not False:
                log.warning("answers_not_shared", reason=reason(error))
            self.up = False
            return None
        if self.up is False:
            log.info("answers_shared_again")
        self.up = True
        return answer


def _key(name: str) -> str:
    return f"{PREFIX}answer:{name}"
