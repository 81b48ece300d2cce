"""Parsers of streams: what counts as content and as tokens, stop strings, and the cost of long events and lists."""

from __future__ import annotations

import json
import statistics
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.deployment import BackendKind
from argosy.gateway.backends import (
    CHAT_PATH,
    FirstContentDetector,
    StreamContinuation,
    UpstreamTarget,
    get_adapter,
)
from argosy.gateway.backends.emitted_choice import StopStringFilter
from argosy.gateway.backends.native_stream_parser import NativeStreamParser
from argosy.gateway.backends.stream_parser import DeliveredOutput, StreamParser
from argosy.gateway.request_fields import parse_request_fields
from argosy.protocol import EventParser

BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
EVENTS_WITHOUT_CONTENT = b"".join(
    (
        b": keep-alive\n\n",
        b"event: ping\n\n",
        b"data:\r\n\r\n",
        b'data: {"choices": [], "prompt_filter_results": []}\n\n',
        b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n',
        b'data: {"choices": [{"index": 0, "delta": {"content": null}, "finish_reason": null}]}\n\n',
        b'data: {"choices": [{"index": 0, "text": ""}]}\n\n',
    )
)
EVENTS_WITH_CONTENT = [
    b'{"choices": [{"index": 0, "delta": {"content": "a"}}]}',
    b'{"choices": [{"index": 0, "delta": {"reasoning_content": "a"}}]}',
    b'{"choices": [{"index": 0, "delta": {"role": "assistant", "tool_calls": [{}]}}]}',
    b'{"choices": [{"index": 0, "text": " "}]}',
    b'{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}',
    b'{"error": {"message": "no"}}',
    b'{"choices": 7}',
    b'{"choices": [{"index": 0, "delta": {"content": "\xff"}}]}',
    b"[DONE]",
]
SIZE = 1024
"""Size of the pieces of a long event."""


def make_continuation(delivered: DeliveredOutput) -> StreamContinuation:
    fields = parse_request_fields(json.dumps(BODY).encode(), "messages")
    return StreamContinuation(fields, CHAT_PATH, delivered)


def make_parser(delivered: DeliveredOutput, kind: BackendKind = "openai") -> StreamParser:
    """Return the parser for the stream of a server, by default one whose streams cannot be resumed."""
    target = UpstreamTarget(get_adapter(kind), "m")
    plan = make_continuation(delivered).plan_upstream(target)
    assert plan is not None
    return plan.parser


def format_chunk(**values: object) -> bytes:
    return (
        b"data: " + msgspec.json.encode({"id": "x", "created": 1, "model": "m"} | values) + b"\n\n"
    )


def test_error_is_failure_if_other_fields_are_null() -> None:
    parser = make_parser(DeliveredOutput())
    assert not parser.feed(format_chunk(error={"message": "no room"}, choices=None, object=None))
    assert "no room" in parser.failure


def test_usage_is_counted_if_other_fields_are_null() -> None:
    delivered = DeliveredOutput()
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    assert not make_parser(delivered).feed(format_chunk(choices=None, object=None, usage=usage))
    assert (delivered.prompt_tokens, delivered.output_tokens) == (7, 3)


@pytest.mark.parametrize(
    ("details", "reasoning_tokens"),
    [
        ({"reasoning_tokens": 2}, 2),
        ({"reasoning_tokens": 2**40}, None),
        ({"reasoning_tokens": -1}, None),
        ({"reasoning_tokens": "2"}, None),
        ({}, None),
        ("many", None),
        (None, None),
    ],
)
def test_unreadable_details_of_usage_do_not_hide_it(
    details: object, reasoning_tokens: int | None
) -> None:
    delivered = DeliveredOutput()
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "completion_tokens_details": details}
    make_parser(delivered).feed(format_chunk(choices=[], usage=usage))
    assert (delivered.output_tokens, delivered.reasoning_tokens) == (3, reasoning_tokens)


@pytest.mark.parametrize(
    "delta",
    [
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "a"}]}]},
        {"function_call": {"arguments": "a"}},
        {"reasoning_details": [{"type": "reasoning.text", "text": "a"}], "reasoning": "a"},
        {"audio": {"data": "AAAA"}},
    ],
    ids=lambda delta: next(iter(delta)),
)
def test_delta_with_any_content_counts_as_token(delta: dict[str, object]) -> None:
    delivered = DeliveredOutput()
    chunk = format_chunk(choices=[{"index": 0, "delta": delta, "finish_reason": None}])
    assert make_parser(delivered).feed(chunk) == chunk
    assert delivered.output_tokens == 1


def test_chunk_with_invalid_utf8_sets_no_response_identity() -> None:
    """The chunk is still forwarded, because the client may understand it."""
    continuation = make_continuation(DeliveredOutput())
    plan = continuation.plan_upstream(UpstreamTarget(get_adapter("openai"), "m"))
    assert plan is not None
    chunk = format_chunk(id="?", choices=[{"index": 0, "delta": {"content": "a"}}])
    plan.parser.feed(chunk.replace(b"?", b"\xff"))
    assert continuation.response_identity is None


@pytest.mark.parametrize("event", EVENTS_WITH_CONTENT)
@given(cuts=st.sets(st.integers(1, len(EVENTS_WITHOUT_CONTENT))))
def test_only_content_starts_response(event: bytes, cuts: set[int]) -> None:
    detector = FirstContentDetector()
    borders = [0, *sorted(cuts), len(EVENTS_WITHOUT_CONTENT)]
    assert not any(
        detector.feed(EVENTS_WITHOUT_CONTENT[start:end]) for start, end in pairwise(borders)
    )
    assert not detector.feed(b"data: ")
    assert not detector.feed(event)
    assert detector.feed(b"\n\n")


class CountedStopStrings(tuple[str, ...]):
    """Stop strings that count how often all of them are iterated."""

    __slots__ = ()
    scan_count = 0

    def __iter__(self) -> Iterator[str]:
        type(self).scan_count += 1
        return super().__iter__()


def test_long_stop_string_list_is_not_scanned_for_each_token() -> None:
    """A request may have hundreds of thousands of stop strings."""
    stop_filter = StopStringFilter(CountedStopStrings(["one", "three"]))
    passed = "".join(stop_filter.feed(text) for text in ["zero", " on", "e", " two"])
    assert passed + stop_filter.finish("", None) == "zero one two"
    assert CountedStopStrings.scan_count <= 1


@pytest.mark.parametrize(
    "make_feed",
    [
        lambda: make_parser(DeliveredOutput(), "vllm").feed,
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
