"""Learning of the capacity: from a low load, with the objectives, and with a few replicas that are slow."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy.autoscaling import CapacityEstimator, CapacityState, ReplicaReport

MAX_RUNNING = 64.0


def report(
    running: float, base_s: float, share_s: float, mix: float, ttft_s: float = 0.0
) -> ReplicaReport:
    """Return the report of a replica that decodes a step in `base_s + running * share_s`."""
    inter_token_s = base_s + running * share_s
    return ReplicaReport(
        tokens_per_s=mix * running / inter_token_s,
        running=running,
        max_running=MAX_RUNNING,
        inter_token_s=inter_token_s,
        ttft_s=ttft_s,
    )


@given(
    st.floats(0.005, 0.02),
    st.floats(1e-4, 2e-3),
    st.floats(2.0, 20.0),
    st.lists(st.floats(1.0, 20.0), min_size=6, max_size=30).filter(
        lambda loads: max(loads) - min(loads) > 1.0
    ),
)
def test_capacity_at_the_objective_is_known_from_lower_loads(
    base_s: float, share_s: float, mix: float, loads: list[float]
) -> None:
    estimator = CapacityEstimator(ttft_s=1.0, itl_s=0.04)
    for running in loads:
        estimator.add([report(running, base_s, share_s, mix)] * 3)
    running = min(MAX_RUNNING, (0.04 - base_s) / share_s)
    expected = mix * running / (base_s + running * share_s)
    assert estimator.tokens_per_s == pytest.approx(expected, rel=0.01)


def test_without_an_itl_objective_the_concurrency_is_the_limit() -> None:
    estimator = CapacityEstimator(ttft_s=None, itl_s=None)
    assert estimator.tokens_per_s is None
    for running in (4, 5, 6, 7, 8, 9):
        estimator.add([report(running, 0.01, 0.001, 3.0)])
    assert estimator.tokens_per_s == pytest.approx(3.0 * 64 / 0.074)
    estimator.add([report(0, 0.01, 0.001, 3.0)])
    assert estimator.tokens_per_s == pytest.approx(3.0 * 64 / 0.074)


def test_constant_load_beyond_the_objective_is_scaled_down_to_it() -> None:
    estimator = CapacityEstimator(ttft_s=None, itl_s=0.02)
    for _ in range(6):
        estimator.add([report(20, 0.02, 0.001, 1.0)])
    assert estimator.tokens_per_s == pytest.approx(20 / 0.04)


def test_missed_ttft_bounds_the_capacity_until_it_is_met_again() -> None:
    estimator = CapacityEstimator(ttft_s=1.0, itl_s=None)
    free = report(10, 0.01, 0.001, 2.0)
    for running in (8, 9, 10, 11, 12, 13):
        estimator.add([report(running, 0.01, 0.001, 2.0)])
    unbounded = estimator.tokens_per_s
    assert unbounded is not None
    late = msgspec.structs.replace(free, ttft_s=3.0)
    estimator.add([free] * 99 + [late])
    assert estimator.tokens_per_s == pytest.approx(unbounded), "one slow replica proves nothing"
    for _ in range(20):
        estimator.add([late])
    assert estimator.tokens_per_s == pytest.approx(free.tokens_per_s, rel=0.01)
    for _ in range(100):
        estimator.add([free])
    assert 1.05 * free.tokens_per_s < (estimator.tokens_per_s or 0.0) < 1.2 * free.tokens_per_s


def test_state_resumes() -> None:
    estimator = CapacityEstimator(ttft_s=1.0, itl_s=0.04)
    for running in (4, 5, 6, 7, 8, 9):
        estimator.add([report(running, 0.01, 0.001, 3.0, ttft_s=running / 8.0)])
    stored = msgspec.json.encode(estimator.state)
    resumed = CapacityEstimator(1.0, 0.04, msgspec.json.decode(stored, type=CapacityState))
    assert resumed.tokens_per_s == estimator.tokens_per_s
    resumed.add([report(12, 0.01, 0.001, 3.0)])
    estimator.add([report(12, 0.01, 0.001, 3.0)])
    assert resumed.state == estimator.state
