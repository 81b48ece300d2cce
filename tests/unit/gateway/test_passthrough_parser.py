"""Streams that cannot be resumed are counted, even if fields are null or content is not a plain string."""

from __future__ import annotations

import json

import msgspec
import pytest

from argosy.gateway.backends import (
    CHAT_PATH,
    StreamContinuation,
    UpstreamTarget,
    get_adapter,
)
from argosy.gateway.backends.stream_parser import DeliveredOutput, StreamParser
from argosy.gateway.request_fields import parse_request_fields

BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}


def make_parser(delivered: DeliveredOutput) -> StreamParser:
    """Return the parser for the stream of a hosted API."""
    fields = parse_request_fields(json.dumps(BODY).encode(), "messages")
    plan = StreamContinuation(fields, CHAT_PATH, delivered).plan_upstream(
        UpstreamTarget(get_adapter("openai"), "m")
    )
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
    delivered = DeliveredOutput()
    fields = parse_request_fields(json.dumps(BODY).encode(), "messages")
    continuation = StreamContinuation(fields, CHAT_PATH, delivered)
    plan = continuation.plan_upstream(UpstreamTarget(get_adapter("openai"), "m"))
    assert plan is not None
    chunk = format_chunk(id="?", choices=[{"index": 0, "delta": {"content": "a"}}])
    plan.parser.feed(chunk.replace(b"?", b"\xff"))
    assert continuation.response_identity is None
