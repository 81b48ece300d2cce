"""Search for the highest sustainable rate, on servers with known capacity."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from argosy.bench.objectives import MAX_TRIALS, MIN_RATE_FRACTION, search_rate


def run_search(first: float, precision: float, capacity: float) -> tuple[float | None, list[float]]:
    trials = search_rate(first, precision)
    rate = next(trials)
    tried = []
    while True:
        tried.append(rate)
        try:
            rate = trials.send(rate <= capacity)
        except StopIteration as end:
            return end.value, tried


@given(st.floats(0.1, 100), st.floats(0.01, 0.5), st.floats(0.05, 1000))
def test_search_finds_the_capacity(first: float, precision: float, capacity: float) -> None:
    best, tried = run_search(first, precision, capacity)
    if best is None:
        assert capacity < first * MIN_RATE_FRACTION
        return
    assert best <= capacity <= best * (1 + precision) * (1 + 1e-9)
    assert len(set(tried)) == len(tried) <= MAX_TRIALS


def test_search_gives_up_at_minimum_rate_and_stops_after_max_trials() -> None:
    best, tried = run_search(1.0, 0.05, 0.0)
    assert best is None
    assert tried[-1] == MIN_RATE_FRACTION
    assert run_search(1.0, 0.05, float("inf"))[0] == 2.0 ** (MAX_TRIALS - 1)
