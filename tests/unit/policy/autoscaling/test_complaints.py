"""Complaints about other autoscalers, each as a scenario that Argosy's has to pass.

Those about an exceeded budget, replicas that cannot start, several owners and capped metrics are in test_autoscaler.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from tests.support.simulated_pool import SimulatedPool

from argosy.policy.autoscaling import ArrivedTokens, AutoscalerSettings

SETTINGS = AutoscalerSettings(min_replicas=1, max_replicas=40)
ZERO = AutoscalerSettings(min_replicas=0, max_replicas=40)


def count_changes(counts: list[int]) -> int:
    return sum(before != after for before, after in pairwise(counts))


def never_starting() -> None:
    """1,000 replicas wanted, few of them ready: the calm mode takes the rest back after 60 s."""
    pool = SimulatedPool(SETTINGS, replicas=4, startup_s=math.inf)
    counts = pool.run(600, 1000.0, queued_requests=0, queued_tokens=0.0, queue_age_s=0.0)
    assert max(counts) == counts[-1] == 12


def collapse_after_burst() -> None:
    """Replicas are started for a burst and dropped as soon as it ends."""
    pool = SimulatedPool(SETTINGS, replicas=4)
    pool.run(600, 200.0)
    top = max(pool.run(120, 1500.0))
    assert min(pool.run(250, 200.0)) == top


def pending_starts() -> None:
    """Starts of 20 s and more are ignored, so that replicas double again and again: 2, 4, 8, 16."""
    pool = SimulatedPool(SETTINGS, replicas=2, startup_s=120.0)
    quiet = {"queued_requests": 0, "queued_tokens": 0.0, "queue_age_s": 0.0}
    assert max(pool.run(120, 300.0, **quiet)) == 4


def constant_rate() -> None:
    """A constant rate flaps for ever, or grows to the maximum."""
    pool = SimulatedPool(SETTINGS, replicas=1)
    counts = pool.run(3600, lambda second: 60.0 + 5.0 * (second % 20.0 < 10.0))
    assert count_changes(counts) == 0


def restart_in_use() -> None:
    """A restart of the controller gives 7, 1, 2, 6, 7 replicas."""
    for keeps_state in (True, False):
        pool = SimulatedPool(SETTINGS, replicas=7)
        before = pool.run(700, 500.0)[-1]
        pool.restart_controller(keeps_state=keeps_state)
        assert set(pool.run(300, 500.0)) == {before}


def slow_load() -> None:
    """A start that takes 20 minutes is ended after 10, or after 2 minutes while a node starts."""
    pool = SimulatedPool(SETTINGS, replicas=2, startup_s=1200.0)
    counts = pool.run(1190, 300.0, queued_requests=0, queued_tokens=0.0, queue_age_s=0.0)
    assert counts == sorted(counts)
    assert counts[-1] == 4


def oscillation() -> None:
    """The count alternates between extremes each 60 s, as the demand does."""
    pool = SimulatedPool(SETTINGS, replicas=4)
    pool.run(900, lambda second: 200.0 if second % 120.0 < 60.0 else 800.0)
    counts = pool.run(3600, lambda second: 200.0 if second % 120.0 < 60.0 else 800.0)
    assert count_changes(counts) == 0


def queue_per_replica() -> None:
    """The queue divided by many replicas looks small, so that they are removed although requests wait."""
    pool = SimulatedPool(SETTINGS, replicas=20)
    pool.run(900, 1700.0)
    waiting = {"queued_requests": 3, "queued_tokens": 20.0, "queue_age_s": 2.0}
    assert min(pool.run(1200, 300.0, **waiting)) == 20


def runaway_on_queue() -> None:
    """Each interval multiplies the replicas by the queue: 1 to 22,745 for 100 requests per second."""
    pool = SimulatedPool(SETTINGS, replicas=1, startup_s=60.0)
    counts = pool.run(1200, 300.0)
    assert max(counts) <= 10


def deleted_replicas() -> None:
    """Series of deleted replicas remain, and count 2, 1, 2, 1 for ever."""
    pool = SimulatedPool(SETTINGS, replicas=2)
    assert count_changes(pool.run(1200, 40.0, kv_used_replicas=0.3)) == 1


def missing_metrics() -> None:
    """An empty answer of the metrics system counts as 0: at peak load all go to the minimum."""
    for defect in (
        {"metrics_age_s": None},
        {"metrics_age_s": 300.0},
        {"arrivals": (ArrivedTokens(math.nan, 5.0),)},
        {"capacity_tokens_per_s": None, "queued_requests": 0, "queue_age_s": 0.0},
    ):
        pool = SimulatedPool(SETTINGS, replicas=12)
        pool.run(900, 1000.0)
        assert set(pool.run(3600, 0.0 if "arrivals" in defect else 1000.0, **defect)) == {12}


def metrics_restart() -> None:
    """Counters begin at 0 after a restart of the metrics system, which is no idle pool."""
    pool = SimulatedPool(ZERO, replicas=12)
    pool.run(900, 1000.0)
    assert set(pool.run(300, 0.0, metrics_age_s=None)) == {12}
    assert set(pool.run(590, 0.0)) == {12}, "the demand has to be known for the whole window"


def stuck_high() -> None:
    """The count remains high for half an hour after a peak, or without any demand."""
    pool = SimulatedPool(SETTINGS, replicas=12)
    pool.run(900, 1000.0)
    assert pool.run(1500, 100.0)[-1] <= 3
    assert pool.run(1200, 0.0)[-1] == 1


def work_of_prompts() -> None:
    """Prefill replicas are never added, because running requests do not show the work of prompts."""
    pool = SimulatedPool(SETTINGS, replicas=2)
    assert pool.run(120, 500.0, running_requests=1)[-1] >= 6


@pytest.mark.parametrize(
    ("complaint", "scenario"),
    [
        ("knative-serving-3153", never_starting),
        ("knative-serving-9121", collapse_after_burst),
        ("knative-serving-13284", pending_starts),
        ("knative-serving-12765", constant_rate),
        ("knative-serving-4795", restart_in_use),
        ("knative-serving-15316", slow_load),
        ("kserve-1247", slow_load),
        ("ray-63279", oscillation),
        ("ray-18925", queue_per_replica),
        ("ray-26455", oscillation),
        ("llm-d-autoscaling-1019", runaway_on_queue),
        ("llm-d-autoscaling-368", deleted_replicas),
        ("llm-d-autoscaling-777", constant_rate),
        ("llm-d-autoscaling-1213", work_of_prompts),
        ("aibrix-2670", pending_starts),
        ("aibrix-1159", stuck_high),
        ("aibrix-593", stuck_high),
        ("keda-3065", missing_metrics),
        ("keda-965", metrics_restart),
        ("keda-4249", missing_metrics),
        ("kserve-5701", missing_metrics),
    ],
)
def test_complaint_does_not_apply(complaint: str, scenario: Callable[[], None]) -> None:
    scenario()
