"""The search for the highest rate, on servers that hold up to a known one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from argosy.bench.rate_search import MAX_TRIALS, MIN_RATE_FRACTION, search_rate


def search(first: float, precision: float, capacity: float) -> tuple[float | None, list[float]]:
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
def test_finds_the_capacity(first: float, precision: float, capacity: float) -> None:
    best, tried = search(first, precision, capacity)
    if best is None:
        assert capacity < first * MIN_RATE_FRACTION
        return
    assert best <= capacity <= best * (1 + precision) * (1 + 1e-9)
    assert len(set(tried)) == len(tried) <= MAX_TRIALS


def test_gives_up() -> None:
    best, tried = search(1.0, 0.05, 0.0)
    assert best is None
    assert tried[-1] == MIN_RATE_FRACTION
    assert search(1.0, 0.05, float("inf"))[0] == 2.0 ** (MAX_TRIALS - 1)
