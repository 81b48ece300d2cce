"""Requests that generate nothing: passed to a replica that can answer, as they came but for the model's name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from weakref import WeakValueDictionary

import msgspec
from msgspec import Raw

from argosy.gateway.auth import check_role
from argosy.gateway.filters import LimitFilter
from argosy.gateway.model_registry import ModelRouter
from argosy.gateway.pool import Pool, ReplicaEndpoint
from argosy.gateway.principal import Principal
from argosy.gateway.proxy import RETRY_AFTER_S, no_replica_error
from argosy.gateway.request_fields import parse_raw_fields
from argosy.gateway.upstream import UpstreamError, UpstreamResponse
from argosy.http_server import JSON_CONTENT_TYPE, DisconnectedError, HttpExchange
from argosy.policy import AttemptOutcome, classify_status
from argosy.protocol import ApiError, parse_body

REQUEST_TIMEOUT_S = 30.0
RETRY_INTERVAL_S = 0.5
"""While nothing is there and something may be soon."""
MAX_CONCURRENT_PER_TENANT = 4
"""Of one tenant; more of them wait unread: replicas tokenize the prompts of all others with the same processors."""
REPLICAS_PREFIX = "/replicas/"
METRICS_PATH = "/metrics"


class _UtilityFields(msgspec.Struct, gc=False):
    """The model, and the fields that may be large; all others may be anything."""

    model: str | None = None
    prompt: Raw = Raw()
    messages: Raw = Raw()
    tokens: Raw = Raw()


class UtilityHandlers:
    """The handlers of what a replica's own HTTP server answers without its engine."""

    def __init__(self, models: ModelRouter, limits: LimitFilter | None) -> None:
        self._models = models
        self._limits = limits
        self._tenant_slots = WeakValueDictionary[str, asyncio.Semaphore]()
        """By tenant."""

    async def tokenize(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /tokenize` and `POST /detokenize`."""
        async with self._tenant_slots.setdefault(
            principal.tenant, asyncio.Semaphore(MAX_CONCURRENT_PER_TENANT)
        ):
            if exchange.is_disconnected:
                raise DisconnectedError
            await self._tokenize(exchange, principal)

    async def _tokenize(self, exchange: HttpExchange, principal: Principal) -> None:
        raw = await exchange.read_body()
        known = parse_body(_UtilityFields, raw)
        texts = (known.prompt, known.messages, known.tokens)
        fields = parse_raw_fields(raw, sum(len(bytes(text)) for text in texts))
        models, name, headers = self._models, known.model, exchange.headers
        one = (
            models.resolve_only_model(principal, headers)
            if name is None
            else models.resolve_target(name, principal, headers)
        )
        pool = one.pool
        if self._limits is None:
            await self._forward(exchange, pool, fields)
            return
        async with self._limits.reserve_request(principal, pool.model, exchange.extra_headers):
            await self._forward(exchange, pool, fields)

    async def _forward(self, exchange: HttpExchange, pool: Pool, fields: dict[str, Raw]) -> None:
        """Let a replica answer, or one that is coming back. Raises ApiError 503."""
        until = time.monotonic() + REQUEST_TIMEOUT_S
        while True:
            for replica in _replicas_by_load(pool):
                told = fields | {"model": Raw(msgspec.json.encode(replica.upstream_model))}
                if await _try_forward(exchange, replica, msgspec.json.encode(told)):
                    return
            now = time.monotonic()
            if pool.is_available() or now > until or not pool.may_recover(now):
                raise no_replica_error(pool, now)
            if exchange.is_disconnected:
                raise DisconnectedError
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def openapi(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /openapi.json`: that of a replica of ours, whose API is the gateway's.

        It names no tenant, but a replica has to answer, which nobody without a key may make it do.
        """
        del principal
        for pool in self._models.pools:
            for replica in _replicas_by_load(pool):
                if replica.kind == "argosy" and await _try_forward(exchange, replica, b""):
                    return
        raise no_replica_error(self._models.pools[0], time.monotonic())

    async def replica_metrics(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /replicas/{name}/metrics`: those of one replica, which may be out of the scraper's reach."""
        check_role(principal, "viewer", "gateway")
        name = exchange.path.removeprefix(REPLICAS_PREFIX).removesuffix(METRICS_PATH)
        for pool in self._models.pools:
            replica = pool.replicas.get(name)
            if replica is not None:
                if await _try_forward(exchange, replica, b"", METRICS_PATH):
                    return
                message = f"The replica {name!r} gave no metrics. See its state in /metrics."
                raise ApiError(503, "no_replica", message, retry_after_s=RETRY_AFTER_S)
        raise ApiError(
            404, "replica_not_found", f"There is no replica {name[:200]!r}. See /metrics."
        )


def _replicas_by_load(pool: Pool) -> Iterable[ReplicaEndpoint]:
    """The replicas that may be used, the least busy first."""
    alive = pool.eligible_replicas()
    return sorted(alive, key=lambda replica: replica.load.in_flight)


async def _try_forward(
    exchange: HttpExchange, replica: ReplicaEndpoint, body: bytes, path: str | None = None
) -> bool:
    """Whether the replica had an answer, which has then been passed on; `path` replaces the request's own."""
    headers = [
        (b"content-type", JSON_CONTENT_TYPE),
        (b"x-request-id", exchange.request_id.encode()),
    ]
    upstream, attempt = replica.upstream, UpstreamResponse(time.monotonic)
    # The answer to HEAD would not be read.
    method = b"POST" if exchange.method == "POST" else b"GET"
    request = upstream.build_request(method, (path or exchange.path).encode(), body, headers)
    outcome: AttemptOutcome | None = AttemptOutcome.FAILURE
    replica.on_request_sent(0)
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            await attempt.send(upstream, request)
            status, content = await attempt.status, await attempt.read_body()
        outcome = classify_status(status)
    except UpstreamError as error:
        outcome = error.outcome
        return False
    except TimeoutError:
        return False
    finally:
        attempt.abort("nobody waits for it")
        replica.on_request_ended(outcome, time.monotonic())
    if outcome is not AttemptOutcome.SUCCESS:
        return False
    await exchange.send_response(status, content, attempt.content_type)
    return True
