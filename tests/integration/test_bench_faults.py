"""`argosy bench` against faulty servers: each failure affects one request, and its row names the error."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from tests.support.fake_upstream import (
    CHUNKED_HEAD,
    UpstreamRequest,
    UpstreamScript,
    encode_chunk,
    fake_upstream,
    respond_with_tokens,
)
from tests.support.small_benchmarks import AT_ONCE, WORKLOAD, RecordingProgress, measure, settings

from argosy.bench import LoadSpec, run_benchmark
from argosy.protocol import SSE_DONE, format_event


def event(**chunk: object) -> bytes:
    return format_event(json.dumps(chunk).encode())


def stream(*events: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return CHUNKED_HEAD + b"".join(map(encode_chunk, events)) + end


def failed(status: int, body: bytes, headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d X\r\n%scontent-length: %d\r\n\r\n" % (status, headers, len(body)) + body


HALF = event(choices=[{"index": 0, "text": "half", "finish_reason": None}])
COUNTS = [event(choices=[{"text": "a"}], usage={"completion_tokens": n}) for n in (1, 10**12, -5)]
CUT_CHARACTER = stream(b'data: {"choices": [{"text": "\xe2\x82"}]}\n\n', SSE_DONE)
FAULTS: dict[str, tuple[bytes | None, str]] = {
    "no response": (b"", "cut"),
    "connection cut in a stream": (stream(HALF, end=b""), "cut"),
    "stream ended early": (stream(HALF), "cut"),
    "rejection": (failed(429, b'{"error": {"message": "slow down"}}'), "http 429"),
    "rejection in Latin-1": (failed(500, b'{"error": {"message": "caf\xe9"}}'), "http 500"),
    "deep JSON": (failed(500, b'{"error": ' + b"[" * 5000 + b"]" * 5000 + b"}"), "http 500"),
    "redirect": (failed(307, b"", b"location: /elsewhere\r\n"), "http 307"),
    "error event": (stream(HALF, event(error={"message": "it broke"})), "stream"),
    "empty text": (
        stream(event(choices=[{"text": "", "finish_reason": "stop"}]), SSE_DONE),
        "empty",
    ),
    "invalid JSON": (stream(b"data: {oops\n\n", SSE_DONE), "malformed"),
    "cut character": (CUT_CHARACTER, "malformed"),
    "huge token count": (stream(*COUNTS[:2], SSE_DONE), "malformed"),
    "negative token count": (stream(COUNTS[2], SSE_DONE), "malformed"),
    "other protocol": (b"SSH-2.0-server\r\n\r\n", "malformed"),
    "silence": (None, "timeout"),
}
"""Bytes that the server sends and the error of the request. Without any it says nothing, not even by closing."""


def respond_with(response: bytes | None) -> UpstreamScript:
    """Return a script that sends bytes, and cuts the connection if they are no complete response."""

    async def script(request: UpstreamRequest) -> None:
        if response is None:
            await asyncio.Event().wait()
            return
        request.writer.write(response)
        if response in (FAULTS["no response"][0], FAULTS["connection cut in a stream"][0]):
            await request.writer.drain()
            request.writer.transport.abort()

    return script


reject, stay_silent, close_before_response = (
    respond_with(FAULTS[name][0]) for name in ("rejection", "silence", "no response")
)


@pytest.mark.parametrize("fault", FAULTS)
async def test_failure_affects_one_request(fault: str) -> None:
    response, error = FAULTS[fault]
    script, count = respond_with(response), 0

    async def fail_every_third(request: UpstreamRequest) -> None:
        nonlocal count
        count += 1
        fails = count % 3 == 0
        await (script if fails else respond_with_tokens)(request)

    async with fake_upstream(fail_every_third) as server:
        timeout_s = 2.0 if response is None else 60.0
        result = await measure(
            server.url, LoadSpec(concurrency=2, requests=12), timeout_s=timeout_s
        )
    summary = result.runs[0].summary
    assert set(summary.errors) <= {error}
    # The client resends only if a kept-alive connection closes before the response begins.
    assert summary.failed + summary.resent == count // 3
    assert summary.completed + summary.failed == 12
    assert fault == "no response" or summary.resent == 0
    assert summary.latency["ttft"].count == summary.completed


async def test_invalid_utf8_is_named_in_detail() -> None:
    async with fake_upstream(respond_with(CUT_CHARACTER)) as server:
        result = await measure(server.url, LoadSpec(concurrency=1, requests=1))
    assert "not UTF-8" in result.runs[0].rows[0].detail


async def test_error_detail_is_printable() -> None:
    async def send_control_characters(request: UpstreamRequest) -> None:
        request.send_json(500, {"error": {"message": "\x1b]0;mine\x07\x1b[2J\nall is well"}})

    async with fake_upstream(send_control_characters) as server:
        result = await measure(server.url, LoadSpec(concurrency=1, requests=1))
    detail = result.runs[0].rows[0].detail
    assert detail.isprintable()
    assert "all is well" in detail


async def test_bytes_after_response_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    async def send_extra_bytes(request: UpstreamRequest) -> None:
        await respond_with_tokens(request)
        request.writer.write(b"and another thing")

    async with fake_upstream(send_extra_bytes) as server:
        result = await measure(server.url, LoadSpec(concurrency=1, requests=5))
    assert result.runs[0].summary.completed == 5
    assert not caplog.records


async def test_connection_closed_while_idle_fails_no_request() -> None:
    async def answer_and_close(request: UpstreamRequest) -> None:
        await respond_with_tokens(request)
        await request.writer.drain()
        request.writer.close()

    async with fake_upstream(answer_and_close) as server:
        result = await measure(server.url, LoadSpec(concurrency=3, requests=30))
    assert result.runs[0].summary.completed == 30


async def test_dead_server_fails_remaining_requests() -> None:
    async with fake_upstream() as server:
        progress = RecordingProgress()
        task = asyncio.create_task(
            run_benchmark(settings(server.url, LoadSpec(concurrency=1, requests=400)), {}, progress)
        )

        def stop_responding() -> None:
            if len(progress.rows) == 5:
                server.script = close_before_response

        progress.on_row = stop_responding
        result = await task
    summary = result.runs[0].summary
    assert summary.completed == 5
    assert summary.failed == 395


async def test_failed_turn_cancels_rest_of_conversation() -> None:
    async with fake_upstream(reject) as server:
        workload = msgspec.structs.replace(WORKLOAD, turns=3)
        result = await measure(server.url, LoadSpec(concurrency=1, requests=6), workload=workload)
    summary = result.runs[0].summary
    assert (summary.failed, summary.cancelled) == (2, 4)
    assert len(server.requests) == 2


async def test_interrupted_run_keeps_completed_requests() -> None:
    async with fake_upstream() as server:
        progress = RecordingProgress()
        loads = (LoadSpec(concurrency=1, requests=100), LoadSpec(concurrency=2, requests=100))
        task = asyncio.create_task(run_benchmark(settings(server.url, *loads), {}, progress))

        def interrupt() -> None:
            if len(progress.rows) == 7:
                server.script = stay_silent
                task.get_loop().call_soon(task.cancel)

        progress.on_row = interrupt
        result = await task
    assert len(result.runs) == 1
    assert result.runs[0].interrupted
    summary = result.runs[0].summary
    assert summary.completed >= 7
    assert summary.cancelled <= 1
    assert summary.failed == 0


async def test_interrupted_run_counts_waiting_requests_as_cancelled() -> None:
    async with fake_upstream() as server:
        load = LoadSpec(arrivals=AT_ONCE, concurrency=1, requests=10)
        task = asyncio.create_task(
            run_benchmark(settings(server.url, load), {}, RecordingProgress())
        )

        async def interrupt(request: UpstreamRequest) -> None:
            task.cancel()
            await request.writer.wait_closed()

        server.script = interrupt
        result = await task
    summary = result.runs[0].summary
    assert (summary.completed, summary.cancelled) == (0, 10)


async def test_unsupported_fields_are_omitted() -> None:
    async def strict(request: UpstreamRequest) -> None:
        assert "ignore_eos" not in request.body
        assert request.body["stream_options"] == {"include_usage": True}
        await respond_with_tokens(request)

    async with fake_upstream(strict) as server:
        server.unknown_fields = {"ignore_eos", "continuous_usage_stats"}
        result = await measure(server.url)
    assert result.runs[0].summary.completed == 12
    assert not result.target.ignore_eos
    assert not result.target.chunk_usage


async def test_missing_usage_falls_back_to_chunk_count() -> None:
    async def no_usage(request: UpstreamRequest) -> None:
        request.start_stream()
        for text in "abc":
            request.send_text(text)
        request.send_text("", "stop")
        request.end_stream()

    async with fake_upstream(no_usage) as server:
        result = await measure(server.url)
    summary = result.runs[0].summary
    assert summary.missing_usage == 12
    assert summary.output_tokens == 36
