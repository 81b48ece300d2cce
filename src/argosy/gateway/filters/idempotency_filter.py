"""Filter for requests with an `Idempotency-Key` header: a repeated request gets the response of the first one.

Implements the IETF draft "The Idempotency-Key HTTP Header Field". A request that ends in an error releases its key.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import structlog

from argosy.gateway.principal import Principal
from argosy.gateway.request_context import RequestContext
from argosy.gateway.request_trace import IdempotencyTrace
from argosy.http_server import LARGE_BODY_BYTES
from argosy.protocol import SSE_CONTENT_TYPE, ApiError, invalid_request
from argosy.store import (
    CachedResponse,
    IdempotencyStore,
    InFlightClaim,
)

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

IDEMPOTENCY_KEY_HEADER = b"idempotency-key"
RETRY_AFTER_S = 1.0
"""Suggested delay before a retry while the first request is still running."""
_KEY_PATTERN = re.compile(rb"[!-~]{1,255}")
_encode_msgpack = msgspec.msgpack.Encoder().encode


class IdempotencyFilter:
    """Filter that replays responses. A replayed request counts against no limit and has no row in the ledger."""

    def __init__(self, store: IdempotencyStore, max_response_bytes: int) -> None:
        self._store = store
        self._max_response_bytes = max_response_bytes
        self._recorders: dict[RequestContext, ResponseRecorder] = {}

    async def on_request(self, context: RequestContext) -> bool:
        """Claim the key for the first request, and answer repeated requests.

        Raises:
            ApiError: 400 if the key is invalid. 409 while the first request is running. 422 if the first request was a
                different one.
        """
        key = context.exchange.headers.get(IDEMPOTENCY_KEY_HEADER)
        if key is None:
            return False
        scoped_key = scope_key(context.principal, key)
        if context.fields.body_bytes < LARGE_BODY_BYTES:
            digest = _request_digest(context)
        else:
            digest = await asyncio.to_thread(_request_digest, context)
        claim = InFlightClaim(context.response_id, digest)
        existing = await self._store.claim(scoped_key, claim)
        first_request_id = context.response_id if existing is None else existing.request_id
        trace_line = IdempotencyTrace(
            key.decode(), first_request_id, kept=isinstance(existing, CachedResponse)
        )
        context.trace.idempotency = trace_line
        if existing is None:
            recorder = ResponseRecorder(
                self._store, self._max_response_bytes, context, scoped_key, claim, trace_line
            )
            context.exchange.observe_response(recorder)
            self._recorders[context] = recorder
            return True
        await _replay_response(context, check_existing_claim(existing, claim))
        return False

    def on_tokens(self, context: RequestContext, chunk_times: Sequence[float]) -> None:
        """Do nothing, since the recorder observes the response."""

    async def on_fallback(self, context: RequestContext) -> None:
        """Do nothing, since the key belongs to the request and not to the model."""

    def on_complete(self, context: RequestContext) -> None:
        """Store the response if it is complete, or release the key."""
        self._recorders.pop(context).settle()


@dataclass(slots=True, eq=False)
class ResponseRecorder:
    """Records the response to the first request with a key, as its `ResponseObserver`."""

    store: IdempotencyStore
    max_bytes: int
    context: RequestContext
    scoped_key: str
    claim: InFlightClaim
    trace_line: IdempotencyTrace
    content_type: bytes = b""
    body: bytearray | None = field(default_factory=bytearray)
    """Response bytes so far, or None if the response is not stored."""

    def on_start(self, content_type: bytes) -> None:
        self.content_type = content_type

    def on_body(self, data: bytes) -> None:
        body = self.body
        if body is None:
            return
        if len(body) + len(data) <= self.max_bytes and self.store.reserve_bytes(len(data)):
            body += data
        else:
            self._release_body()

    def settle(self) -> None:
        """Store the response if it is complete, or release the key."""
        self.context.exchange.observe_response(None)
        body, kind = self._release_body(), self.content_type
        answer = None
        if body is not None and _is_cacheable(self.context):
            answer = CachedResponse(
                self.claim.request_id, self.claim.request_digest, kind, bytes(body)
            )
            self.context.trace.idempotency = msgspec.structs.replace(self.trace_line, kept=True)
        self.store.settle_claim(self.scoped_key, self.claim, answer)

    def _release_body(self) -> bytearray | None:
        body, self.body = self.body, None
        if body is not None:
            self.store.release_bytes(len(body))
        return body


def _is_cacheable(context: RequestContext) -> bool:
    """Return whether the client received a complete response, including one that a limit has stopped.

    Answers with text that may not be stored are not kept.
    """
    if context.content is not None and not context.content.keeps_answers:
        return False
    ended = context.status in {"completed", "stopped"} and context.error is None
    return ended and context.exchange.response_complete


def scope_key(principal: Principal, key: bytes) -> str:
    """Return the key's name in the store, which is unique per project, or per user or API key without a project.

    It begins with a digest of its tenant (see `IdempotencyStore`).

    Raises:
        ApiError: 400 if the key is invalid.
    """
    if not _KEY_PATTERN.fullmatch(key):
        message = "'Idempotency-Key' must have 1 to 255 visible ASCII characters. Send, for example, a UUID."
        raise invalid_request(message, "Idempotency-Key", "invalid_idempotency_key")
    own = "" if principal.project else principal.user or principal.key
    owner = principal.organisation, principal.project, own
    tenant, name = (_encode_msgpack(part) for part in (owner, (*owner, key)))
    return f"{hashlib.sha256(tenant).hexdigest()}.{hashlib.sha256(name).hexdigest()}"


def check_existing_claim(
    existing: InFlightClaim | CachedResponse, claim: InFlightClaim
) -> CachedResponse:
    """Return the response to the first request with a key, for a claim by a repeated request.

    Raises:
        ApiError: 409 while the first request is running. 422 if it was a different one.
    """
    if existing.request_digest != claim.request_digest:
        message = (
            "This Idempotency-Key was sent with another request. Use a new key for each request."
        )
        raise ApiError(422, "idempotency_key_reused", message, param="Idempotency-Key")
    if isinstance(existing, InFlightClaim):
        message = "The request with this Idempotency-Key is still running. Try again in a moment."
        raise ApiError(409, "idempotency_key_in_use", message, retry_after_s=RETRY_AFTER_S)
    return existing


def _request_digest(context: RequestContext) -> bytes:
    """Return the digest of the request's path and fields, independent of the fields' order."""
    ask = context.fields
    asked = [
        (name, bytes(value))
        for name, value in sorted(ask.raw.items())
        if not (name == "seed" and ask.has_generated_seed)
    ]
    exchange = context.exchange
    path = exchange.path.encode() if exchange.is_translated else context.api.path
    return hashlib.sha256(_encode_msgpack((path, asked))).digest()


async def _replay_response(context: RequestContext, cached: CachedResponse) -> None:
    """Send a stored response."""
    exchange = context.exchange
    exchange.extra_headers.append((b"idempotent-replayed", b"true"))
    exchange.stop_translating()
    log.info("response_replayed", request=context.response_id, first=cached.request_id)
    if cached.media_type != SSE_CONTENT_TYPE:
        await exchange.send_response(200, cached.body, cached.media_type)
    else:
        await exchange.start_stream()
        await exchange.write(cached.body)
        await exchange.end_stream()
    context.status, context.replayed_request_id = "completed", cached.request_id
