"""One event of megabytes, as all log-probabilities of a prompt are, or all blocks of a cache: it is read once."""

from __future__ import annotations

import json
import statistics
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.gateway.test_passthrough_parser import reading

from argosy.gateway.backends import CHAT_PATH, StreamContinuation, get_adapter
from argosy.gateway.backends.delivered_output import DeliveredOutput
from argosy.gateway.backends.native_stream_parser import NativeStreamParser
from argosy.gateway.request_fields import parse_request_fields
from argosy.protocol import EventParser

SIZE = 1024


def carried() -> Callable[[bytes], object]:
    """Reads the stream of a server that can be carried on."""
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    ask = parse_request_fields(json.dumps(body).encode(), "messages")
    leg = StreamContinuation(ask, CHAT_PATH, DeliveredOutput()).plan_upstream(
        get_adapter("vllm"), "m"
    )
    assert leg is not None
    return leg.parser.feed


@pytest.mark.parametrize(
    "make",
    [
        carried,
        lambda: reading(DeliveredOutput()).feed,
        lambda: NativeStreamParser(DeliveredOutput()).feed,
        lambda: EventParser().feed,
    ],
    ids=["carried", "passed", "journaled", "events"],
)
def test_what_has_come_is_not_looked_at_again_with_each_piece(
    make: Callable[[], Callable[[bytes], Any]],
) -> None:
    delta = {"content": "x" * 1000 * SIZE}
    chunk = {"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    stream = b"data: " + json.dumps(chunk).encode() + b"\n\n: argosy 0 5\n\n"
    *pieces, last = [stream[start : start + SIZE] for start in range(0, len(stream), SIZE)]
    feed, taken = make(), list[int]()
    tracemalloc.start()
    try:
        for piece in pieces:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            assert not feed(piece)
            taken.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert statistics.median(taken) < SIZE
    assert feed(last)
