"""Cache of whole responses: equal requests of one tenant get the answer of the first one, and wait for it if it runs.

A key is the digest of what can change an answer: all fields of a request but a few that cannot, its tenant, and the
model. An entry has the answer before its content is filtered. Only complete answers
are kept. Sampled ones and answers to requests with tools are kept if the rule says so.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import structlog

from argosy.deployment import CacheRule
from argosy.gateway.backends import MALFORMED_EVENT_ERRORS
from argosy.gateway.filters import begin_usage_row
from argosy.gateway.proxy.response_writers import ResponseWriter, WrappingWriter
from argosy.gateway.request_context import CHAT, RequestContext
from argosy.gateway.request_fields import TOOL_FIELDS
from argosy.http_server import LARGE_BODY_BYTES
from argosy.policy import Rates
from argosy.protocol import (
    EVENT_END,
    SSE_CONTENT_TYPE,
    SSE_DONE,
    TokenUsage,
    event_data,
    format_event,
)
from argosy.store import CachedResponse, IdempotencyStore, InFlightClaim
from argosy.telemetry import GatewayMetrics

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

CACHE_HEADER = b"x-argosy-cache"
"""Response header with how the cache answered: `hit`, `joined`, `miss` or `bypass`."""
CACHE_ROUTE = "response_cache"
"""Route name of requests that the cache answers, in the ledger."""
MAX_ELECTIONS = 2
"""Running requests for which another one waits in turn, if they fail. Then it computes its answer without the cache."""
IGNORED_FIELDS = frozenset(
    {
        *("stream", "stream_options", "user", "metadata", "store", "safety_identifier", "model"),
        *("request_id", "timeout_s", "priority", "session_id", "prompt_cache_key", "cache_salt"),
    }
)
"""Fields that cannot change an answer. All others are in the key, so that a later one is never forgotten. What the name
of the model stands for is in the key in its place."""
_COMPLETE = frozenset({"stop", "tool_calls", "function_call"})
"""Finish reasons of complete answers."""
_DONE = b"[DONE]"
_encode = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class _Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A kept answer."""

    stored_at: float
    """Seconds since the epoch."""
    usage: TokenUsage
    finish_reasons: dict[int, str]
    chunks: list[bytes]
    """Chunks of the stream as JSON, without id, time and usage."""


class ResponseCache:
    """Kept answers of a gateway, or of several that share a Redis."""

    def __init__(
        self,
        store: IdempotencyStore,
        metrics: GatewayMetrics,
        max_response_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create a cache.

        Args:
            store: Keeps the answers.
            metrics: Counts the requests.
            max_response_bytes: Size of the largest answer that is kept.
            clock: Seconds since the epoch.
        """
        self._store = store
        self._metrics = metrics
        self._max_response_bytes = max_response_bytes
        self._clock = clock
        self._running: dict[str, asyncio.Event] = {}
        """Requests of this gateway that compute an answer, by key. Set when they have ended."""

    async def find(
        self, key: str, claim: InFlightClaim, max_age_s: float, *, is_refresh: bool
    ) -> tuple[str, _Entry | None]:
        """Find the answer of a key, or claim the key.

        Returns:
            How the cache answers, with the entry for `hit` and `joined`. After `miss` the caller calls `settle`.
        """
        result = "hit"
        for _ in range(MAX_ELECTIONS + 1):
            if is_refresh:
                await self._store.forget(key)
            existing = await self._store.claim(key, claim)
            if isinstance(existing, CachedResponse):
                entry = _open_entry(key, existing)
                if entry is not None and self._clock() - entry.stored_at <= max_age_s:
                    return result, entry
                await self._store.forget(key)
                continue
            if existing is None:
                self._running[key] = asyncio.Event()
                return "miss", None
            running = self._running.get(key)
            if running is None:  # another gateway computes it
                break
            result, is_refresh = "joined", False
            await running.wait()
        return "bypass", None

    def settle(self, key: str, claim: InFlightClaim, entry: _Entry | None) -> None:
        """Keep the answer to a claimed key, or free the key for None."""
        response = None
        if entry is not None:
            body = msgspec.msgpack.encode(entry)
            response = CachedResponse(
                claim.request_id, _checksum(key, body), SSE_CONTENT_TYPE, body
            )
        self._store.settle_claim(key, claim, response)
        self._running.pop(key).set()

    def reserve_bytes(self, size_bytes: int, total_bytes: int) -> bool:
        """Reserve memory for an answer that has `total_bytes` by then. Returns whether it may be kept."""
        return total_bytes <= self._max_response_bytes and self._store.reserve_bytes(size_bytes)

    def release_bytes(self, size_bytes: int) -> None:
        """Release reserved memory."""
        self._store.release_bytes(size_bytes)

    def count(self, rule: str, result: str) -> None:
        """Count a request by how the cache answered."""
        self._metrics.cache_requests.add((rule, result))

    def create_entry(self, context: RequestContext, chunks: list[bytes]) -> _Entry:
        """Create the entry of a complete answer."""
        delivered = context.delivered
        return _Entry(self._clock(), delivered.usage, dict(delivered.finish_reasons), chunks)

    def age_s(self, entry: _Entry) -> float:
        """Return the age of an entry."""
        return max(0.0, self._clock() - entry.stored_at)


class CachingWriter(WrappingWriter):
    """Response writer that keeps the events of a response, or writes those of a kept one."""

    def __init__(
        self,
        cache: ResponseCache,
        writer: ResponseWriter,
        context: RequestContext,
        rule: CacheRule,
        rule_name: str,
    ) -> None:
        """Create the writer of a request that a rule matches.

        Args:
            cache: Keeps the answers.
            writer: Sends the events.
            context: The request.
            rule: The rule.
            rule_name: Its name in explanations and metrics.
        """
        super().__init__(writer)
        self._cache = cache
        self._context = context
        self._rule = rule
        self._rule_name = rule_name
        self._key = ""
        """Claimed key; empty if the answer is not kept."""
        self._claim = InFlightClaim(context.response_id, b"")
        self._chunks: list[bytes] | None = None
        """Chunks so far; None if the answer is not kept."""
        self._recorded_bytes = 0

    def write_events(self, events: bytes) -> None:
        self._writer.write_events(events)
        if self._chunks is not None:
            self._record(_parse_chunks(events))

    def filter_body(self, body: bytes) -> bytes:
        if self._chunks is not None:
            try:
                self._record(_split_body(_decode(body), is_chat=self._context.api is CHAT))
            except MALFORMED_EVENT_ERRORS:
                self._drop()
        return self._writer.filter_body(body)

    def discard(self) -> bool:
        is_discarded = self._writer.discard()
        if is_discarded and self._chunks:
            self._cache.release_bytes(self._recorded_bytes)
            self._chunks, self._recorded_bytes = [], 0
        return is_discarded

    def close(self) -> None:
        """Keep the answer if it is complete."""
        context, chunks = self._context, self._chunks
        if self._key:
            reasons = context.delivered.finish_reasons
            is_complete = (
                chunks
                and context.status == "completed"
                and len(reasons) == context.fields.choice_count
                and _COMPLETE.issuperset(reasons.values())
            )
            entry = self._cache.create_entry(context, chunks) if chunks and is_complete else None
            self._drop()
            self._cache.settle(self._key, self._claim, entry)
            self._key = ""
        self._writer.close()

    async def replay(self) -> bool:
        """Answer from the cache. Returns False if the answer has to be computed."""
        context = self._context
        result, entry = "bypass", None
        control = context.exchange.headers.get(b"cache-control", b"").lower()
        if self._is_cacheable() and b"no-store" not in control:
            if context.fields.body_bytes < LARGE_BODY_BYTES:
                key = _compute_key(context)
            else:
                key = await asyncio.to_thread(_compute_key, context)
            result, entry = await self._cache.find(
                key, self._claim, self._rule.max_age_s, is_refresh=b"no-cache" in control
            )
            if result == "miss":
                self._key, self._chunks = key, []
        self._cache.count(self._rule_name, result)
        context.response_headers.append((CACHE_HEADER, result.encode()))
        row: dict[str, Any] = {"rule": self._rule_name, "result": result}
        if entry is not None:
            age_s = self._cache.age_s(entry)
            context.response_headers.append((b"age", b"%d" % age_s))
            row["age_s"] = round(age_s, 1)
        context.trace.cache.append(row)
        if entry is None:
            return False
        await self._send(entry)
        return True

    def _is_cacheable(self) -> bool:
        """Whether the rule lets the answer be kept: repeatable, and without tools unless the rule says otherwise."""
        fields = self._context.fields
        if "resume" in fields.raw or not fields.generates:
            return False
        if not (self._rule.with_tools or fields.raw.keys().isdisjoint(TOOL_FIELDS)):
            return False
        temperature = bytes(fields.raw.get("temperature", b"")).strip(b' "')
        is_greedy = temperature in {b"0", b"0.0"}
        return self._rule.sampled or is_greedy or not fields.has_generated_seed

    async def _send(self, entry: _Entry) -> None:
        """Send a kept answer as this request's own."""
        context, delivered, usage = self._context, self._context.delivered, entry.usage
        now = time.monotonic()
        context.trace.first_token_at = context.trace.last_token_at = now
        context.route_name = context.trace.route_name = CACHE_ROUTE
        rates, charge = context.rates, self._rule.charge
        context.rates = Rates(
            int(rates.input * charge), int(rates.cached_input * charge), int(rates.output * charge)
        )
        if context.usage_slot is not None:
            context.usage_slot.begin(begin_usage_row(context), context.rates)
        delivered.prompt_tokens, delivered.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        delivered.output_tokens = usage.output_tokens
        delivered.reasoning_tokens, delivered.prediction = usage.reasoning_tokens, usage.prediction
        delivered.finish_reasons.update(entry.finish_reasons)
        await self._writer.start()
        envelope = {
            "id": context.response_id,
            "object": context.api.chunk_object_type,
            "created": int(context.started_at),
        }
        null_usage = {"usage": None} if context.fields.include_usage else {}
        for chunk in entry.chunks:
            self._writer.write_events(
                format_event(msgspec.json.encode(envelope | _decode(chunk) | null_usage))
            )
            if self._writer.is_full:
                break
        if context.fields.include_usage:
            final = {"model": context.model, "choices": [], "usage": usage.to_wire()}
            self._writer.write_events(format_event(msgspec.json.encode(envelope | final)))
        self._writer.write_events(SSE_DONE)

    def _record(self, chunks: Iterator[dict[str, Any]]) -> None:
        """Keep chunks, as long as the answer is not too large."""
        assert self._chunks is not None  # noqa: S101 - checked by the callers
        for chunk in chunks:
            encoded = msgspec.json.encode(chunk)
            self._recorded_bytes += len(encoded)
            if not self._cache.reserve_bytes(len(encoded), self._recorded_bytes):
                self._recorded_bytes -= len(encoded)
                self._drop()
                return
            self._chunks.append(encoded)

    def _drop(self) -> None:
        """Release the recorded chunks."""
        if self._chunks is not None:
            self._cache.release_bytes(self._recorded_bytes)
        self._chunks, self._recorded_bytes = None, 0


def _compute_key(context: RequestContext) -> str:
    """Return the key of a request, which begins with a digest of its tenant (see `IdempotencyStore`)."""
    fields, principal, pool = context.fields, context.principal, context.pool
    own = "" if principal.project else principal.user or principal.key
    owner = (principal.organisation, principal.project, own)
    content = {
        name: msgspec.json.decode(value)
        for name, value in fields.raw.items()
        if name not in IGNORED_FIELDS and not (name == "seed" and fields.has_generated_seed)
    }
    computed_by = sorted(
        {(each.upstream_model, each.model_digest or "") for each in pool.replicas.values()}
    )
    adapter = "" if context.adapter is None else context.adapter.digest
    parts = (context.api.path.decode(), pool.model, pool.version, adapter, computed_by, content)
    tenant, request = (
        hashlib.sha256(_encode(part)).hexdigest() for part in (owner, (owner, parts))
    )
    return f"cache-{tenant}.{request}"


def _checksum(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + body).digest()


def _open_entry(key: str, response: CachedResponse) -> _Entry | None:
    """Return the entry in a stored response; None if it is damaged, or was stored under another key."""
    if response.request_digest != _checksum(key, response.body):
        log.warning("cache_entry_invalid", first=response.request_id)
        return None
    try:
        return msgspec.msgpack.decode(response.body, type=_Entry)
    except msgspec.DecodeError:  # of another version
        return None


def _parse_chunks(events: bytes) -> Iterator[dict[str, Any]]:
    """Yield the chunks with choices in events, without what belongs to one request."""
    for event in events.removesuffix(EVENT_END).split(EVENT_END):
        data = event_data(event)
        if data is not None and data != _DONE:
            chunk = _decode(data)
            if chunk.get("choices"):
                yield {
                    name: value
                    for name, value in chunk.items()
                    if name not in {"id", "object", "created", "usage"}
                }


def _split_body(response: dict[str, Any], *, is_chat: bool) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a stream that a response in one piece could have been."""
    common = {name: response[name] for name in ("model", "system_fingerprint") if name in response}
    for choice in response["choices"]:
        end = {"finish_reason": choice["finish_reason"], "stop_reason": choice.get("stop_reason")}
        start = choice | {"finish_reason": None, "stop_reason": None}
        if is_chat:
            delta = {
                name: value for name, value in start.pop("message").items() if value is not None
            }
            if "tool_calls" in delta:
                delta["tool_calls"] = [
                    {"index": index} | call for index, call in enumerate(delta["tool_calls"])
                ]
            start["delta"], end["delta"] = delta, {}
        else:
            end["text"] = ""
        yield common | {"choices": [start]}
        yield common | {"choices": [{"index": choice["index"], "logprobs": None} | end]}
