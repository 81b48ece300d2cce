"""Handlers that forward non-generating requests, such as tokenization, to a replica's HTTP server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from urllib.parse import parse_qsl

import msgspec
from msgspec import Raw

from argosy.deployment import PromptRule
from argosy.gateway.event_loop import TenantSlots
from argosy.gateway.filters import LimitFilter
from argosy.gateway.model_registry import ModelRouter, RouteTarget
from argosy.gateway.pool import Pool, ReplicaEndpoint
from argosy.gateway.principal import Principal
from argosy.gateway.prompt_rendering import render_prompt
from argosy.gateway.proxy import (
    REFUSE_UNKNOWN_FIELDS,
    RETRY_AFTER_S,
    forward_notes,
    no_replica_error,
    starting_error,
)
from argosy.gateway.request_context import GENERATE
from argosy.gateway.request_fields import (
    PROMPT_ID,
    TOOL_FIELDS,
    RequestFields,
    decode_fields,
    parse_raw_fields,
    parse_request_fields,
)
from argosy.gateway.upstream import UpstreamError, UpstreamResponse
from argosy.http_server import (
    JSON_CONTENT_TYPE,
    LARGE_BODY_BYTES,
    DisconnectedError,
    HttpExchange,
)
from argosy.policy import AttemptOutcome, classify_status
from argosy.protocol import ApiError
from argosy.store import Adapter

REQUEST_TIMEOUT_S = 30.0
RETRY_INTERVAL_S = 0.5
"""Pause between attempts while no replica is available but one may recover soon."""
MAX_CONCURRENT_PER_TENANT = 4
"""Maximum concurrent requests of one tenant. Further requests wait with their bodies unread, because replicas tokenize
the prompts of all tenants on the same processors."""
METRICS_PATH = "/metrics"
TOKENIZE_PATH = "/tokenize"
TOKENIZER_INFO_PATH = "/tokenizer_info"
_MESSAGES = "messages"


class _UtilityFields(msgspec.Struct, gc=False):
    """The typed fields. All other fields may have any value."""

    model: str | None = None


class UtilityHandlers:
    """Handlers for endpoints that a replica's HTTP server answers without its engine."""

    def __init__(
        self, models: ModelRouter, limits: LimitFilter | None, *, refuse_unknown_fields: bool
    ) -> None:
        self._models = models
        self._limits = limits
        self._extra_headers = [REFUSE_UNKNOWN_FIELDS] if refuse_unknown_fields else []
        self._slots = TenantSlots(MAX_CONCURRENT_PER_TENANT)

    async def tokenize(
        self, exchange: HttpExchange, principal: Principal, path: str | None = None
    ) -> None:
        """`POST /tokenize` and `POST /detokenize`. Requests of other dialects give the replica's path."""
        async with self._slots.hold(exchange, principal.tenant):
            body = await exchange.read_body()
            fields = await exchange.parse_body(body, parse_raw_fields)
            if (path or exchange.path) == TOKENIZE_PATH:
                fields = await self._render_prompt(exchange, principal, body, fields)
            name = decode_fields(_UtilityFields, fields).model
            await self._forward_to_model(exchange, principal, name, path or exchange.path, fields)

    async def _render_prompt(
        self, exchange: HttpExchange, principal: Principal, body: bytes, fields: dict[str, Raw]
    ) -> dict[str, Raw]:
        """Return the fields with the prompt that a request names, or that a rule puts before its messages.

        Raises:
            ApiError: As `render_prompt` does.
        """
        is_named = PROMPT_ID in fields
        if not (is_named or (self._models.rules[PromptRule] and _MESSAGES in fields)):
            return fields
        prompt_field = "prompt" if "prompt" in fields else _MESSAGES

        def parse(body: bytes) -> RequestFields:
            return parse_request_fields(body, prompt_field)

        parsed = await exchange.parse_body(body, parse)
        rendered = await render_prompt(self._models, parsed, principal, exchange)
        if rendered is None:
            return fields
        found = await exchange.parse_body(rendered.body, parse_raw_fields)
        counted = {*fields, prompt_field, *TOOL_FIELDS, "model"}
        return {name: value for name, value in found.items() if name in counted}

    async def tokenizer_info(
        self, exchange: HttpExchange, principal: Principal, name: str | None = None
    ) -> None:
        """`GET /tokenizer_info`. The query may name the model, and requests of other dialects give its name."""
        name = name or dict(parse_qsl(exchange.query.decode("latin-1"))).get("model")
        async with self._slots.hold(exchange, principal.tenant):
            await self._forward_to_model(exchange, principal, name, TOKENIZER_INFO_PATH)

    async def _forward_to_model(
        self,
        exchange: HttpExchange,
        principal: Principal,
        name: str | None,
        path: str,
        fields: dict[str, Raw] | None = None,
    ) -> None:
        """Forward the request to the model with this name, or the only one, within the sender's limits."""
        models, headers = self._models, exchange.headers
        name = name or models.find_only_model(principal, GENERATE)
        target = models.resolve_target(name, principal, headers, request_id=exchange.request_id)
        if self._limits is None:
            await self._forward(exchange, target, fields, path)
            return
        async with self._limits.reserve_request(
            principal, target.pool.model, exchange.extra_headers
        ):
            await self._forward(exchange, target, fields, path)

    async def _forward(
        self,
        exchange: HttpExchange,
        target: RouteTarget,
        fields: dict[str, Raw] | None,
        path: str,
    ) -> None:
        """Forward the request to the least busy replica that answers, and wait for one to recover if none does.

        Raises:
            ApiError: 503 if no replica answers.
        """
        pool, give_up_at = target.pool, time.monotonic() + REQUEST_TIMEOUT_S
        while True:
            for replica in _replicas_by_load(pool):
                body = b"" if fields is None else _encode_for(replica, fields, target.adapter)
                if len(body) >= LARGE_BODY_BYTES:
                    await asyncio.sleep(0)  # each copy of it takes a turn of the event loop
                if await _try_forward(
                    exchange, replica, body, path, extra_headers=self._extra_headers
                ):
                    return
            now = time.monotonic()
            pool.record_unserved(now)
            if pool.is_starting and now > give_up_at:
                raise starting_error(pool, exchange.extra_headers)
            if pool.is_available() or now > give_up_at or not pool.may_recover(now):
                raise no_replica_error(pool, now)
            if exchange.is_disconnected:
                raise DisconnectedError
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def replica_metrics(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /replicas/{name}/metrics`: metrics of one replica, which the scraper may be unable to reach itself."""
        del principal  # its role was checked
        name = exchange.path_parameters["name"]
        for pool in self._models.all_pools:
            replica = pool.replicas.get(name)
            if replica is not None:
                if await _try_forward(exchange, replica, b"", METRICS_PATH):
                    return
                message = f"The replica {name!r} returned no metrics. See its status in /metrics."
                raise ApiError(503, "no_replica", message, retry_after_s=RETRY_AFTER_S)
        raise ApiError(
            404,
            "replica_not_found",
            f"No replica has the name {name[:200]!r}. See /metrics for the names.",
        )


def _encode_for(replica: ReplicaEndpoint, fields: dict[str, Raw], adapter: Adapter | None) -> bytes:
    """Encode a body. A native replica uses the chat template of the adapter."""
    model = replica.upstream_model
    if adapter is not None and replica.is_native:
        model = adapter.digest
    return msgspec.json.encode(fields | {"model": Raw(msgspec.json.encode(model))})


def _replicas_by_load(pool: Pool) -> Iterable[ReplicaEndpoint]:
    """Return the eligible replicas, least busy first."""
    eligible = pool.eligible_replicas()
    return sorted(eligible, key=lambda replica: replica.load.in_flight)


async def _try_forward(
    exchange: HttpExchange,
    replica: ReplicaEndpoint,
    body: bytes,
    path: str,
    *,
    extra_headers: Iterable[tuple[bytes, bytes]] = (),
) -> bool:
    """Forward a request to one replica and send its response to the client.

    Returns:
        Whether the replica answered. If not, nothing was sent to the client.
    """
    headers = [
        (b"content-type", JSON_CONTENT_TYPE),
        (b"x-request-id", exchange.request_id.encode()),
        *extra_headers,
    ]
    upstream, response = replica.upstream, UpstreamResponse(time.monotonic)
    method = b"POST" if body else b"GET"  # GET for HEAD too, since the body of the response is read
    request = upstream.build_request(method, path.encode(), body, headers)
    outcome: AttemptOutcome | None = AttemptOutcome.FAILURE
    replica.on_request_sent(0)
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            await response.send(upstream, request)
            status, response_body = await response.status, await response.read_body()
        outcome = classify_status(status)
    except UpstreamError as error:
        outcome = error.outcome
        return False
    except TimeoutError:
        return False
    finally:
        response.abort("request ended")
        replica.on_request_ended(outcome, time.monotonic())
        replica.on_capacity_change()
    if outcome is not AttemptOutcome.SUCCESS:
        return False
    if replica.adapter.is_native:
        forward_notes(response.headers, exchange.extra_headers)
    await exchange.send_response(status, response_body, response.content_type)
    return True
