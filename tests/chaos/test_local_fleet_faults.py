"""`argosy serve` under many streams while its replicas die, stall, leave and are cut off, and while it dies itself."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from benchmarks.chaos import Streams, settled
from benchmarks.faults import FAULTS
from benchmarks.whole import all_back, stream, whole

pytestmark = [pytest.mark.timeout(480), pytest.mark.asyncio(loop_scope="module")]

REPLICAS = 2
STREAMS = 32


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def streams(state: Path) -> AsyncIterator[Streams]:
    async with whole("--replicas", str(REPLICAS), state=state) as running:
        await all_back(running, REPLICAS)
        streams = Streams(running, STREAMS, 150)
        await streams.undisturbed()
        assert sum(answer.tokens for answer in streams.expected) > 50 * STREAMS
        yield streams


@pytest.mark.parametrize("fault", ["kill", "cut", "term", "stop"])
async def test_every_stream_gives_what_it_would_have_given(streams: Streams, fault: str) -> None:
    await all_back(streams.running, REPLICAS)
    try:
        outcome = await streams.disturbed(FAULTS[fault], random.Random(fault))
    except PermissionError:
        pytest.skip("this system does not let a process borrow its children's sockets (ptrace)")
    assert outcome.struck
    assert not outcome.different
    await all_back(streams.running, REPLICAS)


async def test_the_ledger_has_a_row_for_each_request_and_the_tokens_that_were_delivered(
    streams: Streams, state: Path
) -> None:
    told = await settled(state, len(streams.answers))
    assert told.requests == len(streams.answers)
    assert told.output_tokens == sum(answer.tokens for answer in streams.answers)


async def test_a_killed_gateway_loses_its_streams_and_not_their_rows(tmp_path: Path) -> None:
    given, enough = 0, asyncio.Event()

    def told(text: str) -> None:
        nonlocal given
        given += bool(text)  # at least a token
        if given == 10 * STREAMS:
            enough.set()

    async with whole(state=tmp_path) as running:
        lost = [asyncio.create_task(stream(running, n, 500, told)) for n in range(STREAMS)]
        await enough.wait()
        running.process.kill()
        ended = await asyncio.gather(*lost, return_exceptions=True)
    cut = sum(isinstance(end, Exception) for end in ended)
    assert cut
    async with whole(state=tmp_path) as running:
        again = await stream(running, 0, 5)
        rows = await settled(tmp_path, STREAMS + 1)
    assert rows.requests == STREAMS + 1
    assert given <= rows.output_tokens - again.tokens
