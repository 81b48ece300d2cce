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

from argosy.gateway.backends import Carrier
from argosy.gateway.backends.native_stream_parser import Delivered, JournalReader
from argosy.gateway.pool.pool import Pool
from argosy.gateway.pool.replica_endpoint import Replica
from argosy.gateway.principal import ANYONE
from argosy.gateway.proxy.response_relay import ClientStream, StreamLimits
from argosy.gateway.request_context import ANY, CHAT, Alone, Journey
from argosy.gateway.request_fields import read
from argosy.gateway.upstream.connection import UpstreamError
from argosy.gateway.upstream.upstream import Upstream
from argosy.gateway.upstream.upstream_response import Attempt
from argosy.http_server import Exchange
from argosy.policy import service
from argosy.protocol import EventParser, parse_endpoint


@dataclass
class Told:
    """An `Out` that keeps what the client gets."""

    data: bytes = b""
    full: bool = False

    async def begin(self) -> None: ...

    def push(self, data: bytes) -> None:
        self.data += data

    def keep_alive(self) -> None: ...

    def retract(self) -> bool:
        return False

    async def end(self) -> None: ...


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
        self.delivered = Delivered()

    def alone(self) -> Alone:
        return Alone(self.most - 1)

    def counted(self, times: Sequence[float]) -> str | None:
        del times
        self.counts.append(self.delivered.output_tokens)
        return "limit" if self.counts[-1] >= self.most else None

    def leave(self) -> None: ...

    def charge(self, cost: float) -> None:
        """It is no visit's: the queue's."""
        self.charged += cost


def feeding(
    told: T, clock: Callable[[], float], choices: int = 1, limit: Limit | None = None
) -> tuple[T, Journey, ClientStream, Attempt]:
    """A stream that an attempt feeds."""
    body = {"model": "m", "messages": [], "stream": True, "n": choices}
    ask = read(json.dumps(body).encode(), "messages")
    replica = Replica("r", "argosy", "m", Upstream(parse_endpoint("http://r")))
    pool = Pool("m", [replica])
    exchange = cast("Exchange", None)  # nobody is cut off
    journey = Journey(exchange, ask, CHAT, pool, "chatcmpl-1", ANYONE, ANYONE.tier)
    if limit is not None:
        limit.delivered = journey.delivered
    stream = ClientStream(
        journey,
        told,
        Carrier(ask, CHAT.path, journey.delivered),
        visits=[] if limit is None else [limit],
        charge=(limit or Limit(ANY)).charge,
        leave=lambda: None,
        shortcut=None,
    )
    picked = pool.pick(ask, "", 1, (), 0.0)
    assert picked is not None
    journey.goes_to(picked, 0.0)
    attempt = Attempt(clock)
    stream.feed_from(attempt, replica, JournalReader(journey.delivered))
    return told, journey, stream, attempt


def streamed(lengths: list[int], most: int, pieces: list[bytes]) -> tuple[Journey, Told, Limit]:
    """Feed the pieces to a stream that ends after `most` tokens; also what was counted."""

    async def feed() -> tuple[Journey, Told, Limit]:
        limit = Limit(most)
        told, journey, stream, attempt = feeding(Told(), lambda: 0.0, len(lengths), limit)
        for piece in pieces:
            attempt.on_body(piece)
        if stream.stopped is None:
            stream.finish()
        stream.settle()
        return journey, told, limit

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
    journey, told, limit = streamed(lengths, most, pieces)
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
    delivered = journey.delivered
    assert sum(map(len, ids.values())) == delivered.output_tokens == counts[-1]
    assert limit.charged == service(7 - 3, counts[-1])
    assert counts == sorted(set(counts))
    assert finishes.keys() == ids.keys()
    for choice, length in enumerate(lengths):
        assert ids[choice] == list(range(len(ids[choice])))
        assert finishes[choice] == ("length" if len(ids[choice]) == length else "limit")
    stopped = "limit" in finishes.values()
    assert stopped == (delivered.output_tokens < sum(lengths))
    assert all(count < most for count in counts[:-1])


LIMITS = StreamLimits(
    first_token_s=60.0, between_tokens_s=20.0, keep_alive_s=15.0, slow_reader_s=30.0
)


@dataclass
class Shown(Told):
    """It counts how often the client was shown that somebody is there."""

    shown: int = 0

    def keep_alive(self) -> None:
        self.shown += 1


async def test_a_replica_that_only_says_that_it_is_there_stalls() -> None:
    """And the client, who is not given its comments, is shown that somebody is there."""
    now = 0.0
    told, journey, stream, attempt = feeding(Shown(), lambda: now)
    attempt.on_body(b": argosy prompt 7 3\n\n")
    shown = []
    for second in range(1, 61):
        now = float(second)
        if second % 10 == 0:
            attempt.on_body(b": keep-alive\n\n")
        stream.tend(now, LIMITS)
        shown.append(told.shown)
    assert [shown[second - 1] for second in (15, 16, 31, 32, 47, 48)] == [0, 1, 1, 2, 2, 3]
    assert not attempt.end.done()
    now = 61.0
    stream.tend(now, LIMITS)
    with pytest.raises(UpstreamError, match="nothing came for 60 s"):
        await attempt.end
    assert journey.delivered.output_tokens == 0


async def test_who_waits_for_another_replica_is_shown_that_somebody_is_there() -> None:
    now = 0.0
    told, _, stream, attempt = feeding(Shown(), lambda: now)
    attempt.on_body(b": argosy 0 1\n\n")
    stream.let_go()
    shown = []
    for second in range(1, 49):
        now = float(second)
        stream.tend(now, LIMITS)
        shown.append(told.shown)
    assert [shown[second - 1] for second in (15, 16, 31, 32, 47, 48)] == [0, 1, 1, 2, 2, 3]


async def test_a_replica_whose_tokens_have_no_text_yet_gets_on() -> None:
    now = 0.0
    _, journey, stream, attempt = feeding(Shown(), lambda: now)
    for second in range(1, 90):
        now = float(second)
        if second % 10 == 0:
            attempt.on_body(b": argosy 0 %d\n\n" % second)
        stream.tend(now, LIMITS)
    assert not attempt.end.done()
    assert journey.delivered.output_tokens == 8


async def test_a_replica_that_crawls_after_a_quick_start_is_known_by_it_at_once() -> None:
    now = 0.0
    _, journey, stream, attempt = feeding(Told(), lambda: now)
    (load,) = journey.pool.loads()
    for token in range(50):
        attempt.on_body(b": argosy 0 %d\n\n" % token)
        now += 0.01
    now = 1.0
    stream.tend(now, LIMITS)
    quick_s = load.decode_s
    for second in range(2, 22):
        now = float(second)
        if second % 5 == 0:
            attempt.on_body(b": argosy 0 %d\n\n" % second)
        stream.tend(now, LIMITS)
    assert quick_s < 0.1
    assert load.decode_s > 0.3


async def test_a_client_that_takes_its_time_does_not_make_its_replica_slow() -> None:
    now = 0.0
    _, journey, stream, attempt = feeding(Told(), lambda: now)
    (load,) = journey.pool.loads()

    def flows() -> None:
        nonlocal now
        for token in range(50):
            attempt.on_body(b": argosy 0 %d\n\n" % token)
            now += 0.01

    flows()
    stream.tend(now, LIMITS)
    quick_s = load.decode_s
    for _ in range(3):
        stream.on_full()
        for _ in range(20):
            now += 1.0
            stream.tend(now, LIMITS)
        stream.on_room()
        stream.tend(now, LIMITS)
        flows()
        stream.tend(now, LIMITS)
    stream.let_go()
    assert load.decode_s == pytest.approx(quick_s, rel=0.2)


async def test_once_it_has_caught_up_its_replica_is_measured_again() -> None:
    now = 0.0
    _, journey, stream, attempt = feeding(Told(), lambda: now)
    (load,) = journey.pool.loads()
    attempt.on_body(b": argosy 0 1\n\n")
    stream.on_full()
    stream.tend(now, LIMITS)
    stream.on_room()
    for token in range(2, 6):
        now += 5.0
        stream.tend(now, LIMITS)
        attempt.on_body(b": argosy 0 %d\n\n" % token)
    stream.tend(now, LIMITS)
    assert load.decode_s > 0.3


class Held(Attempt):
    """It knows whether it is paused."""

    paused = False

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False


async def test_a_client_that_is_behind_holds_its_replica_back_and_the_next_one_too() -> None:
    _, journey, stream, _ = feeding(Told(), lambda: 0.0)
    stream.let_go()
    picked = journey.picked
    assert picked is not None
    stream.on_full()
    for _ in range(2):
        attempt = Held(lambda: 0.0)
        stream.feed_from(attempt, picked.replica, JournalReader(journey.delivered))
        assert attempt.paused
    stream.on_room()
    assert not attempt.paused
    stream.on_full()
    assert attempt.paused
