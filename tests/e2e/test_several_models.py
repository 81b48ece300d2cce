"""`argosy serve` with more models than its memory holds: every request is answered, and models take turns."""

from __future__ import annotations

import asyncio

import pytest
from benchmarks.sleep import run_swaps

pytestmark = pytest.mark.exhaustive


async def test_mixed_load_on_six_models_in_the_memory_of_two_loses_nothing() -> None:
    async with asyncio.timeout(280):
        free, *loads = [row async for row in run_swaps(6, 2, 60.0, 1.0, "argosy-mini")]
    assert (free["failures"], free["found_asleep"]) == (0, 6), free["first_failure"]
    for load in loads:
        assert load["failures"] == 0, load["first_failure"]
        assert load["answered"] == load["requests"] > 5
        assert 0 < load["sleeps"] <= load["requests"], (
            "a model sleeps only for a request of another"
        )
        assert load["sleeps_per_minute"] <= load["most_per_minute"]
