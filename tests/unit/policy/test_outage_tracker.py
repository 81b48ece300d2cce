"""Grace period of a replica that is down: bounded from the time when it was last up, whatever it reports."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import OutageTracker
from argosy.policy.outage_tracker import RETRY_INTERVAL_S, STARTING_GRACE_S

GRACE_S = 20.0
OBSERVATIONS = st.lists(
    st.tuples(st.sampled_from(["up", "down", "starting"]), st.floats(0.1, 400.0))
)


def observe(tracker: OutageTracker, observation: str, now: float) -> None:
    match observation:
        case "up":
            tracker.mark_up()
        case "down":
            tracker.mark_down(now)
        case _:
            tracker.mark_starting(now)


def test_grace_starts_when_replica_goes_down_and_needs_an_earlier_up() -> None:
    tracker = OutageTracker(GRACE_S)
    assert tracker.grace_ends_at == math.inf  # before the first observation
    tracker.mark_down(10.0)
    assert tracker.grace_ends_at == -math.inf
    tracker.mark_up()
    tracker.mark_down(20.0)
    tracker.mark_down(30.0)
    assert tracker.grace_ends_at == 20.0 + GRACE_S


def test_starting_replica_gets_the_loading_grace_once() -> None:
    tracker = OutageTracker(GRACE_S)
    tracker.mark_starting(10.0)
    tracker.mark_down(20.0)
    assert tracker.grace_ends_at == 10.0 + GRACE_S
    tracker.mark_starting(25.0)
    assert tracker.grace_ends_at == 10.0 + STARTING_GRACE_S


def test_probe_is_allowed_once_per_retry_interval() -> None:
    tracker = OutageTracker(GRACE_S)
    tracker.mark_down(1.0)
    assert tracker.probe_budget(1.0) == 1
    tracker.on_dispatched(1.0)
    tracker.mark_down(1.1)
    assert [tracker.probe_budget(now) for now in (1.0, 1.0 + RETRY_INTERVAL_S)] == [0, 1]


@given(OBSERVATIONS, st.sampled_from([GRACE_S, 2 * STARTING_GRACE_S]))
def test_grace_counts_from_last_up_or_first_starting_report(
    events: list[tuple[str, float]], grace_s: float
) -> None:
    tracker, now, since = OutageTracker(grace_s), 0.0, -math.inf
    for observation, pause_s in events:
        now += pause_s
        if not tracker.is_down and tracker.was_ever_up:
            since = now
        if observation == "starting" and since == -math.inf:
            since = now
        observe(tracker, observation, now)
        starting_grace_s = max(STARTING_GRACE_S, grace_s)
        expected_grace_s = {"up": math.inf, "down": grace_s, "starting": starting_grace_s}[
            observation
        ]
        assert tracker.grace_ends_at == since + expected_grace_s or (
            observation == "up" and not tracker.is_down
        )
        assert tracker.is_down == (observation != "up")
