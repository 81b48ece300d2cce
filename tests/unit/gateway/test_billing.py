"""Counting of a response's tokens. `tests/unit/policy/test_billing.py` has the rules by which they are billed."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast
from unittest.mock import Mock

import pytest
from tests.support.placed_requests import place

from argosy.deployment import BackendKind, GatewayConfig
from argosy.gateway.backends import (
    StreamContinuation,
    UpstreamTarget,
    get_adapter,
    parse_response_body,
)
from argosy.gateway.pool.pool import Pool
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.gateway.principal import ANONYMOUS
from argosy.gateway.proxy.placement_driver import PlacementDriver
from argosy.gateway.proxy.response_relay import ResponseRelay
from argosy.gateway.proxy.upstream_call import BufferedResponse
from argosy.gateway.request_context import CHAT, COMPLETION, RequestContext
from argosy.gateway.request_fields import parse_request_fields
from argosy.gateway.upstream.upstream import Upstream
from argosy.http_server import HttpExchange
from argosy.protocol import format_event, parse_endpoint

Json = dict[str, Any]
Counts = tuple[int, int, int]
"""Prompt tokens, cached tokens and output tokens."""

PROMPT = "Tell me a story of forty bytes or so, please"
ESTIMATE = len(PROMPT) // 4
"""Estimated tokens of `PROMPT`."""
WORDS = "forty words or so " * 20
WORD_TOKENS = len(WORDS) // 4
COMPLETION_BODY: Json = {"model": "m", "prompt": PROMPT}
CHAT_BODY: Json = {"model": "m", "messages": [{"role": "user", "content": PROMPT}]}
CHAT_ESTIMATE = len(json.dumps(CHAT_BODY["messages"])) // 4
RESUMABLE, PASSTHROUGH = {"n": 1}, {"n": 2}
"""Streams of one choice can be resumed, so their chunks are parsed differently."""


class NullWriter:
    """A response writer that discards the events."""

    is_full = False

    async def start(self) -> None: ...

    def write_events(self, events: bytes) -> None: ...

    def start_early(self) -> None: ...

    def send_keepalive(self) -> None: ...

    def send_progress(self, comment: bytes, event: bytes | None) -> None: ...

    @property
    def has_output(self) -> bool:
        return False

    def discard(self) -> bool:
        return True

    async def finish(self) -> None: ...


def make_relay(body: Json) -> tuple[RequestContext, ResponseRelay, StreamContinuation]:
    """Return a request to the model "m", its relay and its continuation."""
    api = CHAT if "messages" in body else COMPLETION
    fields = parse_request_fields(json.dumps(body).encode(), api.prompt_fields[0])
    exchange = cast("HttpExchange", None)  # no client is disconnected
    pool = Pool("m", [])
    context = RequestContext(exchange, fields, api, pool, "id", ANONYMOUS, ANONYMOUS.tier)
    context.start_placement()
    continuation = StreamContinuation(fields, api.path, context.delivered)
    relay = ResponseRelay(
        context,
        NullWriter(),
        continuation,
        Mock(spec=PlacementDriver),
        task=Mock(spec=asyncio.Task),
        settings=GatewayConfig(models=[]),
    )
    return context, relay, continuation


def counts(context: RequestContext) -> Counts:
    delivered = context.delivered
    return delivered.prompt_tokens, delivered.cached_tokens, delivered.output_tokens


def count_stream(body: Json, *chunks: Json, kind: BackendKind, is_complete: bool) -> Counts:
    """Relay a stream of these chunks, and return its counts."""
    context, relay, continuation = make_relay(body | {"stream": True})
    plan = continuation.plan_upstream(UpstreamTarget(get_adapter(kind), "m"))
    assert plan is not None
    upstream = Upstream(parse_endpoint("http://localhost:1"))
    replica = ReplicaEndpoint("r", kind, "m", upstream)
    pool = Pool("m", [replica])
    context.pool = pool
    _, call = place(context, lambda: 0.0)
    relay.attach(call, plan.parser)
    for chunk in chunks:
        call.on_body(format_event(json.dumps(chunk).encode()))
    if is_complete:
        call.on_body(b"data: [DONE]\n\n")
        relay.finish_upstream()
    return counts(context)


def usage(**fields: object) -> Json:
    return {"choices": [], "usage": fields}


def text(content: str, finish_reason: str | None = None, index: int = 0, **fields: object) -> Json:
    choice = {"index": index, "text": content, "finish_reason": finish_reason}
    return {"choices": [choice], **fields}


def delta(value: Json, finish_reason: str | None = None, index: int = 0) -> Json:
    return {"choices": [{"index": index, "delta": value, "finish_reason": finish_reason}]}


AB = text("a"), text("b", "stop")
ZERO_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
TOOL_CALL = [{"index": 0, "id": "c", "function": {"name": "f"}}]
LONG_TOOL_CALL = [{"index": 0, "function": {"arguments": WORDS}}]


@pytest.mark.parametrize("choices", [RESUMABLE, PASSTHROUGH], ids=["resumable", "passthrough"])
@pytest.mark.parametrize(
    ("body", "chunks", "expected"),
    [
        pytest.param(
            COMPLETION_BODY,
            [*AB, usage(prompt_tokens=7, completion_tokens=3)],
            (7, 0, 3),
            id="usage",
        ),
        pytest.param(COMPLETION_BODY, [*AB, usage(prompt_tokens=7)], (7, 0, 2), id="prompt-only"),
        pytest.param(COMPLETION_BODY, [*AB, usage()], (ESTIMATE, 0, 2), id="empty-usage"),
        pytest.param(
            COMPLETION_BODY,
            [*AB, usage(prompt_tokens=None, completion_tokens=None)],
            (ESTIMATE, 0, 2),
            id="null-usage",
        ),
        pytest.param(
            COMPLETION_BODY,
            [
                *AB,
                usage(
                    prompt_tokens=7,
                    completion_tokens=2,
                    prompt_tokens_details={"cached_tokens": 10},
                ),
            ],
            (7, 7, 2),
            id="more-cached-than-prompt",
        ),
        pytest.param(COMPLETION_BODY, [*AB], (ESTIMATE, 0, 2), id="no-usage"),
        pytest.param(
            CHAT_BODY,
            [
                delta({"role": "assistant", "content": ""}),
                delta({"reasoning_content": "Hm"}),
                delta({"reasoning_content": "Hm"}),
                delta({}, "stop"),
            ],
            (CHAT_ESTIMATE, 0, 2),
            id="reasoning_content",
        ),
        pytest.param(
            CHAT_BODY,
            [delta({"reasoning": "Hm"}), delta({"reasoning": "Hm"}), delta({}, "stop")],
            (CHAT_ESTIMATE, 0, 2),
            id="reasoning",
        ),
        pytest.param(
            CHAT_BODY,
            [delta({"refusal": "Hm"}), delta({"refusal": "Hm"}), delta({}, "stop")],
            (CHAT_ESTIMATE, 0, 2),
            id="refusal",
        ),
        pytest.param(
            CHAT_BODY,
            [delta({"tool_calls": TOOL_CALL}), delta({"tool_calls": TOOL_CALL}), delta({}, "stop")],
            (CHAT_ESTIMATE, 0, 2),
            id="tool_calls",
        ),
    ],
)
async def test_tokens_of_complete_stream(
    body: Json, chunks: list[Json], expected: Counts, choices: Json
) -> None:
    assert count_stream(body | choices, *chunks, kind="llama.cpp", is_complete=True) == expected


@pytest.mark.parametrize("choices", [RESUMABLE, PASSTHROUGH], ids=["resumable", "passthrough"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("content", WORDS),
        ("reasoning", WORDS),
        ("tool_calls", LONG_TOOL_CALL),
        ("tool_calls", [{"index": 0, "type": "custom", "custom": {"input": WORDS}}]),
    ],
    ids=["content", "reasoning", "tool_calls", "custom_tool_calls"],
)
async def test_tokens_of_cut_stream_are_estimated_from_its_text(
    name: str, value: object, choices: Json
) -> None:
    """Hosted APIs, and engines configured so, send dozens of tokens with each event and usage only at the end."""
    chunks = [delta({name: value}), delta({name: value}, "stop")]
    _, _, output = count_stream(CHAT_BODY | choices, *chunks, kind="llama.cpp", is_complete=False)
    assert output == 2 * WORD_TOKENS


@pytest.mark.parametrize(
    ("kind", "body", "chunks", "expected"),
    [
        pytest.param(
            "openai",
            COMPLETION_BODY,
            [text("a", usage=ZERO_USAGE), text("a", "stop", usage=ZERO_USAGE)],
            (ESTIMATE, 0, 2),
            id="zero-usage-in-each-chunk",
        ),
        pytest.param(
            "openai",
            COMPLETION_BODY | {"echo": True},
            [text(PROMPT * 9), text(" a story", "stop")],
            (ESTIMATE, 0, 2),
            id="echoed-prompt",
        ),
        pytest.param(
            "openai",
            COMPLETION_BODY | PASSTHROUGH,
            [text("a", "stop"), usage(prompt_tokens=2**40, completion_tokens=2**40)],
            (ESTIMATE, 0, 1),
            id="implausible-usage",
        ),
        pytest.param(
            "openai",
            COMPLETION_BODY | PASSTHROUGH,
            [text("a", "stop"), usage(prompt_tokens=1, completion_tokens=-5)],
            (ESTIMATE, 0, 1),
            id="negative-usage",
        ),
        pytest.param(
            "llama.cpp",
            COMPLETION_BODY | PASSTHROUGH,
            [
                *[text("a", "length" if at == 1 else None) for at in range(2)],
                usage(prompt_tokens=7, completion_tokens=2),
                *[text("a", "length" if at == 29 else None, 1) for at in range(30)],
                usage(prompt_tokens=7, completion_tokens=30),
            ],
            (7, 0, 32),
            id="usage-of-each-completion-choice",
        ),
        pytest.param(
            "llama.cpp",
            CHAT_BODY | PASSTHROUGH,
            [
                *[delta({"content": "a"}, "length" if at == 1 else None) for at in range(2)],
                usage(prompt_tokens=7, completion_tokens=2),
                *[delta({"content": "a"}, "length" if at == 29 else None, 1) for at in range(30)],
                usage(prompt_tokens=7, completion_tokens=30),
            ],
            (7, 0, 32),
            id="usage-of-each-chat-choice",
        ),
        pytest.param(
            "llama.cpp",
            COMPLETION_BODY | {"prompt": [PROMPT * 9, "Hi", "You there"]},
            [
                text(
                    "five of these",
                    "length",
                    index,
                    usage={"prompt_tokens": prompt, "completion_tokens": 5},
                )
                for index, prompt in enumerate((100, 3, 9))
            ],
            (112, 0, 15),
            id="usage-of-each-prompt",
        ),
    ],
)
async def test_tokens_of_stream_with_unusual_usage(
    kind: BackendKind, body: Json, chunks: list[Json], expected: Counts
) -> None:
    """llama.cpp reports usage for each choice, and LiteLLM's proxy a usage of zero with each chunk."""
    assert count_stream(body, *chunks, kind=kind, is_complete=True) == expected


def completion_choices(*contents: str, **fields: object) -> list[Json]:
    return [
        {"index": index, "text": content, "finish_reason": "stop", **fields}
        for index, content in enumerate(contents)
    ]


def chat_choices(*contents: str, **fields: object) -> list[Json]:
    return [
        {"index": index, "message": {"content": content}, "finish_reason": "stop", **fields}
        for index, content in enumerate(contents)
    ]


FIRST_CHOICE_USAGE = {"prompt_tokens": 7, "completion_tokens": 1}
LOGPROBS = {"top_logprobs": [{"a": -1.0}] * 50}
PARTS_AND_CALL = {
    "content": [{"type": "text", "text": "hello " * 50}],
    "function_call": {"name": "f", "arguments": '{"a": "' + "b" * 400 + '"}'},
}


@pytest.mark.parametrize(
    ("body", "response", "prompt", "output"),
    [
        pytest.param(
            COMPLETION_BODY,
            {
                "choices": completion_choices("a b c"),
                "usage": {"prompt_tokens": 7, "completion_tokens": 3},
            },
            (7, 7),
            (3, 3),
            id="usage",
        ),
        pytest.param(
            CHAT_BODY | {"n": 3},
            {"choices": chat_choices("a", WORDS, "b"), "usage": FIRST_CHOICE_USAGE},
            (7, 7),
            (2 + WORD_TOKENS, 2 + WORD_TOKENS),
            id="usage-of-first-chat-choice",
        ),
        pytest.param(
            COMPLETION_BODY | {"prompt": [PROMPT] * 3},
            {"choices": completion_choices("a", WORDS, "b"), "usage": FIRST_CHOICE_USAGE},
            (3 * ESTIMATE, 3 * ESTIMATE + 6),
            (2 + WORD_TOKENS, 2 + WORD_TOKENS),
            id="usage-of-first-prompt",
        ),
        pytest.param(
            COMPLETION_BODY,
            {"choices": completion_choices("hello " * 50), "usage": {"prompt_tokens": 7}},
            (7, 7),
            (51, 100),
            id="prompt-only",
        ),
        pytest.param(
            COMPLETION_BODY | {"n": 2},
            {"choices": completion_choices(WORDS, "b", logprobs=LOGPROBS)},
            (ESTIMATE, ESTIMATE),
            (WORD_TOKENS + 1, WORD_TOKENS + 1),
            id="no-usage-completion",
        ),
        pytest.param(
            CHAT_BODY | {"n": 2},
            {"choices": chat_choices(WORDS, "b", logprobs=LOGPROBS)},
            (CHAT_ESTIMATE, CHAT_ESTIMATE),
            (WORD_TOKENS + 1, WORD_TOKENS + 1),
            id="no-usage-chat",
        ),
        pytest.param(
            CHAT_BODY,
            {"choices": [{"index": 0, "message": PARTS_AND_CALL, "finish_reason": "stop"}]},
            (CHAT_ESTIMATE, CHAT_ESTIMATE),
            (175, 210),
            id="no-usage-parts-and-call",
        ),
        pytest.param(
            COMPLETION_BODY,
            {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": -5}},
            (1, ESTIMATE),
            (1, 100),
            id="negative-usage",
        ),
        pytest.param(
            COMPLETION_BODY,
            {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2**63}},
            (1, ESTIMATE),
            (1, 100),
            id="implausible-usage",
        ),
    ],
)
def test_tokens_of_whole_response(
    body: Json, response: Json, prompt: tuple[int, int], output: tuple[int, int]
) -> None:
    """`prompt` and `output` are the least and the greatest counts that are right."""
    context, relay, _ = make_relay(body)
    content = json.dumps(response).encode()
    buffered = BufferedResponse(200, content, b"application/json", parse_response_body(content))
    relay.record_buffered(buffered, 0.0, get_adapter("llama.cpp"))
    prompt_tokens, cached_tokens, output_tokens = counts(context)
    assert prompt[0] <= prompt_tokens <= prompt[1]
    assert output[0] <= output_tokens <= output[1]
    assert cached_tokens == 0
