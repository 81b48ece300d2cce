"""Streams that nobody can carry on: what of their events is counted, whatever servers leave null or send as parts."""

from __future__ import annotations

import json

import msgspec
import pytest

from argosy.gateway.backends import CHAT_PATH, StreamContinuation, get_adapter
from argosy.gateway.backends.delivered_output import DeliveredOutput
from argosy.gateway.backends.stream_parser import StreamParser
from argosy.gateway.request_fields import parse_request_fields

ASKED = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}


def reading(delivered: DeliveredOutput) -> StreamParser:
    """Reads the stream of a hosted API."""
    ask = parse_request_fields(json.dumps(ASKED).encode(), "messages")
    leg = StreamContinuation(ask, CHAT_PATH, delivered).plan_upstream(get_adapter("openai"), "m")
    assert leg is not None
    return leg.parser


def event(**said: object) -> bytes:
    return b"data: " + msgspec.json.encode({"id": "x", "created": 1, "model": "m"} | said) + b"\n\n"


def test_an_error_is_one_whatever_else_is_null() -> None:
    reader = reading(DeliveredOutput())
    assert not reader.feed(event(error={"message": "no room"}, choices=None, object=None))
    assert "no room" in reader.failure


def test_usage_is_counted_whatever_else_is_null() -> None:
    delivered = DeliveredOutput()
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    assert not reading(delivered).feed(event(choices=None, object=None, usage=usage))
    assert (delivered.prompt_tokens, delivered.output_tokens) == (7, 3)


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
def test_whatever_says_something_counts(delta: dict[str, object]) -> None:
    delivered = DeliveredOutput()
    told = event(choices=[{"index": 0, "delta": delta, "finish_reason": None}])
    assert reading(delivered).feed(told) == told
    assert delivered.output_tokens == 1


def test_text_that_cannot_be_read_names_nobody() -> None:
    """It is passed on, as the client may know what it is; who gave it is not known by it."""
    delivered = DeliveredOutput()
    ask = parse_request_fields(json.dumps(ASKED).encode(), "messages")
    carrier = StreamContinuation(ask, CHAT_PATH, delivered)
    leg = carrier.plan_upstream(get_adapter("openai"), "m")
    assert leg is not None
    told = event(id="?", choices=[{"index": 0, "delta": {"content": "a"}}])
    leg.parser.feed(told.replace(b"?", b"\xff"))
    assert carrier.response_identity is None
