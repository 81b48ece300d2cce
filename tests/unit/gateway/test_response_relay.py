"""A stream that a limit may end: what the client has been told is what was counted, to the token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.gateway.backends import StreamContinuation
from argosy.gateway.backends.delivered_output import DeliveredOutput
from argosy.gateway.backends.native_stream_parser import NativeStreamParser
from argosy.gateway.pool.pool import Pool
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.gateway.principal import ANONYMOUS
from argosy.gateway.proxy.response_relay import ResponseRelay, StreamTimeouts
from argosy.gateway.request_context import CHAT, UNLIMITED_TOKENS, FastPathBudget, RequestContext
from argosy.gateway.request_fields import parse_request_fields
from argosy.gateway.upstream.connection import UpstreamError
from argosy.gateway.upstream.upstream import Upstream
from argosy.gateway.upstream.upstream_response import UpstreamResponse
from argosy.http_server import HttpExchange
from argosy.policy import weighted_tokens
from argosy.protocol import EventParser, parse_endpoint


@dataclass
class Told:
    """An `Out` that keeps what the client gets."""

    data: bytes = b""
    is_full: bool = False

    async def start(self) -> None: ...

    def write_events(self, events: bytes) -> None:
        self.data += events

    def send_keepalive(self) -> None: ...

    def discard(self) -> bool:
        return False

    async def finish(self) -> None: ...


T = TypeVar("T", bound=Told)


def written(lengths: list[int]) -> bytes:
    """A replica's stream of as many choices, by turns, each token an event that names it."""
    stream = b": argosy prompt 7 3\n\n"
    for place in range(max(lengths)):
        for choice, length in enumerate(lengths):
            if place < length:
                last = place == length - 1
                chunk: dict[str, Any] = {"index": choice, "ids": [place]}
                chunk["finish_reason"] = "length" if last else None
                stream += b"data: " + json.dumps({"choices": [chunk]}).encode() + b"\n\n"
                end = b" length" if last else b""
                stream += b": argosy %d %d%s\n\n" % (choice, place, end)
    return stream + b"data: [DONE]\n\n"


class Limit:
    """A visit that ends the answer after `most` tokens, and keeps what was counted."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.counts = [0]
        self.charged = 0.0
        self.delivered = DeliveredOutput()

    def fast_path_budget(self) -> FastPathBudget:
        return FastPathBudget(self.most - 1)

    def on_tokens(self, chunk_times: Sequence[float]) -> str | None:
        del chunk_times
        self.counts.append(self.delivered.output_tokens)
        return "limit" if self.counts[-1] >= self.most else None

    def on_complete(self) -> None: ...

    def charge(self, cost: float) -> None:
        """It is no visit's: the queue's."""
        self.charged += cost


def feeding(
    told: T, clock: Callable[[], float], choices: int = 1, limit: Limit | None = None
) -> tuple[T, RequestContext, ResponseRelay, UpstreamResponse]:
    """A stream that an attempt feeds."""
    body = {"model": "m", "messages": [], "stream": True, "n": choices}
    ask = parse_request_fields(json.dumps(body).encode(), "messages")
    replica = ReplicaEndpoint("r", "argosy", "m", Upstream(parse_endpoint("http://r")))
    pool = Pool("m", [replica])
    exchange = cast("HttpExchange", None)  # nobody is cut off
    context = RequestContext(exchange, ask, CHAT, pool, "chatcmpl-1", ANONYMOUS, ANONYMOUS.tier)
    if limit is not None:
        limit.delivered = context.delivered
    stream = ResponseRelay(
        context,
        told,
        StreamContinuation(ask, CHAT.path, context.delivered),
        filter_states=[] if limit is None else [limit],
        charge=(limit or Limit(UNLIMITED_TOKENS)).charge,
        cancel=lambda: None,
        fast_path_switch=None,
    )
    picked = pool.select_replica(ask, "", 1, (), 0.0)
    assert picked is not None
    context.record_dispatch(picked, 0.0)
    attempt = UpstreamResponse(clock)
    stream.attach_upstream(attempt, replica, NativeStreamParser(context.delivered))
    return told, context, stream, attempt


def streamed(
    lengths: list[int], most: int, pieces: list[bytes]
) -> tuple[RequestContext, Told, Limit]:
    """Feed the pieces to a stream that ends after `most` tokens; also what was counted."""

    async def feed() -> tuple[RequestContext, Told, Limit]:
        limit = Limit(most)
        told, context, stream, attempt = feeding(Told(), lambda: 0.0, len(lengths), limit)
        for piece in pieces:
            attempt.on_body(piece)
        if stream.early_finish_reason is None:
            stream.finish_upstream()
        stream.charge_delivered()
        return context, told, limit

    return asyncio.run(feed())


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    most=st.integers(1, 20),
    cuts=st.lists(st.integers(0, 5000), max_size=12),
)
def test_what_is_told_is_what_is_counted_wherever_a_limit_ends_it(
    lengths: list[int], most: int, cuts: list[int]
) -> None:
    stream = written(lengths)
    borders = sorted({0, len(stream), *(cut % len(stream) for cut in cuts)})
    pieces = [stream[begin:end] for begin, end in pairwise(borders)]
    context, told, limit = streamed(lengths, most, pieces)
    counts = limit.counts
    *chunks, done = EventParser().feed(told.data)
    assert done == b"[DONE]"
    ids: dict[int, list[int]] = {choice: [] for choice in range(len(lengths))}
    finishes: dict[int, str] = {}
    for chunk in map(json.loads, chunks):
        for choice in chunk["choices"]:
            ids[choice["index"]] += choice.get("ids", [])
            if choice["finish_reason"] is not None:
                assert choice["index"] not in finishes
                finishes[choice["index"]] = choice["finish_reason"]
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
    assert all(count < most for count in counts[:-1])


LIMITS = StreamTimeouts(
    first_token_timeout_s=60.0,
    stream_idle_timeout_s=20.0,
    sse_keepalive_interval_s=15.0,
    slow_reader_timeout_s=30.0,
)


@dataclass
class Shown(Told):
    """It counts how often the client was shown that somebody is there."""

    shown: int = 0

    def send_keepalive(self) -> None:
        self.shown += 1


async def test_a_replica_that_only_says_that_it_is_there_stalls() -> None:
    """And the client, who is not given its comments, is shown that somebody is there."""
    now = 0.0
    told, context, stream, attempt = feeding(Shown(), lambda: now)
    attempt.on_body(b": argosy prompt 7 3\n\n")
    shown = []
    for second in range(1, 61):
        now = float(second)
        if second % 10 == 0:
            attempt.on_body(b": keep-alive\n\n")
        stream.check_timeouts(now, LIMITS)
        shown.append(told.shown)
    assert [shown[second - 1] for second in (15, 16, 31, 32, 47, 48)] == [0, 1, 1, 2, 2, 3]
    assert not attempt.end_of_body.done()
    now = 61.0
    stream.check_timeouts(now, LIMITS)
    with pytest.raises(UpstreamError, match="no data for 60 s"):
        await attempt.end_of_body
    assert context.delivered.output_tokens == 0


async def test_who_waits_for_another_replica_is_shown_that_somebody_is_there() -> None:
    now = 0.0
    told, _, stream, attempt = feeding(Shown(), lambda: now)
    attempt.on_body(b": argosy 0 1\n\n")
    stream.detach()
    shown = []
    for second in range(1, 49):
        now = float(second)
        stream.check_timeouts(now, LIMITS)
        shown.append(told.shown)
    assert [shown[second - 1] for second in (15, 16, 31, 32, 47, 48)] == [0, 1, 1, 2, 2, 3]


async def test_a_replica_whose_tokens_have_no_text_yet_gets_on() -> None:
    now = 0.0
    _, context, stream, attempt = feeding(Shown(), lambda: now)
    for second in range(1, 90):
        now = float(second)
        if second % 10 == 0:
            attempt.on_body(b": argosy 0 %d\n\n" % second)
        stream.check_timeouts(now, LIMITS)
    assert not attempt.end_of_body.done()
    assert context.delivered.output_tokens == 8


async def test_a_replica_that_crawls_after_a_quick_start_is_known_by_it_at_once() -> None:
    now = 0.0
    _, context, stream, attempt = feeding(Told(), lambda: now)
    (load,) = context.pool.reachable_loads()
    for token in range(50):
        attempt.on_body(b": argosy 0 %d\n\n" % token)
        now += 0.01
    now = 1.0
    stream.check_timeouts(now, LIMITS)
    quick_s = load.inter_token_s
    for second in range(2, 22):
        now = float(second)
        if second % 5 == 0:
            attempt.on_body(b": argosy 0 %d\n\n" % second)
        stream.check_timeouts(now, LIMITS)
    assert quick_s < 0.1
    assert load.inter_token_s > 0.3


async def test_a_client_that_takes_its_time_does_not_make_its_replica_slow() -> None:
    now = 0.0
    _, context, stream, attempt = feeding(Told(), lambda: now)
    (load,) = context.pool.reachable_loads()

    def flows() -> None:
        nonlocal now
        for token in range(50):
            attempt.on_body(b": argosy 0 %d\n\n" % token)
            now += 0.01

    flows()
    stream.check_timeouts(now, LIMITS)
    quick_s = load.inter_token_s
    for _ in range(3):
        stream.on_backpressure()
        for _ in range(20):
            now += 1.0
            stream.check_timeouts(now, LIMITS)
        stream.on_writable()
        stream.check_timeouts(now, LIMITS)
        flows()
        stream.check_timeouts(now, LIMITS)
    stream.detach()
    assert load.inter_token_s == pytest.approx(quick_s, rel=0.2)


async def test_once_it_has_caught_up_its_replica_is_measured_again() -> None:
    now = 0.0
    _, context, stream, attempt = feeding(Told(), lambda: now)
    (load,) = context.pool.reachable_loads()
    attempt.on_body(b": argosy 0 1\n\n")
    stream.on_backpressure()
    stream.check_timeouts(now, LIMITS)
    stream.on_writable()
    for token in range(2, 6):
        now += 5.0
        stream.check_timeouts(now, LIMITS)
        attempt.on_body(b": argosy 0 %d\n\n" % token)
    stream.check_timeouts(now, LIMITS)
    assert load.inter_token_s > 0.3


class Held(UpstreamResponse):
    """It knows whether it is paused."""

    paused = False

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


async def test_a_client_that_is_behind_holds_its_replica_back_and_the_next_one_too() -> None:
    _, context, stream, _ = feeding(Told(), lambda: 0.0)
    stream.detach()
    picked = context.decision
    assert picked is not None
    stream.on_backpressure()
    for _ in range(2):
        attempt = Held(lambda: 0.0)
        stream.attach_upstream(attempt, picked.replica, NativeStreamParser(context.delivered))
        assert attempt.paused
    stream.on_writable()
    assert not attempt.paused
    stream.on_backpressure()
    assert attempt.paused
