"""Request filters: called once per request, notified of all tokens, and able to end a response."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tests.support.fake_engine import FakeEngine, Script
from tests.support.fake_upstream import UpstreamRequest, fake_upstream
from tests.support.gateway_harness import GatewayHarness, RecordingFilter, run_gateway
from tests.support.replica_servers import MODEL, completion, events, serve
from tests.support.waiting import until

from argosy.deployment import BackendKind, ReplicaConfig
from argosy.engine.serving.text import Tokenizer
from argosy.protocol import ApiError

TOKENS = list(range(100, 112))
CHAT: dict[str, Any] = {
    "model": "big",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 12,
}
PATHS = ("/v1/chat/completions", "/v1/completions")


def make_body(path: str, **extra: object) -> dict[str, Any]:
    if path == PATHS[0]:
        return CHAT | extra
    return completion("Once", max_tokens=12) | {"model": "big"} | extra


@contextlib.asynccontextmanager
async def run_native_gateway(
    tokenizer: Tokenizer, *filters: RecordingFilter
) -> AsyncIterator[tuple[GatewayHarness, FakeEngine]]:
    """Run a gateway in front of an Argosy replica with a scripted engine."""
    engine = FakeEngine(tokenizer, lambda _: Script(list(TOKENS), finish="length"))
    async with (
        serve(engine) as served,
        run_gateway(filters, ReplicaConfig(url=served.url, model=MODEL)) as gateway,
    ):
        yield gateway, engine


BUDGET_END = ("length", "budget")


def read_ends(chunks: list[bytes]) -> dict[int, tuple[str, str | None]]:
    """Return finish reason and stop reason by choice. The final chunks must be valid for OpenAI's SDK."""
    ends: dict[int, tuple[str, str | None]] = {}
    for chunk in map(json.loads, chunks[:-1]):
        for choice in chunk["choices"]:
            if choice["finish_reason"] is not None:
                assert choice["index"] not in ends
                ends[choice["index"]] = choice["finish_reason"], choice.get("stop_reason")
                is_chat = chunk["object"] == "chat.completion.chunk"
                (ChatCompletionChunk if is_chat else Completion).model_validate(chunk)
    return ends


@pytest.mark.parametrize(
    ("path", "max_tokens"), [(PATHS[0], 1), (PATHS[1], 2), (PATHS[0], 7), (PATHS[1], 11)]
)
async def test_filter_ends_stream_at_token_limit(
    tokenizer: Tokenizer, path: str, max_tokens: int
) -> None:
    recorder = RecordingFilter(max_tokens=max_tokens)
    async with run_native_gateway(tokenizer, recorder) as (gateway, engine):
        options = {"include_usage": True}
        request_body = make_body(path, stream=True, return_token_ids=True, stream_options=options)
        response = await gateway.client.post(path, json=request_body)
        await engine.wait_idle()
    chunks = events(response.content)
    assert chunks[-1] == b"[DONE]"
    assert read_ends(chunks) == {0: BUDGET_END}
    parsed_chunks = [json.loads(chunk) for chunk in chunks[:-1]]
    ids = [
        i
        for chunk in parsed_chunks
        for choice in chunk["choices"]
        for i in choice.get("token_ids") or ()
    ]
    *earlier_counts, final_count = [0, *recorder.token_counts]
    assert earlier_counts[-1] < max_tokens <= final_count
    assert ids == TOKENS[:final_count]
    assert parsed_chunks[-1]["usage"]["completion_tokens"] == final_count
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in parsed_chunks}) == 1
    (context,) = recorder.completed
    assert (context.status, context.delivered.output_tokens) == ("stopped", final_count)


@pytest.mark.parametrize(("kind", "max_tokens"), [("openai", 5), ("openai", 12), ("llama.cpp", 12)])
async def test_stream_received_at_once_is_ended_once(kind: BackendKind, max_tokens: int) -> None:
    """The server has sent the end of its stream before the filter ends the response."""

    async def send_complete_stream(request: UpstreamRequest) -> None:
        request.start_stream()
        for index in range(12):
            request.send_text(f" {index}")
        request.send_text("", "length")
        request.end_stream(tokens=12)

    recorder = RecordingFilter(max_tokens=max_tokens)
    async with (
        fake_upstream(send_complete_stream) as upstream,
        run_gateway(
            [recorder], ReplicaConfig(url=upstream.url, kind=kind, model="rough")
        ) as gateway,
    ):
        request_body = make_body(PATHS[1], stream=True, stream_options={"include_usage": True})
        response = await gateway.client.post(PATHS[1], json=request_body)
    *chunks, done = events(response.content)
    assert done == b"[DONE]"
    assert b"[DONE]" not in chunks
    assert read_ends([*chunks, done]) == {0: BUDGET_END}
    usages = [json.loads(chunk).get("usage") for chunk in chunks]
    assert [usage["completion_tokens"] for usage in usages if usage] == [max_tokens]
    assert (recorder.completed[0].status, recorder.token_counts[-1]) == ("stopped", max_tokens)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stream_options": None, "resume": None, "prompt_logprobs": None},
    ],
    ids=["plain", "nulls"],
)
async def test_filter_ends_whole_response_at_token_limit(
    tokenizer: Tokenizer, options: dict[str, Any]
) -> None:
    recorder = RecordingFilter(max_tokens=5)
    async with run_native_gateway(tokenizer, recorder) as (gateway, engine):
        response = await gateway.client.post(
            PATHS[0], json=CHAT | {"return_token_ids": True} | options
        )
        await engine.wait_idle()
    response_body = response.json()
    (choice,) = response_body["choices"]
    final_count = recorder.token_counts[-1]
    assert (choice["finish_reason"], choice["stop_reason"]) == BUDGET_END
    ChatCompletion.model_validate(response_body)
    assert choice["token_ids"] == TOKENS[:final_count]
    assert response_body["usage"]["completion_tokens"] == final_count
    assert recorder.completed[0].status == "stopped"


async def test_filter_ends_stream_of_other_server(tokenizer: Tokenizer) -> None:
    del tokenizer
    recorder = RecordingFilter(max_tokens=2)
    disconnected = asyncio.Event()

    async def stream_endlessly(request: UpstreamRequest) -> None:
        assert request.body["stream_options"] == {"include_usage": True}
        request.start_stream()
        with contextlib.suppress(ConnectionError):
            while not request.writer.is_closing():
                request.send_text("on")
                await request.writer.drain()
                await asyncio.sleep(0.01)
        disconnected.set()

    async with (
        fake_upstream(stream_endlessly) as upstream,
        run_gateway([recorder], ReplicaConfig(url=upstream.url, kind="openai")) as gateway,
    ):
        response = await gateway.client.post(PATHS[1], json=make_body(PATHS[1], stream=True))
        await asyncio.wait_for(disconnected.wait(), 30)
    chunks = events(response.content)
    assert read_ends(chunks) == {0: BUDGET_END}
    assert chunks[-1] == b"[DONE]"
    assert recorder.completed[0].delivered.output_tokens == 2


@pytest.mark.parametrize("requested", [True, False])
async def test_reported_usage_is_used_and_forwarded_only_on_request(requested: bool) -> None:
    recorder = RecordingFilter()

    async def respond_with_usage(request: UpstreamRequest) -> None:
        request.start_stream()
        request.send_text("two tokens")
        request.send_text("", "stop")
        request.end_stream(tokens=2)

    async with (
        fake_upstream(respond_with_usage) as upstream,
        run_gateway([recorder], ReplicaConfig(url=upstream.url, kind="openai")) as gateway,
    ):
        options = {"stream_options": {"include_usage": True}} if requested else {}
        response = await gateway.client.post(
            PATHS[1], json=make_body(PATHS[1], stream=True, **options)
        )
    assert (b'"usage"' in response.content) == requested
    delivered = recorder.completed[0].delivered
    assert (delivered.prompt_tokens, delivered.output_tokens) == (1, 2)


async def test_rejection_completes_earlier_filters_only() -> None:
    first_filter, second_filter = (
        RecordingFilter(),
        RecordingFilter(rejection=ApiError(429, "rate_limit_exceeded", "No more.")),
    )
    async with (
        fake_upstream() as upstream,
        run_gateway(
            [first_filter, second_filter], ReplicaConfig(url=upstream.url, kind="openai")
        ) as gateway,
    ):
        response = await gateway.client.post(PATHS[1], json=make_body(PATHS[1]))
        assert response.status_code == 429
        assert response.headers.get_list("x-watched") == ["yes", "yes"]
    assert not upstream.requests
    assert not second_filter.completed
    (context,) = first_filter.completed
    assert context.status == "refused"
    assert context.trace.error_code == "rate_limit_exceeded"


async def test_client_that_reads_nothing_is_disconnected() -> None:
    recorder = RecordingFilter()

    async def flood(request: UpstreamRequest) -> None:
        request.start_stream()
        with contextlib.suppress(ConnectionError):
            while not request.writer.is_closing():
                request.send_text("x" * 100_000)
                await request.writer.drain()

    async with (
        fake_upstream(flood) as upstream,
        run_gateway(
            [recorder], ReplicaConfig(url=upstream.url, kind="openai"), slow_reader_timeout_s=0.5
        ) as gateway,
    ):
        url = gateway.client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port, limit=1)
        request_body = json.dumps(make_body(PATHS[1], stream=True)).encode()
        head = f"POST {PATHS[1]} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(request_body)}\r\n\r\n"
        writer.write(head.encode() + request_body)
        await asyncio.wait_for(recorder.completions.acquire(), 30)
        assert recorder.completed[0].status == "cancelled"
        await until(lambda: recorder.completed[0].exchange.error_code is not None)
        assert recorder.completed[0].exchange.error_code == "slow_reader"
        del reader
        writer.close()
