"""A stream that a limit may end: what the client has been told is what was counted, to the token."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from argosy.gateway.ask import read
from argosy.gateway.attempt import Attempt
from argosy.gateway.caller import ANYONE
from argosy.gateway.dialects import Carrier
from argosy.gateway.journal import JournalReader
from argosy.gateway.journey import CHAT, Journey
from argosy.gateway.replicas import Pool, Replica
from argosy.gateway.stream import ClientStream
from argosy.gateway.upstream import Upstream
from argosy.policy import LeastCost
from argosy.protocol import EventParser, parse_endpoint
from argosy.web import Exchange


@dataclass
class Told:
    """An `Out` that keeps what the client gets."""

    data: bytes = b""

    async def begin(self) -> None: ...

    def push(self, data: bytes) -> None:
        self.data += data

    def keep_alive(self) -> None: ...

    def retract(self) -> bool:
        return False

    async def end(self) -> None: ...


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


def streamed(lengths: list[int], most: int, pieces: list[bytes]) -> tuple[Journey, Told, list[int]]:
    """Feed the pieces to a stream that ends after `most` tokens; also what was counted."""
    body = {"model": "m", "messages": [], "stream": True, "n": len(lengths)}
    ask = read(json.dumps(body).encode(), "messages")
    replica = Replica("r", "argosy", "m", Upstream(parse_endpoint("http://r")))
    pool = Pool("m", [replica], LeastCost())
    exchange = cast("Exchange", None)  # nobody is cut off
    journey = Journey(exchange, ask, CHAT, pool, b"chatcmpl-1 5", ANYONE)
    told, counts = Told(), [0]

    class Limit:
        def counted(self, now: float) -> str | None:
            del now
            counts.append(journey.delivered.output_tokens)
            return "limit" if counts[-1] >= most else None

        def leave(self) -> None: ...

    async def feed() -> None:
        stream = ClientStream(
            journey,
            told,
            Carrier(ask, CHAT.path, journey.delivered),
            visits=[Limit()],
            charge=lambda _: None,
            leave=lambda: None,
        )
        picked = pool.pick(ask, "", (), 0.0)
        assert picked is not None
        journey.goes_to(picked, 0.0)
        attempt = Attempt(lambda: 0.0)
        stream.feed_from(attempt, replica, JournalReader(journey.delivered))
        for piece in pieces:
            attempt.on_body(piece)
        if stream.stopped is None:
            stream.finish()

    asyncio.run(feed())
    return journey, told, counts


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
    journey, told, counts = streamed(lengths, most, pieces)
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
    assert counts == sorted(set(counts))
    assert finishes.keys() == ids.keys()
    for choice, length in enumerate(lengths):
        assert ids[choice] == list(range(len(ids[choice])))
        assert finishes[choice] == ("length" if len(ids[choice]) == length else "limit")
    stopped = "limit" in finishes.values()
    assert stopped == (delivered.output_tokens < sum(lengths))
    assert all(count < most for count in counts[:-1])
