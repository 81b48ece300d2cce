"""Parsers scan an event of megabytes once, such as the log-probabilities of a prompt or all blocks of a cache."""

from __future__ import annotations

import json
import statistics
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.gateway.test_passthrough_parser import make_parser

from argosy.gateway.backends import (
    CHAT_PATH,
    StreamContinuation,
    UpstreamTarget,
    get_adapter,
)
from argosy.gateway.backends.native_stream_parser import NativeStreamParser
from argosy.gateway.backends.stream_parser import DeliveredOutput
from argosy.gateway.request_fields import parse_request_fields
from argosy.protocol import EventParser

SIZE = 1024


def make_resumable_feed() -> Callable[[bytes], object]:
    """Return the `feed` of the parser for an engine whose streams can be resumed."""
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    fields = parse_request_fields(json.dumps(body).encode(), "messages")
    plan = StreamContinuation(fields, CHAT_PATH, DeliveredOutput()).plan_upstream(
        UpstreamTarget(get_adapter("vllm"), "m")
    )
    assert plan is not None
    return plan.parser.feed


@pytest.mark.parametrize(
    "make_feed",
    [
        make_resumable_feed,
        lambda: make_parser(DeliveredOutput()).feed,
        lambda: NativeStreamParser(DeliveredOutput()).feed,
        lambda: EventParser().feed,
    ],
    ids=["resumable", "passthrough", "native", "events"],
)
def test_parser_does_not_scan_received_bytes_again(
    make_feed: Callable[[], Callable[[bytes], Any]],
) -> None:
    delta = {"content": "x" * 1000 * SIZE}
    event = {"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    stream = b"data: " + json.dumps(event).encode() + b"\n\n: argosy 0 5\n\n"
    *chunks, last_chunk = [stream[start : start + SIZE] for start in range(0, len(stream), SIZE)]
    feed, allocated = make_feed(), list[int]()
    tracemalloc.start()
    try:
        for chunk in chunks:
            tracemalloc.reset_peak()
            used_before, _ = tracemalloc.get_traced_memory()
            assert not feed(chunk)
            allocated.append(tracemalloc.get_traced_memory()[1] - used_before)
    finally:
        tracemalloc.stop()
    assert statistics.median(allocated) < SIZE
    assert feed(last_chunk)
