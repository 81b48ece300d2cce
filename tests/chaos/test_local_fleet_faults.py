"""`argosy serve` with many streams while its replicas or the gateway are killed, stopped or disconnected."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from benchmarks.chaos import Streams, wait_for_rows
from benchmarks.faults import FAULTS
from benchmarks.server_process import run_server, run_stream, wait_for_replicas

pytestmark = [pytest.mark.timeout(480), pytest.mark.asyncio(loop_scope="module")]

REPLICAS = 2
STREAMS = 16
"""Plain text, JSON answers, tool calls and answers with reasoning, four of each."""


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def streams(state: Path) -> AsyncIterator[Streams]:
    async with run_server("--replicas", str(REPLICAS), state=state) as running:
        await wait_for_replicas(running, REPLICAS)
        streams = Streams(running, STREAMS, 150)
        await streams.run_undisturbed()
        assert sum(answer.tokens for answer in streams.expected) > 50 * STREAMS
        yield streams


@pytest.mark.parametrize(
    ("fault", "rounds"),
    [
        ("kill", 1),
        ("cut", 1),
        ("term", 1),
        ("stop", 1),  # the last, as it takes long until the controller replaces the replica
        pytest.param("kill", 200, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
async def test_streams_survive_replica_faults(streams: Streams, fault: str, rounds: int) -> None:
    draw = random.Random(fault)
    for _ in range(rounds):
        await wait_for_replicas(streams.running, REPLICAS)
        try:
            outcome = await streams.run_with_fault(FAULTS[fault], draw)
        except PermissionError:
            pytest.skip("this system does not let a process borrow its children's sockets (ptrace)")
        assert outcome.was_injected
        assert not outcome.different


async def test_ledger_counts_every_request_and_delivered_token(
    streams: Streams, state: Path
) -> None:
    rows = await wait_for_rows(state, len(streams.answers))
    assert rows.requests == len(streams.answers)
    assert rows.output_tokens == sum(answer.tokens for answer in streams.answers)


async def test_killed_gateway_keeps_usage_of_its_streams(streams: Streams, state: Path) -> None:
    """The last test of the shared server."""
    before = await wait_for_rows(state, len(streams.answers))
    delivered, enough_delivered = 0, asyncio.Event()

    def count_chunk(text: str) -> None:
        nonlocal delivered
        delivered += bool(text)  # a chunk with text has at least one token
        if delivered == 10 * STREAMS:
            enough_delivered.set()

    interrupted = [
        asyncio.create_task(run_stream(streams.running, n, 500, count_chunk))
        for n in range(STREAMS)
    ]
    await enough_delivered.wait()
    streams.running.process.kill()
    results = await asyncio.gather(*interrupted, return_exceptions=True)
    failed = sum(isinstance(result, Exception) for result in results)
    assert failed
    async with run_server(state=state) as running:
        final = await run_stream(running, 0, 5)
        rows = await wait_for_rows(state, before.requests + STREAMS + 1)
    assert rows.requests == before.requests + STREAMS + 1
    assert delivered <= rows.output_tokens - before.output_tokens - final.tokens
