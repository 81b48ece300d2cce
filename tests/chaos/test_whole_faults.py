"""`argosy serve` under many streams while its replicas die, stall, leave and are cut off."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from benchmarks.chaos import FAULTS, Streams, all_back, whole

pytestmark = [pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]

REPLICAS = 2
STREAMS = 32


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def streams(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Streams]:
    state: Path = tmp_path_factory.mktemp("state")
    async with whole("--replicas", str(REPLICAS), state=state) as running:
        await all_back(running, REPLICAS)
        streams = Streams(running, STREAMS, 100)
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
