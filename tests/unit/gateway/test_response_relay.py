"""Response relay: output delivered to the client equals output counted, to the token, and timeouts are enforced."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar, cast
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.placed_requests import place

from argosy.deployment import GatewayConfig, Timeouts
from argosy.gateway.backends import StreamContinuation
from argosy.gateway.backends.native_stream_parser import NativeStreamParser
from argosy.gateway.pool.pool import Pool
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.gateway.principal import ANONYMOUS
from argosy.gateway.proxy.placement_driver import PlacementDriver
from argosy.gateway.proxy.response_relay import ResponseRelay
from argosy.gateway.proxy.upstream_call import UpstreamCall
from argosy.gateway.request_context import CHAT, RequestContext
from argosy.gateway.request_fields import parse_request_fields
from argosy.gateway.upstream.connection import UpstreamError
from argosy.gateway.upstream.upstream import Upstream
from argosy.gateway.upstream.upstream_response import UpstreamResponse
from argosy.http_server import HttpExchange
from argosy.policy import weighted_tokens
from argosy.policy.placement import PlacementRequest
from argosy.protocol import EarlyStopReason, EventParser, parse_endpoint


@dataclass
class FakeWriter:
    """A response writer that keeps the client's data."""

    data: bytes = b""
    is_full: bool = False

    async def start(self) -> None: ...

    def write_events(self, events: bytes) -> None:
        self.data += events

    def start_early(self) -> None: ...

    def send_keepalive(self) -> None: ...

    def send_progress(self, comment: bytes, event: bytes | None) -> None: ...

    @property
    def has_output(self) -> bool:
        return False

    def discard(self) -> bool:
        return False

    async def finish(self) -> None: ...


T = TypeVar("T", bound=FakeWriter)
SETTINGS = GatewayConfig(
    models=[],
    timeouts=Timeouts(first_token_timeout_s=60.0, stream_idle_timeout_s=20.0),
    sse_keepalive_interval_s=15.0,
    slow_reader_timeout_s=30.0,
)


def make_native_stream(lengths: list[int]) -> bytes:
    """Return the stream of a replica for choices of these lengths, interleaved, with one event per token."""
    stream = b": argosy prompt 7 3\n\n"
    for index in range(max(lengths)):
        for choice, length in enumerate(lengths):
            if index < length:
                last = index == length - 1
                chunk: dict[str, Any] = {"index": choice, "ids": [index]}
                chunk["finish_reason"] = "length" if last else None
                stream += b"data: " + json.dumps({"choices": [chunk]}).encode() + b"\n\n"
                end = b" length" if last else b""
                stream += b": argosy %d %d%s\n\n" % (choice, index, end)
    return stream + b"data: [DONE]\n\n"


class TokenLimit:
    """Filter that ends the response after `max_tokens` tokens and keeps the counts."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.counts = [0]
        self.charged = 0.0
        """Cost that the queue is charged."""

    def observe(self, driver: PlacementDriver) -> None:
        """Sum what the driver's queue is charged."""
        record_progress = driver.record_progress

        def record_and_sum(request: PlacementRequest, output_tokens: int, service: float) -> None:
            self.charged += service
            record_progress(request, output_tokens, service)

        driver.record_progress = record_and_sum  # type: ignore[method-assign]

    async def on_request(self, context: RequestContext) -> bool:
        del context
        return True

    def on_tokens(
        self, context: RequestContext, chunk_times: Sequence[float]
    ) -> EarlyStopReason | None:
        del chunk_times
        self.counts.append(context.delivered.output_tokens)
        return "limit" if self.counts[-1] >= self.max_tokens else None

    def on_complete(self, context: RequestContext) -> None: ...


def make_relay(
    writer: T, clock: Callable[[], float], choices: int = 1, limit: TokenLimit | None = None
) -> tuple[T, RequestContext, ResponseRelay, UpstreamResponse]:
    """Return a writer, a request, its relay, and an upstream response that feeds the relay."""
    body = {"model": "m", "messages": [], "stream": True, "n": choices}
    fields = parse_request_fields(json.dumps(body).encode(), "messages")
    replica = ReplicaEndpoint("r", "argosy", "m", Upstream(parse_endpoint("http://r")))
    pool = Pool("m", [replica])
    exchange = cast("HttpExchange", None)  # no client is disconnected
    context = RequestContext(exchange, fields, CHAT, pool, "chatcmpl-1", ANONYMOUS, ANONYMOUS.tier)
    driver, call = place(context, clock)
    if limit is not None:
        context.filters.append(limit)
        limit.observe(driver)
    relay = ResponseRelay(
        context,
        writer,
        StreamContinuation(fields, CHAT.path, context.delivered),
        driver,
        task=Mock(spec=asyncio.Task),
        settings=SETTINGS,
    )
    relay.attach(call, NativeStreamParser(context.delivered))
    return writer, context, relay, call


def relay_chunks(
    lengths: list[int], max_tokens: int, chunks: list[bytes]
) -> tuple[RequestContext, FakeWriter, TokenLimit]:
    """Relay the chunks with a limit of `max_tokens`. Also returns the writer and the limit's state."""

    async def feed() -> tuple[RequestContext, FakeWriter, TokenLimit]:
        limit = TokenLimit(max_tokens)
        writer, context, relay, response = make_relay(
            FakeWriter(), lambda: 0.0, len(lengths), limit
        )
        for chunk in chunks:
            response.on_body(chunk)
        if context.end_reason is None:
            relay.finish_upstream()
        relay.charge_delivered()
        return context, writer, limit

    return asyncio.run(feed())


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    max_tokens=st.integers(1, 20),
    cuts=st.lists(st.integers(0, 5000), max_size=12),
)
def test_delivered_output_equals_counted_output_at_any_limit(
    lengths: list[int], max_tokens: int, cuts: list[int]
) -> None:
    stream = make_native_stream(lengths)
    boundaries = sorted({0, len(stream), *(cut % len(stream) for cut in cuts)})
    chunks = [stream[start:end] for start, end in pairwise(boundaries)]
    context, writer, limit = relay_chunks(lengths, max_tokens, chunks)
    counts = limit.counts
    *events, done = EventParser().feed(writer.data)
    assert done == b"[DONE]"
    ids: dict[int, list[int]] = {choice: [] for choice in range(len(lengths))}
    finishes: dict[int, str] = {}
    for event in map(json.loads, events):
        for choice in event["choices"]:
            ids[choice["index"]] += choice.get("ids", [])
            if choice["finish_reason"] is not None:
                assert choice["index"] not in finishes
                assert choice["finish_reason"] == "length"
                finishes[choice["index"]] = choice.get("stop_reason") or "length"
    delivered = context.delivered
    assert sum(map(len, ids.values())) == delivered.output_tokens == counts[-1]
    assert limit.charged == weighted_tokens(7 - 3, counts[-1])
    assert counts == sorted(set(counts))
    assert finishes.keys() == ids.keys()
    for choice, length in enumerate(lengths):
        assert ids[choice] == list(range(len(ids[choice])))
        assert finishes[choice] == ("length" if len(ids[choice]) == length else "limit")
    stopped = "limit" in finishes.values()
    assert stopped == (delivered.output_tokens < sum(lengths))
    assert all(count < max_tokens for count in counts[:-1])


@dataclass
class KeepaliveCounter(FakeWriter):
    """A writer that counts keep-alive comments."""

    keepalives: int = 0

    def send_keepalive(self) -> None:
        self.keepalives += 1


async def test_replica_that_sends_only_comments_times_out() -> None:
    """The client does not get the replica's comments, but keep-alive comments of the gateway."""
    now = 0.0
    writer, context, relay, response = make_relay(KeepaliveCounter(), lambda: now)
    response.on_body(b": argosy prompt 7 3\n\n")
    keepalives = []
    for second in range(1, 61):
        now = float(second)
        if second % 10 == 0:
            response.on_body(b": keep-alive\n\n")
        relay.check_timeouts(now)
        keepalives.append(writer.keepalives)
    assert [keepalives[second - 1] for second in (15, 16, 31, 32, 47, 48)] == [0, 1, 1, 2, 2, 3]
    assert not response.end_of_body.done()
    now = 61.0
    relay.check_timeouts(now)
    with pytest.raises(UpstreamError, match="no data for 60 s"):
        await response.end_of_body
    assert context.delivered.output_tokens == 0


async def test_client_gets_keepalives_during_failover() -> None:
    now = 0.0
    writer, _, relay, response = make_relay(KeepaliveCounter(), lambda: now)
    response.on_body(b": argosy 0 1\n\n")
    relay.detach()
    keepalives = []
    for second in range(1, 49):
        now = float(second)
        relay.check_timeouts(now)
        keepalives.append(writer.keepalives)
    assert [keepalives[second - 1] for second in (15, 16, 31, 32, 47, 48)] == [0, 1, 1, 2, 2, 3]


async def test_tokens_without_text_prevent_timeout() -> None:
    now = 0.0
    _, context, relay, response = make_relay(KeepaliveCounter(), lambda: now)
    for second in range(1, 90):
        now = float(second)
        if second % 10 == 0:
            response.on_body(b": argosy 0 %d\n\n" % second)
        relay.check_timeouts(now)
    assert not response.end_of_body.done()
    assert context.delivered.output_tokens == 8


async def test_slowdown_after_fast_start_is_measured_immediately() -> None:
    now = 0.0
    _, context, relay, response = make_relay(FakeWriter(), lambda: now)
    (load,) = context.pool.reachable_loads()
    for token in range(50):
        response.on_body(b": argosy 0 %d\n\n" % token)
        now += 0.01
    now = 1.0
    relay.check_timeouts(now)
    fast_s = load.inter_token_s
    for second in range(2, 22):
        now = float(second)
        if second % 5 == 0:
            response.on_body(b": argosy 0 %d\n\n" % second)
        relay.check_timeouts(now)
    assert fast_s < 0.1
    assert load.inter_token_s > 0.3


async def test_slow_client_does_not_make_replica_look_slow() -> None:
    now = 0.0
    _, context, relay, response = make_relay(FakeWriter(), lambda: now)
    (load,) = context.pool.reachable_loads()

    def stream_tokens() -> None:
        nonlocal now
        for token in range(50):
            response.on_body(b": argosy 0 %d\n\n" % token)
            now += 0.01

    stream_tokens()
    relay.check_timeouts(now)
    fast_s = load.inter_token_s
    for _ in range(3):
        relay.on_backpressure()
        for _ in range(20):
            now += 1.0
            relay.check_timeouts(now)
        relay.on_writable()
        relay.check_timeouts(now)
        stream_tokens()
        relay.check_timeouts(now)
    relay.detach()
    assert load.inter_token_s == pytest.approx(fast_s, rel=0.2)


async def test_replica_is_measured_again_after_backpressure_ends() -> None:
    now = 0.0
    _, context, relay, response = make_relay(FakeWriter(), lambda: now)
    (load,) = context.pool.reachable_loads()
    response.on_body(b": argosy 0 1\n\n")
    relay.on_backpressure()
    relay.check_timeouts(now)
    relay.on_writable()
    for token in range(2, 6):
        now += 5.0
        relay.check_timeouts(now)
        response.on_body(b": argosy 0 %d\n\n" % token)
    relay.check_timeouts(now)
    assert load.inter_token_s > 0.3


class PausableCall(UpstreamCall):
    """An upstream response that knows whether reading is paused."""

    is_paused = False

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


async def test_backpressure_pauses_current_and_next_replica() -> None:
    _, context, relay, _ = make_relay(FakeWriter(), lambda: 0.0)
    relay.detach()
    assert context.placement is not None
    (attempt,) = context.placement.attempts
    relay.on_backpressure()
    for _ in range(2):
        call = PausableCall(attempt, lambda: 0.0)
        relay.attach(call, NativeStreamParser(context.delivered))
        assert call.is_paused
    relay.on_writable()
    assert not call.is_paused
    relay.on_backpressure()
    assert call.is_paused
