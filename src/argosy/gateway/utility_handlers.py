"""Requests that generate nothing: passed to a replica that can answer, as they came but for the model's name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from weakref import WeakValueDictionary

import msgspec
from msgspec import Raw

from argosy.gateway.auth import check_role
from argosy.gateway.filters import Limits
from argosy.gateway.model_registry import Models
from argosy.gateway.pool import Pool, Replica
from argosy.gateway.principal import Caller
from argosy.gateway.proxy import RETRY_AFTER_S, unavailable
from argosy.gateway.request_fields import fields_of
from argosy.gateway.upstream import Attempt, UpstreamError
from argosy.http_server import JSON, DisconnectedError, Exchange
from argosy.policy import Outcome, classify
from argosy.protocol import ApiError, parse

TIMEOUT_S = 30.0
AGAIN_S = 0.5
"""While nothing is there and something may be soon."""
AT_ONCE = 4
"""Of one tenant; more of them wait unread: replicas tokenize the prompts of all others with the same processors."""
REPLICAS = "/replicas/"
METRICS = "/metrics"


class _Known(msgspec.Struct, gc=False):
    """The model, and the fields that may be large; all others may be anything."""

    model: str | None = None
    prompt: Raw = Raw()
    messages: Raw = Raw()
    tokens: Raw = Raw()


class Passing:
    """The handlers of what a replica's own HTTP server answers without its engine."""

    def __init__(self, models: Models, limits: Limits | None) -> None:
        self._models = models
        self._limits = limits
        self._places = WeakValueDictionary[str, asyncio.Semaphore]()
        """By tenant."""

    async def text(self, exchange: Exchange, caller: Caller) -> None:
        """`POST /tokenize` and `POST /detokenize`."""
        async with self._places.setdefault(caller.tenant, asyncio.Semaphore(AT_ONCE)):
            if exchange.gone:
                raise DisconnectedError
            await self._text(exchange, caller)

    async def _text(self, exchange: Exchange, caller: Caller) -> None:
        raw = await exchange.body()
        known = parse(_Known, raw)
        texts = (known.prompt, known.messages, known.tokens)
        fields = fields_of(raw, sum(len(bytes(text)) for text in texts))
        models, name, headers = self._models, known.model, exchange.headers
        one = models.only(caller, headers) if name is None else models.target(name, caller, headers)
        pool = one.pool
        if self._limits is None:
            await self._pass(exchange, pool, fields)
            return
        async with self._limits.passing(caller, pool.model, exchange.extra):
            await self._pass(exchange, pool, fields)

    async def _pass(self, exchange: Exchange, pool: Pool, fields: dict[str, Raw]) -> None:
        """Let a replica answer, or one that is coming back. Raises ApiError 503."""
        until = time.monotonic() + TIMEOUT_S
        while True:
            for replica in _by_load(pool):
                told = fields | {"model": Raw(msgspec.json.encode(replica.model))}
                if await _passed(exchange, replica, msgspec.json.encode(told)):
                    return
            now = time.monotonic()
            if pool.serves() or now > until or not pool.worth_waiting(now):
                raise unavailable(pool, now)
            if exchange.gone:
                raise DisconnectedError
            await asyncio.sleep(AGAIN_S)

    async def document(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /openapi.json`: that of a replica of ours, whose API is the gateway's.

        It names no tenant, but a replica has to answer, which nobody without a key may make it do.
        """
        del caller
        for pool in self._models.pools:
            for replica in _by_load(pool):
                if replica.kind == "argosy" and await _passed(exchange, replica, b""):
                    return
        raise unavailable(self._models.pools[0], time.monotonic())

    async def metrics(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /replicas/{name}/metrics`: those of one replica, which may be out of the scraper's reach."""
        check_role(caller, "viewer", "gateway")
        name = exchange.path.removeprefix(REPLICAS).removesuffix(METRICS)
        for pool in self._models.pools:
            replica = pool.replicas.get(name)
            if replica is not None:
                if await _passed(exchange, replica, b"", METRICS):
                    return
                message = f"The replica {name!r} gave no metrics. See its state in /metrics."
                raise ApiError(503, "no_replica", message, retry_after_s=RETRY_AFTER_S)
        raise ApiError(
            404, "replica_not_found", f"There is no replica {name[:200]!r}. See /metrics."
        )


def _by_load(pool: Pool) -> Iterable[Replica]:
    """The replicas that may be used, the least busy first."""
    alive = pool.alive()
    return sorted(alive, key=lambda replica: replica.load.in_flight)


async def _passed(
    exchange: Exchange, replica: Replica, body: bytes, path: str | None = None
) -> bool:
    """Whether the replica had an answer, which has then been passed on; `path` replaces the request's own."""
    headers = [(b"content-type", JSON), (b"x-request-id", exchange.request_id.encode())]
    upstream, attempt = replica.upstream, Attempt(time.monotonic)
    # The answer to HEAD would not be read.
    method = b"POST" if exchange.method == "POST" else b"GET"
    request = upstream.request(method, (path or exchange.path).encode(), body, headers)
    outcome: Outcome | None = Outcome.FAILURE
    replica.sent(0)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await attempt.send(upstream, request)
            status, content = await attempt.head, await attempt.whole()
        outcome = classify(status)
    except UpstreamError as error:
        outcome = error.outcome
        return False
    except TimeoutError:
        return False
    finally:
        attempt.abandon("nobody waits for it")
        replica.ended(outcome, time.monotonic())
    if outcome is not Outcome.SUCCESS:
        return False
    await exchange.answer(status, content, attempt.kind)
    return True
