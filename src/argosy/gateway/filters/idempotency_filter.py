"""The stage of requests that name a key (`Idempotency-Key`): sent again, they are given the answer that they got.

After the IETF's draft "The Idempotency-Key HTTP Header Field". What ended in an error keeps nothing: its key is free.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import msgspec
import structlog

from argosy.gateway.filters.limit_filter import LimitsConfig, read_redis_password
from argosy.gateway.principal import Principal
from argosy.gateway.request_context import FastPathBudget, RequestContext
from argosy.gateway.request_trace import IdempotencyTrace
from argosy.protocol import SSE_CONTENT_TYPE, ApiError, invalid_request
from argosy.store import (
    CachedResponse,
    IdempotencyConfig,
    IdempotencyStore,
    InFlightClaim,
    create_idempotency_store,
)

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

IDEMPOTENCY_KEY_HEADER = b"idempotency-key"
RETRY_AFTER_S = 1.0
"""When to come back for an answer that is not whole yet."""
_KEY_PATTERN = re.compile(rb"[!-~]{1,255}")
_encode_msgpack = msgspec.msgpack.Encoder().encode


def open_idempotency_store(config: IdempotencyConfig, limits: LimitsConfig) -> IdempotencyStore:
    """Where the settings keep them: with the limits. Raises ValueError, saying what to change."""
    return create_idempotency_store(config, limits.redis, read_redis_password(limits))


class IdempotencyFilter:
    """A `Stage`. A request that is answered here counts against no limit, and has no row in the ledger."""

    def __init__(self, store: IdempotencyStore, max_response_bytes: int) -> None:
        """Answers of more bytes are not kept."""
        self._store = store
        self._max_response_bytes = max_response_bytes

    async def on_request(self, context: RequestContext) -> ResponseRecorder | None:
        """Let in the first request with its key, and answer those that are the same.

        Raises ApiError 400 when the key is none, 409 while the first is being answered, 422 when that was another.
        """
        key = context.exchange.headers.get(IDEMPOTENCY_KEY_HEADER)
        if key is None:
            return None
        if not _KEY_PATTERN.fullmatch(key):
            message = "'Idempotency-Key' has 1 to 255 visible ASCII characters, such as a UUID. Send one, or none."
            raise invalid_request(message, "Idempotency-Key", "invalid_idempotency_key")
        name, claim = (
            _scope_key(context.principal, key),
            InFlightClaim(context.response_id, _request_digest(context)),
        )
        held = await self._store.claim(name, claim)
        first = context.response_id if held is None else held.request_id
        line = IdempotencyTrace(key.decode(), first, kept=isinstance(held, CachedResponse))
        context.trace.idempotency = line
        if held is None:
            copy = ResponseRecorder(
                self._store, self._max_response_bytes, context, name, claim, line
            )
            context.exchange.observe_response(copy)
            return copy
        if held.request_digest != claim.request_digest:
            message = "This Idempotency-Key was sent with another request. Take a new one for each."
            raise ApiError(422, "idempotency_key_reused", message, param="Idempotency-Key")
        if isinstance(held, InFlightClaim):
            message = "The request with this Idempotency-Key is still being answered. Try again in a moment."
            raise ApiError(409, "idempotency_key_in_use", message, retry_after_s=RETRY_AFTER_S)
        await _replay_response(context, held)
        return None


class ResponseRecorder:
    """A `Visit`, and the copy of the answer: that of the first request with its key."""

    __slots__ = (
        "_body",
        "_claim",
        "_content_type",
        "_context",
        "_max_bytes",
        "_scoped_key",
        "_store",
        "_trace_line",
    )

    def __init__(
        self,
        store: IdempotencyStore,
        max_bytes: int,
        context: RequestContext,
        scoped_key: str,
        claim: InFlightClaim,
        trace_line: IdempotencyTrace,
    ) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._context = context
        self._scoped_key = scoped_key
        self._claim = claim
        self._trace_line = trace_line
        self._content_type = b""
        self._body: bytearray | None = bytearray()
        """What was sent of it; None: it is not kept."""

    def on_start(self, content_type: bytes) -> None:
        """See `Copy`."""
        self._content_type = content_type

    def on_body(self, data: bytes) -> None:
        """See `Copy`."""
        body = self._body
        if body is None:
            return
        if len(body) + len(data) <= self._max_bytes and self._store.reserve_bytes(len(data)):
            body += data
        else:
            self._release_body()

    def fast_path_budget(self) -> FastPathBudget:
        """Not at all: every byte has to come by."""
        return FastPathBudget(0)

    def on_tokens(self, chunk_times: Sequence[float]) -> None:
        """See `Visit`."""

    def on_complete(self) -> None:
        """Keep what was sent, if it was an answer to the end."""
        self._context.exchange.observe_response(None)
        body, kind = self._release_body(), self._content_type
        answer = None
        if body is not None and _is_cacheable(self._context):
            answer = CachedResponse(
                self._claim.request_id, self._claim.request_digest, kind, bytes(body)
            )
            self._context.trace.idempotency = msgspec.structs.replace(self._trace_line, kept=True)
        self._store.settle_claim(self._scoped_key, self._claim, answer)

    def _release_body(self) -> bytearray | None:
        body, self._body = self._body, None
        if body is not None:
            self._store.release_bytes(len(body))
        return body


def _is_cacheable(context: RequestContext) -> bool:
    """Whether the client was given all of an answer, one that a limit ended too."""
    ended = context.status in {"completed", "stopped"} and context.error is None
    return ended and context.exchange.response_complete


def _scope_key(principal: Principal, key: bytes) -> str:
    """The key's, as it is the caller's project's, or theirs where they have none."""
    own = "" if principal.project else principal.user or principal.key
    return hashlib.sha256(
        _encode_msgpack((principal.organisation, principal.project, own, key))
    ).hexdigest()


def _request_digest(context: RequestContext) -> bytes:
    """Of what is asked: the path and the fields, whatever their order."""
    ask = context.fields
    asked = [
        (name, bytes(value))
        for name, value in sorted(ask.raw.items())
        if not (name == "seed" and ask.has_generated_seed)
    ]
    return hashlib.sha256(_encode_msgpack((context.api.path, asked))).digest()


async def _replay_response(context: RequestContext, cached: CachedResponse) -> None:
    """Send an answer again."""
    exchange = context.exchange
    exchange.extra_headers.append((b"idempotent-replayed", b"true"))
    log.info("response_replayed", request=context.response_id, first=cached.request_id)
    if cached.media_type != SSE_CONTENT_TYPE:
        await exchange.send_response(200, cached.body, cached.media_type)
    else:
        await exchange.start_stream()
        await exchange.write(cached.body)
        await exchange.end_stream()
    context.status, context.replayed_request_id = "completed", cached.request_id
