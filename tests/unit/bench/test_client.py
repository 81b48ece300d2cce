"""Times that the client of a benchmark measures."""

from __future__ import annotations

import asyncio
import time

from argosy.bench import LoadSpec
from argosy.bench.client import BenchClient
from argosy.bench.response import BenchResponse
from argosy.bench.stub_server import StubDelays, StubServer
from argosy.protocol import parse_endpoint
from tests.support.small_benchmarks import AT_ONCE, measure


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
