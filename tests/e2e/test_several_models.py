"""`argosy serve` with more models than its memory holds: every request is answered, and models take turns."""

from __future__ import annotations

import asyncio

import pytest
from benchmarks.sleep import run_swaps

pytestmark = pytest.mark.exhaustive


async def test_mixed_load_on_six_models_in_the_memory_of_two_loses_nothing() -> None:
    seconds = 40.0
    result = await asyncio.wait_for(run_swaps(6, 2, seconds, 1.0, "argosy-mini"), 280)
    assert result["failures"] == 0, result["first_failure"]
    assert result["answered"] == result["requests"] > seconds / 2
    assert result["found_asleep"] > 0
    assert 0 < result["sleeps"] <= result["requests"], (
        "a model sleeps only for a request of another"
    )
