"""Client of a benchmark: the times that it measures, and bodies with long prompts, which are not cached."""

from __future__ import annotations

import asyncio
import time
import tracemalloc

import pytest

from argosy.bench import LengthDistribution, LoadSpec, Workload, build_plan
from argosy.bench.client import BenchClient
from argosy.bench.response import BenchResponse
from argosy.bench.stub_server import StubDelays, StubServer
from argosy.bench.target import BenchTarget, RequestBodyBuilder
from argosy.protocol import parse_endpoint
from tests.support.small_benchmarks import AT_ONCE, measure

INPUT_TOKENS = 20_000


async def test_connect_time_counts_from_send_time() -> None:
    disconnected = asyncio.Event()

    async def ignore_tls_handshake(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await reader.read()
        writer.close()
        disconnected.set()

    async with await asyncio.start_server(ignore_tls_handshake, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = BenchClient(
            parse_endpoint(f"https://127.0.0.1:{port}"), time.perf_counter, {}, 0.2
        )
        before = time.perf_counter()
        reply = await client.post("/v1/completions", b"{}", BenchResponse())
        await disconnected.wait()
    assert reply.error == "timeout"
    assert reply.sent_at is not None
    assert before <= reply.sent_at <= reply.received_at - 0.19


async def test_stub_server_and_client_agree_on_times() -> None:
    stub = StubServer(StubDelays(first_token_s=0.002, token_gap_s=0.001))
    server, url = await stub.start()
    result = await measure(url, LoadSpec(arrivals=AT_ONCE, requests=10))
    server.close()
    assert result.runs[0].summary.completed == 10
    times = [each for each in stub.request_times.values() if len(each.token_sent_at) > 1]
    assert sum(len(each.token_sent_at) for each in times) == result.runs[0].summary.output_tokens
    for row in result.runs[0].rows:
        # The client cannot measure less than the stub's own delay.
        assert row.chunks_s[0] - row.sent_s >= 0.002
        assert row.end_s - row.chunks_s[0] >= 0.0
        assert len(row.chunks_s) == row.planned_output


@pytest.mark.parametrize("vocabulary", [(), tuple(range(1000, 2000))])
def test_long_unique_prompts_are_not_cached(vocabulary: tuple[int, ...]) -> None:
    target = BenchTarget(model="m", vocabulary=vocabulary)
    workload = Workload(
        input=LengthDistribution("fixed", INPUT_TOKENS),
        output=LengthDistribution("fixed", 1),
        prefix_tokens=10,
    )
    plan = build_plan(workload, LoadSpec(concurrency=1, requests=8), 0)
    builder = RequestBodyBuilder(target)
    tracemalloc.start()
    try:
        body_sizes = [len(builder.build_body(session[0], [])) for session in plan.sessions]
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert min(body_sizes) > INPUT_TOKENS
    assert kept_bytes < max(body_sizes) * 3
