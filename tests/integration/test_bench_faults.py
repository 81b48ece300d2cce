"""`argosy bench` against servers that do not behave: a failure costs one request, and says what it was."""

from __future__ import annotations

import asyncio
import json
import time

import msgspec
import pytest
from tests.support.scripted_server import Answer, Asked, plain, rough_server
from tests.support.small_benchmarks import AT_ONCE, WORKLOAD, Watch, measure, settings

from argosy.bench import LoadSpec, run_benchmark
from argosy.bench.client import BenchClient
from argosy.bench.response import BenchResponse
from argosy.protocol import format_event, parse_endpoint


async def cut_head(asked: Asked) -> None:
    asked.writer.transport.abort()


async def cut_stream(asked: Asked) -> None:
    asked.stream()
    asked.say("half")
    await asked.writer.drain()
    asked.writer.transport.abort()


async def unfinished(asked: Asked) -> None:
    asked.stream()
    asked.say("half")
    asked.writer.write(b"0\r\n\r\n")


async def refused(asked: Asked) -> None:
    asked.json(429, {"error": {"message": "slow down", "code": "rate_limit"}})


async def refused_in_latin_1(asked: Asked) -> None:
    body = b'{"error": {"message": "caf\xe9"}}'
    asked.writer.write(b"HTTP/1.1 500 X\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


async def refused_deeply(asked: Asked) -> None:
    body = b'{"error": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    asked.writer.write(b"HTTP/1.1 500 X\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


async def sent_elsewhere(asked: Asked) -> None:
    asked.writer.write(b"HTTP/1.1 307 X\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n")


async def stream_error(asked: Asked) -> None:
    asked.stream()
    asked.say("half")
    asked.send(b'data: {"error": {"message": "it broke"}}\n\n')
    asked.writer.write(b"0\r\n\r\n")


async def no_text(asked: Asked) -> None:
    asked.stream()
    asked.say("", "stop")
    asked.end(tokens=0)


async def no_json(asked: Asked) -> None:
    asked.stream()
    asked.send(b"data: {oops\n\n")
    asked.end()


async def half_a_character(asked: Asked) -> None:
    asked.stream()
    asked.send(b'data: {"choices": [{"text": "\xe2\x82"}]}\n\n')
    asked.end()


async def countless(asked: Asked) -> None:
    asked.stream()
    for count in (1, 10**12):
        chunk = {"choices": [{"text": "a"}], "usage": {"completion_tokens": count}}
        asked.send(format_event(json.dumps(chunk).encode()))
    asked.end()


async def less_than_nothing(asked: Asked) -> None:
    asked.stream()
    asked.say("a", "stop")
    asked.end(tokens=-5)


async def no_http(asked: Asked) -> None:
    asked.writer.write(b"SSH-2.0-server\r\n\r\n")


async def silence(asked: Asked) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (cut_head, "cut"),
        (cut_stream, "cut"),
        (unfinished, "cut"),
        (refused, "http 429"),
        (refused_in_latin_1, "http 500"),
        (refused_deeply, "http 500"),
        (sent_elsewhere, "http 307"),
        (stream_error, "stream"),
        (no_text, "empty"),
        (no_json, "malformed"),
        (half_a_character, "malformed"),
        (countless, "malformed"),
        (less_than_nothing, "malformed"),
        (no_http, "malformed"),
        (silence, "timeout"),
    ],
)
async def test_a_failure_costs_one_request(script: Answer, error: str) -> None:
    count = 0

    async def each_third(asked: Asked) -> None:
        nonlocal count
        count += 1
        fails = count % 3 == 0
        await (script if fails else plain)(asked)

    async with rough_server(each_third) as server:
        timeout_s = 2.0 if script is silence else 60.0
        result = await measure(
            server.url, LoadSpec(concurrency=2, requests=12), timeout_s=timeout_s
        )
    summary = result.runs[0].summary
    assert set(summary.errors) <= {error}
    # Only a kept connection that is cut before the answer begins is given a second chance.
    assert summary.failed + summary.resent == count // 3
    assert summary.completed + summary.failed == 12
    assert script is cut_head or summary.resent == 0
    assert summary.latency["ttft"].count == summary.completed


async def test_bytes_that_are_no_text_are_said_to_be_none() -> None:
    async with rough_server(half_a_character) as server:
        result = await measure(server.url, LoadSpec(concurrency=1, requests=1))
    assert "not UTF-8" in result.runs[0].rows[0].detail


async def test_what_a_server_says_moves_no_terminal() -> None:
    async def paints(asked: Asked) -> None:
        asked.json(500, {"error": {"message": "\x1b]0;mine\x07\x1b[2J\nall is well"}})

    async with rough_server(paints) as server:
        result = await measure(server.url, LoadSpec(concurrency=1, requests=1))
    detail = result.runs[0].rows[0].detail
    assert detail.isprintable()
    assert "all is well" in detail


async def test_what_comes_after_an_answer_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def chatty(asked: Asked) -> None:
        await plain(asked)
        asked.writer.write(b"and another thing")

    async with rough_server(chatty) as server:
        result = await measure(server.url, LoadSpec(concurrency=1, requests=5))
    assert result.runs[0].summary.completed == 5
    assert not caplog.records


async def test_a_server_that_is_slow_to_connect_makes_no_lag_of_the_client() -> None:
    left = asyncio.Event()

    async def never_shakes_hands(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await reader.read()
        writer.close()
        left.set()

    async with await asyncio.start_server(never_shakes_hands, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = BenchClient(
            parse_endpoint(f"https://127.0.0.1:{port}"), time.perf_counter, {}, 0.2
        )
        before = time.perf_counter()
        reply = await client.post("/v1/completions", b"{}", BenchResponse())
        await left.wait()
    assert reply.error == "timeout"
    assert reply.sent_at is not None
    assert before <= reply.sent_at <= reply.received_at - 0.19


async def test_a_connection_closed_while_idle_costs_nothing() -> None:
    async def answer_and_close(asked: Asked) -> None:
        await plain(asked)
        await asked.writer.drain()
        asked.writer.close()

    async with rough_server(answer_and_close) as server:
        result = await measure(server.url, LoadSpec(concurrency=3, requests=30))
    assert result.runs[0].summary.completed == 30


async def test_a_server_that_dies_fails_the_rest() -> None:
    async with rough_server() as server:
        watch = Watch()
        task = asyncio.create_task(
            run_benchmark(settings(server.url, LoadSpec(concurrency=1, requests=400)), {}, watch)
        )

        def die() -> None:
            if len(watch.rows) == 5:
                server.script = cut_head

        watch.on_row = die
        result = await task
    summary = result.runs[0].summary
    assert summary.completed == 5
    assert summary.failed == 395


async def test_a_failed_turn_ends_its_conversation() -> None:
    async with rough_server(refused) as server:
        workload = msgspec.structs.replace(WORKLOAD, turns=3)
        result = await measure(server.url, LoadSpec(concurrency=1, requests=6), workload=workload)
    summary = result.runs[0].summary
    assert (summary.failed, summary.cancelled) == (2, 4)
    assert len(server.asked) == 2


async def test_an_interrupted_run_keeps_what_it_has() -> None:
    async with rough_server() as server:
        watch = Watch()
        loads = (LoadSpec(concurrency=1, requests=100), LoadSpec(concurrency=2, requests=100))
        task = asyncio.create_task(run_benchmark(settings(server.url, *loads), {}, watch))

        def interrupt() -> None:
            if len(watch.rows) == 7:
                server.script = silence
                task.get_loop().call_soon(task.cancel)

        watch.on_row = interrupt
        result = await task
    assert len(result.runs) == 1
    assert result.runs[0].interrupted
    summary = result.runs[0].summary
    assert summary.completed >= 7
    assert summary.cancelled <= 1
    assert summary.failed == 0


async def test_an_interrupted_run_counts_those_that_waited_for_room() -> None:
    async with rough_server() as server:
        load = LoadSpec(arrivals=AT_ONCE, concurrency=1, requests=10)
        task = asyncio.create_task(run_benchmark(settings(server.url, load), {}, Watch()))

        async def interrupt(asked: Asked) -> None:
            task.cancel()
            await asked.writer.wait_closed()

        server.script = interrupt
        result = await task
    summary = result.runs[0].summary
    assert (summary.completed, summary.cancelled) == (0, 10)


async def test_what_the_server_does_not_take_is_left_out() -> None:
    async def strict(asked: Asked) -> None:
        assert "ignore_eos" not in asked.body
        assert asked.body["stream_options"] == {"include_usage": True}
        await plain(asked)

    async with rough_server(strict) as server:
        server.refuses = {"ignore_eos", "continuous_usage_stats"}
        result = await measure(server.url)
    assert result.runs[0].summary.completed == 12
    assert not result.target.ignore_eos
    assert not result.target.chunk_usage


async def test_without_usage_chunks_are_counted() -> None:
    async def no_usage(asked: Asked) -> None:
        asked.stream()
        for text in "abc":
            asked.say(text)
        asked.say("", "stop")
        asked.end()

    async with rough_server(no_usage) as server:
        result = await measure(server.url)
    summary = result.runs[0].summary
    assert summary.missing_usage == 12
    assert summary.output_tokens == 36
