"""Errors of servers: which status a response or an event stands for, in the format of each kind of server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from argosy.deployment import BackendKind
from argosy.gateway.backends import StreamContinuation, UpstreamTarget, get_adapter
from argosy.gateway.backends.stream_parser import DeliveredOutput
from argosy.gateway.proxy.upstream_call import (
    MAX_JSON_CONTAINERS,
    UpstreamRefusedError,
    check_buffered_response,
)
from argosy.gateway.request_fields import MAX_CHOICES, parse_request_fields
from argosy.gateway.upstream import UpstreamError
from argosy.policy import AttemptOutcome, classify_status

TEXT = b'{"id": "x", "choices": [{"index": 0, "text": "something", "finish_reason": "stop"}]}'
MANY_OBJECTS = b'{"error": [%b{}]}' % (b"{}," * MAX_JSON_CONTAINERS)


def error(message: str, code: object = None) -> bytes:
    return json.dumps({"error": {"message": message, "code": code}}).encode()


@pytest.mark.parametrize(
    ("status", "body", "kind", "expected"),
    [
        (301, b"", "openai", 301),
        (307, b"moved", "openai", 307),
        (204, b"", "openai", 204),
        (202, b'{"id": "queued"}', "openai", 202),
        (402, error("No credits", 402), "openai", 402),
        # The fleet chose the name of the model, and not the client.
        (403, error("No access", "model_not_found"), "openai", 502),
        (404, error("No access", "model_not_found"), "openai", 502),
        (404, b'{"object": "error", "message": "The model `a` does not exist."}', "vllm", 502),
        (404, error("model 'a' not found, try pulling it first"), "openai", 502),
        # If these counted against the replica, one client could take it away from all others.
        (403, error("model-a requires moderation: your input was flagged"), "openai", 403),
        (404, error("This is a chat model and not supported here."), "openai", 404),
        (404, error("No endpoints found that support image input"), "openai", 404),
        (200, error("the prompt is too long", 400), "openai", 400),
        (200, error("the provider returned an error", 502), "openai", None),
        # llama.cpp sends status 500 for invalid requests too.
        (500, error("Failed to parse messages: Missing 'role' in message: {}"), "llama.cpp", 400),
        (500, error("image input is not supported - hint: provide the mmproj"), "llama.cpp", 400),
        (500, error("\n---\nWhile executing CallExpression\nJinja Exception"), "llama.cpp", 400),
        (500, error("Failed to parse messages"), "openai", 500),
        (500, error("not now"), "llama.cpp", 500),
        (200, b"", "openai", 502),
        (200, b"upstream connect error", "openai", 502),
        (200, b" <html></html>", "openai", 502),
        (200, TEXT[:-9], "openai", 502),
        (200, b"\x1f\x8b\x08{}", "openai", 502),
        # Reading megabytes of empty objects would block the gateway for all clients.
        (200, b'{"choices": [%b{}]}' % (b"{}," * MAX_CHOICES), "openai", None),
        (200, MANY_OBJECTS, "openai", 502),
        (404, MANY_OBJECTS, "openai", 502),
        (200, TEXT.replace(b"stop", b"abort"), "openai", None),
        (200, b"\n" * 500 + TEXT + b"\r\n", "openai", 200),
        (200, b"\xef\xbb\xbf" + TEXT, "openai", 200),
        (200, b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "openai", 200),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_whole_response_stands_for_a_status(
    status: int, body: bytes, kind: BackendKind, expected: int | None
) -> None:
    """None stands for a response that its replica ended early. Only rejections of the request pass to the client."""
    adapter = get_adapter(kind)
    if expected is None:
        with pytest.raises(UpstreamError):
            check_buffered_response(status, body, b"", adapter, has_started=False)
    elif classify_status(expected) is AttemptOutcome.SUCCESS:
        response = check_buffered_response(status, body, b"", adapter, has_started=False)
        assert (response.status, response.body) == (expected, body)
    else:
        with pytest.raises(UpstreamRefusedError) as caught:
            check_buffered_response(status, body, b"", adapter, has_started=False)
        assert caught.value.status == expected


TOO_LONG = "The input (70 tokens) is longer than the model's context length (64 tokens)."
EVENTS: list[tuple[BackendKind, dict[str, Any], int]] = [
    ("vllm", {"error": {"message": TOO_LONG, "type": "BadRequestError", "code": 400}}, 400),
    ("vllm", {"error": {"message": "EngineCore died", "code": 500}}, 500),
    ("sglang", {"error": {"object": "error", "message": TOO_LONG, "code": 400}}, 400),
    ("sglang", {"error": {"object": "error", "message": "The queue is full.", "code": 503}}, 503),
    ("tensorrt-llm", {"object": "error", "message": TOO_LONG, "type": "X", "code": 400}, 400),
    ("lmdeploy", {"object": "error", "message": TOO_LONG, "type": "X", "code": 400}, 400),
    (
        "tgi",
        {"error": {"message": f"Input validation error: {TOO_LONG}", "http_status_code": 422}},
        422,
    ),
    ("tgi", {"error": {"message": "Model is overloaded", "http_status_code": 422}}, 429),
    ("tgi", {"error": {"message": "Request failed: x", "http_status_code": 422}}, 500),
    ("openai", {"error": {"message": TOO_LONG, "code": "400"}}, 400),  # as LiteLLM's proxy
    ("openai", {"error": {"message": "Slow down", "type": "rate_limit_error"}}, 429),
    # Another gateway of Argosy.
    (
        "openai",
        {"error": {"message": TOO_LONG, "type": "invalid_request_error", "code": "refused"}},
        400,
    ),
    ("openai", {"error": {"message": "x", "type": "overloaded_error", "code": "draining"}}, 503),
    ("openai", {"error": {"message": "x"}}, 0),
]


@pytest.mark.parametrize("choices", [1, 2])  # which have parsers of their own
@pytest.mark.parametrize(("kind", "event", "status"), EVENTS)
def test_error_event_stands_for_a_status(
    kind: BackendKind, event: dict[str, Any], status: int, choices: int
) -> None:
    body = {"model": "m", "prompt": "Hi", "stream": True, "n": choices}
    fields = parse_request_fields(json.dumps(body).encode(), "prompt")
    continuation = StreamContinuation(fields, b"/v1/completions", DeliveredOutput())
    plan = continuation.plan_upstream(UpstreamTarget(get_adapter(kind), "m"))
    assert plan is not None
    assert not plan.parser.feed(b"data: " + json.dumps(event).encode() + b"\n\n")
    assert plan.parser.failure_status == status
    assert event.get("error", event)["message"] in plan.parser.failure
