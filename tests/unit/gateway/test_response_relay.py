"""Response relay: output delivered to the client equals output counted, to the token, and timeouts are enforced.

`tests/unit/policy/test_billing.py` has the rules by which counted tokens are billed.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, cast
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.gateway_harness import RecordingFilter
from tests.support.placed_requests import place

from argosy.deployment import BackendKind, GatewayConfig, Timeouts
from argosy.gateway.backends import (
    DeliveredOutput,
    StreamContinuation,
    UpstreamTarget,
    get_adapter,
    parse_response_body,
)
from argosy.gateway.backends.native_stream_parser import NativeStreamParser
from argosy.gateway.pool.pool import Pool
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.gateway.principal import ANONYMOUS, Principal
from argosy.gateway.proxy.fast_path import FastPath
from argosy.gateway.proxy.placement_driver import PlacementDriver
from argosy.gateway.proxy.response_relay import ResponseRelay
from argosy.gateway.proxy.response_writers import AggregatingWriter, ResponseWriter, StreamingWriter
from argosy.gateway.proxy.stream_splice import StreamSplice
from argosy.gateway.proxy.upstream_call import BufferedResponse, UpstreamCall
from argosy.gateway.request_context import CHAT, COMPLETION, UNLIMITED_TOKENS, RequestContext
from argosy.gateway.request_fields import parse_request_fields
from argosy.gateway.upstream.connection import UpstreamError
from argosy.gateway.upstream.upstream import Upstream
from argosy.gateway.upstream.upstream_response import UpstreamResponse
from argosy.http_server import HttpExchange
from argosy.policy import TenantMemory, weighted_tokens
from argosy.policy.placement import PlacementRequest
from argosy.protocol import EventParser, format_event, parse_endpoint


@dataclass
class FakeWriter(ResponseWriter):
    """A response writer that keeps the client's data."""

    data: bytes = b""
    keepalives: int = 0
    """Number of keep-alive comments."""
    is_full: bool = False

    def write_events(self, events: bytes) -> None:
        self.data += events

    def send_keepalive(self) -> None:
        self.keepalives += 1

    def discard(self) -> bool:
        return False


SETTINGS = GatewayConfig(
    models=[],
    timeouts=Timeouts(first_token_timeout_s=60.0, stream_idle_timeout_s=20.0),
    sse_keepalive_interval_s=15.0,
    slow_reader_timeout_s=30.0,
)


def make_native_stream(lengths: list[int]) -> bytes:
    """Return the stream of a replica for choices of these lengths, interleaved, with one event per token."""
    stream = b": argosy prompt 7 3\n\n"
    for index in range(max(lengths)):
        for choice, length in enumerate(lengths):
            if index < length:
                last = index == length - 1
                chunk: dict[str, Any] = {"index": choice, "ids": [index]}
                chunk["finish_reason"] = "length" if last else None
                stream += b"data: " + json.dumps({"choices": [chunk]}).encode() + b"\n\n"
                end = b" length" if last else b""
                stream += b": argosy %d %d%s\n\n" % (choice, index, end)
    return stream + b"data: [DONE]\n\n"


def sum_charges(driver: PlacementDriver) -> list[float]:
    """Return a list to which the driver's queue is going to add what it is charged."""
    charges, record_progress = list[float](), driver.record_progress

    def record(request: PlacementRequest, output_tokens: int, service: float) -> None:
        charges.append(service)
        record_progress(request, output_tokens, service)

    driver.record_progress = record  # type: ignore[method-assign]
    return charges


Json = dict[str, Any]
NATIVE_STREAM: Json = {"model": "m", "messages": [], "stream": True}


def make_relay(
    clock: Callable[[], float],
    body: Json = NATIVE_STREAM,
    kind: BackendKind = "argosy",
) -> tuple[FakeWriter, RequestContext, ResponseRelay, UpstreamResponse]:
    """Return a writer, a request to one replica of this kind, its relay, and an upstream response that feeds it."""
    api = CHAT if "messages" in body else COMPLETION
    fields = parse_request_fields(json.dumps(body).encode(), api.prompt_fields[0])
    replica = ReplicaEndpoint("r", kind, "m", Upstream(parse_endpoint("http://r")))
    pool = Pool("m", [replica])
    exchange = cast("HttpExchange", None)  # no client is disconnected
    context = RequestContext(exchange, fields, api, pool, "chatcmpl-1", ANONYMOUS, ANONYMOUS.tier)
    driver, call = place(context, clock)
    continuation = StreamContinuation(fields, api.path, context.delivered)
    plan = continuation.plan_upstream(UpstreamTarget(get_adapter(kind), "m"))
    assert plan is not None
    writer, task = FakeWriter(), Mock(spec=asyncio.Task)
    relay = ResponseRelay(context, writer, continuation, driver, task=task, settings=SETTINGS)
    relay.attach(call, plan.parser)
    return writer, context, relay, call


async def relay_chunks(
    lengths: list[int], max_tokens: int, chunks: list[bytes]
) -> tuple[RequestContext, FakeWriter, list[int], float]:
    """Relay chunks with a limit. Also returns the tokens at each check of it, and what the queue is charged."""
    limit = RecordingFilter(max_tokens=max_tokens)
    writer, context, relay, response = make_relay(lambda: 0.0, NATIVE_STREAM | {"n": len(lengths)})
    context.filters.append(limit)
    charges = sum_charges(relay._driver)  # noqa: SLF001 - the relay's own
    for chunk in chunks:
        response.on_body(chunk)
    if context.end_reason is None:
        relay.finish_upstream()
    relay.charge_delivered()
    return context, writer, [0, *limit.token_counts], sum(charges)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    max_tokens=st.integers(1, 20),
    cuts=st.lists(st.integers(0, 5000), max_size=12),
)
def test_delivered_output_equals_counted_output_at_any_limit(
    lengths: list[int], max_tokens: int, cuts: list[int]
) -> None:
    stream = make_native_stream(lengths)
    boundaries = sorted({0, len(stream), *(cut % len(stream) for cut in cuts)})
    chunks = [stream[start:end] for start, end in pairwise(boundaries)]
    context, writer, counts, charged = asyncio.run(relay_chunks(lengths, max_tokens, chunks))
    *events, done = EventParser().feed(writer.data)
    assert done == b"[DONE]"
    ids: dict[int, list[int]] = {choice: [] for choice in range(len(lengths))}
    finishes: dict[int, str] = {}
    for event in map(json.loads, events):
        for choice in event["choices"]:
            ids[choice["index"]] += choice.get("ids", [])
            if choice["finish_reason"] is not None:
                assert choice["index"] not in finishes
                assert choice["finish_reason"] == "length"
                finishes[choice["index"]] = choice.get("stop_reason") or "length"
    delivered = context.delivered
    assert sum(map(len, ids.values())) == delivered.output_tokens == counts[-1]
    assert charged == weighted_tokens(7 - 3, counts[-1])
    assert counts == sorted(set(counts))
    assert finishes.keys() == ids.keys()
    for choice, length in enumerate(lengths):
        assert ids[choice] == list(range(len(ids[choice])))
        assert finishes[choice] == ("length" if len(ids[choice]) == length else "budget")
    stopped = "budget" in finishes.values()
    assert stopped == (delivered.output_tokens < sum(lengths))
    assert all(count < max_tokens for count in counts[:-1])


async def test_replica_that_sends_only_comments_times_out() -> None:
    """The client does not get the replica's comments, but keep-alive comments of the gateway."""
    now = 0.0
    writer, context, relay, response = make_relay(lambda: now)
    response.on_body(b": argosy prompt 7 3\n\n")
    keepalives = []
    for second in range(1, 61):
        now = float(second)
        if second % 10 == 0:
            response.on_body(b": keep-alive\n\n")
        relay.check_timeouts(now)
        keepalives.append(writer.keepalives)
    assert [keepalives[second - 1] for second in (15, 16, 31, 32, 47, 48)] == [0, 1, 1, 2, 2, 3]
    assert not response.end_of_body.done()
    now = 61.0
    relay.check_timeouts(now)
    with pytest.raises(UpstreamError, match="no data for 60 s"):
        await response.end_of_body
    assert context.delivered.output_tokens == 0


async def test_client_gets_keepalives_during_failover() -> None:
    now = 0.0
    writer, _, relay, response = make_relay(lambda: now)
    response.on_body(b": argosy 0 1\n\n")
    relay.detach()
    keepalives = []
    for second in range(1, 49):
        now = float(second)
        relay.check_timeouts(now)
        keepalives.append(writer.keepalives)
    assert [keepalives[second - 1] for second in (15, 16, 31, 32, 47, 48)] == [0, 1, 1, 2, 2, 3]


async def test_tokens_without_text_prevent_timeout() -> None:
    now = 0.0
    _, context, relay, response = make_relay(lambda: now)
    for second in range(1, 90):
        now = float(second)
        if second % 10 == 0:
            response.on_body(b": argosy 0 %d\n\n" % second)
        relay.check_timeouts(now)
    assert not response.end_of_body.done()
    assert context.delivered.output_tokens == 8


async def test_slowdown_after_fast_start_is_measured_immediately() -> None:
    now = 0.0
    _, context, relay, response = make_relay(lambda: now)
    (load,) = context.pool.reachable_loads()
    for token in range(50):
        response.on_body(b": argosy 0 %d\n\n" % token)
        now += 0.01
    now = 1.0
    relay.check_timeouts(now)
    fast_s = load.inter_token_s
    for second in range(2, 22):
        now = float(second)
        if second % 5 == 0:
            response.on_body(b": argosy 0 %d\n\n" % second)
        relay.check_timeouts(now)
    assert fast_s < 0.1
    assert load.inter_token_s > 0.3


async def test_slow_client_does_not_make_replica_look_slow() -> None:
    now = 0.0
    _, context, relay, response = make_relay(lambda: now)
    (load,) = context.pool.reachable_loads()

    def stream_tokens() -> None:
        nonlocal now
        for token in range(50):
            response.on_body(b": argosy 0 %d\n\n" % token)
            now += 0.01

    stream_tokens()
    relay.check_timeouts(now)
    fast_s = load.inter_token_s
    for _ in range(3):
        relay.on_backpressure()
        for _ in range(20):
            now += 1.0
            relay.check_timeouts(now)
        relay.on_writable()
        relay.check_timeouts(now)
        stream_tokens()
        relay.check_timeouts(now)
    relay.detach()
    assert load.inter_token_s == pytest.approx(fast_s, rel=0.2)


async def test_replica_is_measured_again_after_backpressure_ends() -> None:
    now = 0.0
    _, context, relay, response = make_relay(lambda: now)
    (load,) = context.pool.reachable_loads()
    response.on_body(b": argosy 0 1\n\n")
    relay.on_backpressure()
    relay.check_timeouts(now)
    relay.on_writable()
    for token in range(2, 6):
        now += 5.0
        relay.check_timeouts(now)
        response.on_body(b": argosy 0 %d\n\n" % token)
    relay.check_timeouts(now)
    assert load.inter_token_s > 0.3


class PausableCall(UpstreamCall):
    """An upstream response that knows whether reading is paused."""

    is_paused = False

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


async def test_backpressure_pauses_current_and_next_replica() -> None:
    _, context, relay, _ = make_relay(lambda: 0.0)
    relay.detach()
    assert context.placement is not None
    (attempt,) = context.placement.attempts
    relay.on_backpressure()
    for _ in range(2):
        call = PausableCall(attempt, lambda: 0.0)
        relay.attach(call, NativeStreamParser(context.delivered))
        assert call.is_paused
    relay.on_writable()
    assert not call.is_paused
    relay.on_backpressure()
    assert call.is_paused


# --- counts of the streams and responses of all kinds of servers --------------------------------

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


def counts(context: RequestContext) -> Counts:
    delivered = context.delivered
    return delivered.prompt_tokens, delivered.cached_tokens, delivered.output_tokens


def count_stream(body: Json, *chunks: Json, kind: BackendKind, is_complete: bool) -> Counts:
    """Relay a stream of these chunks, and return its counts."""
    _, context, relay, call = make_relay(lambda: 0.0, body | {"stream": True}, kind=kind)
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
        *(
            pytest.param(
                CHAT_BODY,
                [
                    delta({"role": "assistant", "content": ""}),
                    delta({name: value}),
                    delta({name: value}),
                    delta({}, "stop"),
                ],
                (CHAT_ESTIMATE, 0, 2),
                id=name,
            )
            for name, value in {
                "reasoning_content": "Hm",
                "reasoning": "Hm",
                "refusal": "Hm",
                "tool_calls": TOOL_CALL,
            }.items()
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
        *(
            pytest.param(
                "llama.cpp",
                body | PASSTHROUGH,
                [
                    *[token("length" if at == 1 else None, 0) for at in range(2)],
                    usage(prompt_tokens=7, completion_tokens=2),
                    *[token("length" if at == 29 else None, 1) for at in range(30)],
                    usage(prompt_tokens=7, completion_tokens=30),
                ],
                (7, 0, 32),
                id=f"usage-of-each-{name}-choice",
            )
            for name, body, token in (
                ("completion", COMPLETION_BODY, partial(text, "a")),
                ("chat", CHAT_BODY, partial(delta, {"content": "a"})),
            )
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
        *(
            pytest.param(
                COMPLETION_BODY | fields,
                {"choices": completion_choices(content), "usage": ZERO_USAGE},
                (ESTIMATE, ESTIMATE),
                (output, output),
                id=f"zero-usage-{name}",
            )
            for name, fields, content, output in (
                ("text", {}, WORDS, WORD_TOKENS),
                ("nothing", {}, "", 0),
                ("echo", {"echo": True}, PROMPT, 0),
            )
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
        *(
            pytest.param(
                body | {"n": 2},
                {"choices": make_choices(WORDS, "b", logprobs=LOGPROBS)},
                (estimate, estimate),
                (WORD_TOKENS + 1, WORD_TOKENS + 1),
                id=f"no-usage-{name}",
            )
            for name, body, make_choices, estimate in (
                ("completion", COMPLETION_BODY, completion_choices, ESTIMATE),
                ("chat", CHAT_BODY, chat_choices, CHAT_ESTIMATE),
            )
        ),
        pytest.param(
            CHAT_BODY,
            {"choices": [{"index": 0, "message": PARTS_AND_CALL, "finish_reason": "stop"}]},
            (CHAT_ESTIMATE, CHAT_ESTIMATE),
            (175, 210),
            id="no-usage-parts-and-call",
        ),
        *(
            pytest.param(
                COMPLETION_BODY,
                {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": tokens}},
                (1, ESTIMATE),
                (1, 100),
                id=f"implausible-usage-{tokens}",
            )
            for tokens in (-5, 2**63)
        ),
    ],
)
async def test_tokens_of_whole_response(
    body: Json, response: Json, prompt: tuple[int, int], output: tuple[int, int]
) -> None:
    """`prompt` and `output` are the least and the greatest counts that are right."""
    _, context, relay, _ = make_relay(lambda: 0.0, body, kind="llama.cpp")
    content = json.dumps(response).encode()
    buffered = BufferedResponse(200, content, b"application/json", parse_response_body(content))
    relay.record_buffered(buffered, 0.0, get_adapter("llama.cpp"))
    prompt_tokens, cached_tokens, output_tokens = counts(context)
    assert prompt[0] <= prompt_tokens <= prompt[1]
    assert output[0] <= output_tokens <= output[1]
    assert cached_tokens == 0


# --- writers ---------------------------------------------------------------------------------------


def chat_event(number: int) -> bytes:
    """Return the event of one chat token with log-probabilities."""
    logprob = {"token": f"t{number}", "logprob": -0.5, "bytes": None, "top_logprobs": []}
    choice: dict[str, Any] = {"index": 0, "delta": {"content": "t"}, "token_ids": [number]}
    choice |= {"logprobs": {"content": [logprob]}, "finish_reason": None, "stop_reason": None}
    return b"data: " + json.dumps({"id": "c", "choices": [choice]}).encode() + b"\n\n"


def test_memory_per_token_does_not_grow_with_length_of_response() -> None:
    """Otherwise each of 100,000 tokens with log-probabilities would block the event loop for longer than the last."""
    writer = AggregatingWriter(cast("RequestContext", None), TenantMemory(0))
    allocated = list[int]()
    events = [chat_event(number) for number in range(4000)]
    tracemalloc.start()
    try:
        for event in events:
            tracemalloc.reset_peak()
            used_before, _ = tracemalloc.get_traced_memory()
            writer.write_events(event)
            allocated.append(tracemalloc.get_traced_memory()[1] - used_before)
    finally:
        tracemalloc.stop()
    assert statistics.median(allocated[-500:]) < 2 * statistics.median(allocated[:500])


def test_buffered_response_ends_when_its_tenant_has_too_much_memory() -> None:
    memory, context = TenantMemory(4 << 20), Mock(spec=RequestContext)
    context.principal = Principal(project="p")
    first, second = (AggregatingWriter(context, memory) for _ in range(2))
    number = 0
    while not second.is_full:
        for writer in (first, second):
            writer.write_events(chat_event(number))
        number += 1
    assert 2 << 20 < memory.used_bytes <= 4 << 20
    assert not first.is_full
    first.close()
    second.close()
    assert memory.used_bytes == 0


def test_stream_that_fast_path_rejects_is_read_by_event_loop_again() -> None:
    fast_path, response = Mock(spec=FastPath), Mock(spec=UpstreamResponse)
    exchange, context = Mock(spec=HttpExchange), Mock(spec=RequestContext)
    context.delivered, context.usage_slot = DeliveredOutput(output_tokens=1), None
    context.covered_output_tokens = UNLIMITED_TOKENS
    fast_path.attach.return_value = 1, 0
    splice = StreamSplice(fast_path, StreamingWriter(exchange), context)
    splice.begin(response, Mock())
    fast_path.attach.assert_called_once()
    response.reclaim_socket.assert_called_once_with(b"")
    times, unread = splice.end()
    assert (len(times), unread) == (0, b"")


def test_lent_writer_cannot_be_discarded() -> None:
    writer = StreamingWriter(Mock(spec=HttpExchange))
    assert writer.discard()
    writer.lend_socket()
    assert not writer.discard()
