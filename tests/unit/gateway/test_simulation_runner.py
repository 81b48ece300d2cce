"""Processes of simulations: one at a time, one for each caller, within bounds of time and memory."""

from __future__ import annotations

import asyncio

import pytest

from argosy.gateway import simulation_runner
from argosy.gateway.simulation_runner import SimulationRunner
from argosy.protocol import ApiError

ENDLESS = ("timeit", "-n", "100000000000", "pass")
ECHO = ("json.tool", "--compact")


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation_runner, "NICENESS", 0)
    monkeypatch.setattr(simulation_runner, "MAX_WAITING", 1)
    monkeypatch.setattr(simulation_runner, "CPU_LIMIT_S", 1)


async def test_run_returns_output_and_reason_of_failure() -> None:
    runner = SimulationRunner()
    assert await runner.run(ECHO, b'{"a": 1}', "one") == b'{"a":1}\n'
    with pytest.raises(ApiError, match="Expecting value"):
        await runner.run(ECHO, b"no", "one")


async def test_new_run_of_a_caller_ends_the_one_before_and_others_wait() -> None:
    runner = SimulationRunner()
    first = asyncio.create_task(runner.run(ENDLESS, b"", "one"))
    await asyncio.sleep(0)
    other = asyncio.create_task(runner.run(ECHO, b"1", "other"))
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="Too many simulations wait") as refused:
        await runner.run(ECHO, b"1", "late")
    assert refused.value.status == 503
    assert not other.done()
    assert await runner.run(ECHO, b"2", "one") == b"2\n"
    with pytest.raises(ApiError, match="has begun") as ended:
        await first
    assert ended.value.status == 409
    assert await other == b"1\n"


async def test_cancelled_run_gives_its_place_to_the_next() -> None:
    runner = SimulationRunner()
    first = asyncio.create_task(runner.run(ENDLESS, b"", "one"))
    await asyncio.sleep(0)
    second = asyncio.create_task(runner.run(ECHO, b"1", "two"))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await second == b"1\n"


@pytest.mark.parametrize("arguments", [ENDLESS, ("timeit", "-n", "1", "bytearray(1 << 40)")])
async def test_run_beyond_its_bounds_is_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ApiError, match="Choose a shorter time") as refused:
        await SimulationRunner().run(arguments, b"", "one")
    assert refused.value.status == 400
