"""Writer of a response that a cache rule matches: answers from the cache, or keeps the answer that is computed."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from argosy.deployment import CacheRule
from argosy.gateway.backends import MALFORMED_EVENT_ERRORS
from argosy.gateway.filters import begin_usage_row
from argosy.gateway.proxy.response_cache import ResponseCache, compute_key
from argosy.gateway.proxy.response_writers import ResponseWriter, WrappingWriter
from argosy.gateway.proxy.semantic_cache import SemanticCache, SemanticLookup
from argosy.gateway.proxy.single_flight import CacheEntry, Flight
from argosy.gateway.request_context import (
    CHAT,
    CLIENT_ERROR_STATUSES,
    EndReason,
    RequestContext,
)
from argosy.gateway.request_fields import TOOL_FIELDS
from argosy.http_server import LARGE_BODY_BYTES
from argosy.policy import Rates
from argosy.protocol import EVENT_END, SSE_DONE, ApiError, event_data, format_event
from argosy.store import InFlightClaim

CACHE_HEADER = b"x-argosy-cache"
"""Response header with how the cache answered: `hit`, `joined`, `semantic`, `miss` or `bypass`."""
ROUTES = {"hit": "response_cache", "joined": "response_cache", "semantic": "semantic_cache"}
"""Route names of requests that the cache answers, in the ledger."""
MAX_ELECTIONS = 2
"""Failed requests after which others that waited for them compute the answer in turn. Then all get the last error."""
_DONE = b"[DONE]"
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class CachingWriter(WrappingWriter):
    """Response writer that keeps the events of a response, or writes those of a kept or running one."""

    def __init__(
        self,
        cache: ResponseCache,
        writer: ResponseWriter,
        context: RequestContext,
        rule: CacheRule,
        rule_name: str,
        semantic: SemanticCache,
    ) -> None:
        """Create the writer of a request that a rule matches.

        Args:
            cache: Keeps the answers.
            writer: Sends the events.
            context: The request.
            rule: The rule.
            rule_name: Its name in explanations and metrics.
            semantic: Answers similar requests, if the rule says so.
        """
        super().__init__(writer)
        self._cache = cache
        self._context = context
        self._rule = rule
        self._rule_name = rule_name
        self._semantic = semantic
        self._lookup: SemanticLookup | None = None
        """The question that was looked up in the semantic cache."""
        self._claim = InFlightClaim(context.response_id, b"")
        self._key = ""
        self._flight: Flight | None = None
        """The flight in which this request computes the answer; None if it does not, or the flight has ended."""
        self._recorded_bytes = 0
        self._computed_from = 0.0
        """Monotonic time at which the computation began."""
        self._full_rates = context.rates
        """Rates of a computed answer."""
        self._is_finished = False
        """Whether all events of a complete answer were written."""
        self._had_output = False
        """Whether the client that has left may have received events."""

    @property
    def has_output(self) -> bool:  # type: ignore[override]
        flight = self._flight
        is_followed = flight is not None and flight.has_followed_output
        return is_followed or self._had_output or self._writer.has_output

    def write_events(self, events: bytes) -> None:
        self._writer.write_events(events)
        self._record(parse_chunks(events))

    async def filter_body(self, body: bytes) -> bytes:
        self._record(split_body(body, is_chat=self._context.api is CHAT))
        return await self._writer.filter_body(body)

    def discard(self) -> bool:
        flight = self._flight
        if flight is not None and flight.has_followed_output:
            return False
        is_discarded = self._writer.discard()
        if is_discarded and flight is not None and flight.chunks:
            self._cache.release_bytes(self._recorded_bytes)
            flight.chunks.clear()
            self._recorded_bytes = 0
        return is_discarded

    def release(self) -> None:
        """Neither keep the answer nor send it to others, because the key has another model."""
        if self._flight is not None:
            self._drop(self._flight)

    def continue_without_client(self, abort: Callable[[], object]) -> bool:
        flight = self._flight
        if flight is None or not flight.continue_without_client(abort):
            return False
        self._had_output = self._writer.has_output
        self._writer.close()
        self._writer = ResponseWriter()
        return True

    async def finish(self) -> None:
        self._is_finished = self._context.end_reason is not EndReason.STOPPED
        await self._writer.finish()

    def close(self) -> None:
        """Keep the answer if it is complete."""
        context, flight = self._context, self._flight
        if flight is not None and not flight.is_ended:
            chunks, entry = flight.chunks, None
            is_complete = self._is_finished or context.status == "completed"
            choice_count = context.fields.choice_count
            if chunks and is_complete and len(context.delivered.finish_reasons) == choice_count:
                duration_s = time.monotonic() - self._computed_from
                entry = self._cache.create_entry(context, chunks, duration_s)
            if chunks is not None:
                self._cache.release_bytes(self._recorded_bytes)
            is_kept = self._cache.settle(self._key, flight, self._claim, entry, context.error)
            self._flight = None
            if is_kept and entry is not None:
                self._add_question(entry)
        self._writer.close()

    def _add_question(self, computed: CacheEntry) -> None:
        """Let similar questions find a kept answer."""
        config, lookup = self._rule.semantic, self._lookup
        if config is not None and lookup is not None:
            self._semantic.add(lookup, config, self._key)
            self._semantic.compare(self._context, self._rule_name, config, lookup, computed)

    async def replay(self) -> bool:
        """Answer from the cache, or with a running answer. Returns False if the answer has to be computed.

        Raises:
            ApiError: The requests that computed the answer have failed.
        """
        context = self._context
        control = context.exchange.headers.get(b"cache-control", b"").lower()
        if not self._is_cacheable() or b"no-store" in control:
            self._record_result("bypass", None)
            return False
        if context.fields.body_bytes < LARGE_BODY_BYTES:
            self._key = compute_key(context)
        else:
            self._key = await asyncio.to_thread(compute_key, context)
        is_refresh, error = b"no-cache" in control, None
        for _ in range(MAX_ELECTIONS + 1):
            flight = self._cache.find_flight(self._key)
            if flight is None:
                flight = self._flight = self._create_flight()
                is_claimed = await self._cache.start_flight(
                    self._key,
                    flight,
                    self._claim,
                    max(self._rule.max_age_s, context.max_cached_age_s),
                    is_refresh=is_refresh,
                )
                if is_claimed and not await self._find_similar(flight):
                    self._computed_from = time.monotonic()
                    self._record_result("miss", None)
                    return False
                self._flight = None
            if await self._follow(flight):
                return True
            is_refresh, error = False, flight.error
            if flight.chunks is None or (
                error is not None and error.status in CLIENT_ERROR_STATUSES
            ):
                break
        if error is not None:
            raise error
        self._record_result("bypass", None)
        return False

    async def _find_similar(self, flight: Flight) -> bool:
        """End a flight with the answer to a similar request. Returns False if there is none."""
        config = self._rule.semantic
        if config is None:
            return False
        lookup = self._lookup = await self._semantic.find(
            self._context, self._rule, self._rule_name
        )
        if lookup is None or lookup.entry is None or config.dry_run:
            return False
        self._cache.settle_similar(self._key, flight, self._claim, lookup.entry)
        return True

    def _create_flight(self) -> Flight:
        """Create a flight. A deadline of the client's own would end the answers of others."""
        content, fields = self._context.content, self._context.fields
        rule = None if content is None else content.rule
        return Flight(rule, allows_streaming=fields.timeout_s == math.inf)

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

    def _record_result(self, result: str, entry: CacheEntry | None) -> None:
        """Say how the cache answers: in a header, in the trace and in the metrics."""
        context = self._context
        self._cache.count(self._rule_name, result)
        context.response_headers.append((CACHE_HEADER, result.encode()))
        row: dict[str, Any] = {"rule": self._rule_name, "result": result}
        lookup = self._lookup
        if lookup is not None and lookup.entry is not None:
            row["similarity"] = round(lookup.similarity, 4)
        if result in ROUTES and entry is not None:
            age_s = self._cache.age_s(entry)
            context.response_headers.append((b"age", b"%d" % age_s))
            row["age_s"] = round(age_s, 1)
        context.trace.cache.append(row)

    async def _follow(self, flight: Flight) -> bool:
        """Send the answer of a flight as this request's own.

        Returns:
            False if the flight has failed, and nothing was sent.

        Raises:
            ApiError: It has failed after chunks were sent.
        """
        context, content = self._context, self._context.content
        rule = None if content is None else content.rule
        is_streaming = flight.allows_streaming and rule is flight.content_rule
        tail = b',"usage":null}' if context.fields.include_usage else b"}"
        is_started = False
        async with contextlib.aclosing(flight.follow(is_streaming=is_streaming)) as chunks:
            async for chunk in chunks:
                if not is_started:
                    is_started = True
                    await self._start(flight)
                    head = msgspec.json.encode(self._envelope())[:-1] + b","
                try:
                    self._writer.write_events(format_event(head + chunk[1:-1] + tail))
                except ValueError as error:
                    message = "The kept answer is malformed. Send Cache-Control: no-cache to compute it again."
                    raise ApiError(502, "upstream_failed", message) from error
                if self._writer.is_full:
                    break
                await context.exchange.wait_writable()
        entry = flight.entry
        if entry is None and not self._writer.is_full:
            if is_started:
                message = (
                    "The request that computed this answer has failed. Send the request again."
                )
                raise ApiError(502, "upstream_failed", message)
            return False
        if entry is not None:
            self._finish(entry)
        return True

    async def _start(self, flight: Flight) -> None:
        """Start the response with chunks of a flight."""
        context, rates, charge = self._context, self._context.rates, self._rule.charge
        result = flight.kept_as or "joined"
        self._record_result(result, flight.entry)
        context.trace.first_token_at = time.monotonic()
        context.route_name = context.trace.route_name = ROUTES[result]
        self._full_rates = rates
        context.rates = Rates(
            int(rates.input * charge), int(rates.cached_input * charge), int(rates.output * charge)
        )
        if context.usage_slot is not None:
            context.usage_slot.begin(begin_usage_row(context), context.rates)
        await self._writer.start()

    def _finish(self, entry: CacheEntry) -> None:
        """Write the end of a kept answer."""
        context, delivered, usage = self._context, self._context.delivered, entry.usage
        context.trace.last_token_at = time.monotonic()
        delivered.prompt_tokens, delivered.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        delivered.output_tokens = usage.output_tokens
        delivered.reasoning_tokens, delivered.prediction = usage.reasoning_tokens, usage.prediction
        delivered.finish_reasons.update(entry.finish_reasons)
        self._cache.metrics.cache_saved_seconds.add((self._rule_name,), entry.duration_s)
        context.trace.cache[-1] |= {
            "saved_s": round(entry.duration_s, 3),
            "saved_nano_dollars": self._full_rates.cost_nano_dollars(usage)
            - context.rates.cost_nano_dollars(usage),
        }
        if context.fields.include_usage:
            final = {"model": context.model, "choices": [], "usage": usage.to_wire()}
            self._writer.write_events(format_event(msgspec.json.encode(self._envelope() | final)))
        self._writer.write_events(SSE_DONE)

    def _envelope(self) -> dict[str, Any]:
        """Return the fields of chunks that belong to this request."""
        context = self._context
        return {
            "id": context.response_id,
            "object": context.api.chunk_object_type,
            "created": int(context.started_at),
        }

    def _record(self, chunks: Iterator[dict[str, Any]]) -> None:
        """Keep chunks, as long as the answer can be read and is not too large."""
        flight = self._flight
        if flight is None or flight.chunks is None:
            return
        try:
            for chunk in chunks:
                encoded = msgspec.json.encode(normalize_chunk(chunk, self._context.model))
                self._recorded_bytes += len(encoded)
                if not self._cache.reserve_bytes(len(encoded), self._recorded_bytes, flight):
                    self._recorded_bytes -= len(encoded)
                    self._drop(flight)
                    return
                flight.add_chunk(encoded)
        except MALFORMED_EVENT_ERRORS:
            self._drop(flight)

    def _drop(self, flight: Flight) -> None:
        """Release the recorded chunks."""
        self._cache.release_bytes(self._recorded_bytes)
        self._recorded_bytes = 0
        flight.drop_chunks()


def parse_chunks(events: bytes) -> Iterator[dict[str, Any]]:
    """Yield the chunks with choices in events."""
    for event in events.removesuffix(EVENT_END).split(EVENT_END):
        data = event_data(event)
        if data is not None and data != _DONE:
            chunk = _decode(data)
            if chunk.get("choices"):
                yield chunk


def normalize_chunk(chunk: dict[str, Any], model: str) -> dict[str, Any]:
    """Return a chunk without what belongs to one request, and with all fields that a response in one piece needs.

    Servers other than Argosy's leave some out. Raises one of `MALFORMED_EVENT_ERRORS` if it is no chunk.
    """
    kept = {
        name: value
        for name, value in chunk.items()
        if name not in {"id", "object", "created", "usage"}
    }
    return {"model": model} | kept | {"choices": list(map(_normalize_choice, chunk["choices"]))}


def _normalize_choice(choice: dict[str, Any]) -> dict[str, Any]:
    normalized: dict[str, Any] = {
        "logprobs": None,
        "finish_reason": None,
        "stop_reason": None,
    } | choice
    normalized["index"] = choice.get("index") or 0
    if "delta" in choice:
        delta = normalized["delta"] = dict(choice["delta"] or {})
        if not isinstance(delta.get("content"), str | None):
            raise TypeError("the content is no text")
    return normalized


def split_body(body: bytes, *, is_chat: bool) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a stream that a response in one piece could have been."""
    response = _decode(body)
    common = {name: response[name] for name in ("model", "system_fingerprint") if name in response}
    for index, each in enumerate(response["choices"]):
        choice = each | {"index": index}
        end = {"finish_reason": choice["finish_reason"], "stop_reason": choice.get("stop_reason")}
        start = choice | {"finish_reason": None, "stop_reason": None}
        if is_chat:
            delta = {
                name: value for name, value in start.pop("message").items() if value is not None
            }
            if "tool_calls" in delta:
                delta["tool_calls"] = [
                    {"index": number} | call for number, call in enumerate(delta["tool_calls"])
                ]
            start["delta"], end["delta"] = delta, {}
        else:
            end["text"] = ""
        yield common | {"choices": [start]}
        yield common | {"choices": [{"index": index} | end]}
