"""Health of a replica: its status and reason after events, the requests that it may get, and reported changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import AdminState, AttemptOutcome, ReplicaHealth, ReplicaStatus, StatusChange

FAILURE, FULL = AttemptOutcome.FAILURE, AttemptOutcome.BACKPRESSURE
READY, STARTING, DRAINING, CORDONED, BACKOFF, EJECTED, UNREACHABLE = (
    ReplicaStatus.READY,
    ReplicaStatus.STARTING,
    ReplicaStatus.DRAINING,
    ReplicaStatus.CORDONED,
    ReplicaStatus.BACKOFF,
    ReplicaStatus.EJECTED,
    ReplicaStatus.UNREACHABLE,
)
Event = Callable[[ReplicaHealth, float], object]
SLOTS = 8


def report(state: str, explanation: str = "") -> Event:
    return lambda health, now: health.on_reported_state(state, now, explanation)


def end_attempt(outcome: AttemptOutcome, reason: str = "") -> Event:
    return lambda health, now: health.on_attempt_ended(outcome, 0, now, reason=reason)


def decide(state: AdminState) -> Event:
    return lambda health, now: health.on_admin_decision(
        state, now, reason="by ana: new disk", moves_at=now + 5.0
    )


def close_breaker(health: ReplicaHealth, now: float) -> None:
    health.on_test_ended(AttemptOutcome.SUCCESS, 0, now, is_up=True)


FAIL, UNREACHABLE_NOW = end_attempt(FAILURE, "reset"), ReplicaHealth.on_unreachable
EVENTS: list[Event] = [
    *(report(state) for state in ("ready", "starting", "restarting", "draining", "failed")),
    *(end_attempt(outcome) for outcome in AttemptOutcome),
    *(decide(state) for state in AdminState),
    *(ReplicaHealth.on_detected, ReplicaHealth.on_model_missing, UNREACHABLE_NOW, close_breaker),
    *(ReplicaHealth.on_response_started, ReplicaHealth.on_dispatched),
]


@pytest.mark.parametrize(
    ("events", "status", "reason", "limit"),
    [
        ([], READY, "", SLOTS),
        ([report("starting", "loading, 40%")], STARTING, "loading, 40%", 1),
        ([report("restarting")], STARTING, "it has not reported that it is ready", 1),
        ([report("draining")], DRAINING, "it reports that it drains", 1),
        ([report("failed")], UNREACHABLE, "its engine failed", 1),
        ([ReplicaHealth.on_model_missing], UNREACHABLE, "it does not serve the model", 1),
        ([UNREACHABLE_NOW], UNREACHABLE, "it cannot be reached", 1),
        ([report("ready"), UNREACHABLE_NOW], READY, "", SLOTS),  # one failure is no outage
        ([FAIL, FAIL], READY, "", SLOTS),
        ([FAIL] * 3, EJECTED, "its requests or probes failed: reset", SLOTS),
        ([*[FAIL] * 3, UNREACHABLE_NOW, close_breaker], UNREACHABLE, "reset", 1),
        (
            [*[FAIL] * 3, UNREACHABLE_NOW, close_breaker, ReplicaHealth.on_response_started],
            *(READY, "", SLOTS),
        ),
        ([end_attempt(FULL)], BACKOFF, "it refused a request as full", 0),
        ([decide(AdminState.CORDONED)], CORDONED, "cordoned by ana: new disk", SLOTS),
        ([decide(AdminState.DRAINING)], DRAINING, "drained by ana: new disk", SLOTS),
        (
            [decide(AdminState.DRAINING), report("draining")],
            *(DRAINING, "drained by ana: new disk", 1),
        ),
        ([decide(AdminState.CORDONED), decide(AdminState.ACTIVE)], READY, "", SLOTS),
        ([decide(AdminState.CORDONED), *[FAIL] * 3], EJECTED, None, SLOTS),
    ],
)
def test_status_follows_events(
    events: list[Event], status: ReplicaStatus, reason: str | None, limit: int
) -> None:
    health = ReplicaHealth("r")
    for event in events:
        event(health, 10.0)
    assert health.status(10.0) is status
    assert reason in {None, health.reason(10.0)}
    assert health.request_limit(SLOTS, 0, 10.0) == limit


def test_backoff_ends_with_time_and_outage_gets_one_request_per_half_second() -> None:
    health = ReplicaHealth("r")
    end_attempt(FULL)(health, 10.0)
    assert [health.status(now) for now in (10.4, 10.5)] == [BACKOFF, READY]
    report("restarting")(health, 20.0)
    health.on_dispatched(20.0)
    assert [health.request_limit(SLOTS, 2, now) for now in (20.4, 20.5)] == [2, 3]


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.floats(0.0, 5.0)), max_size=40))
def test_status_decides_about_requests_and_each_change_is_reported_once(
    events: list[tuple[Event, float]],
) -> None:
    health, now, changes = ReplicaHealth("r", assume_ready=False), 0.0, list[StatusChange]()
    health.on_status_change = changes.append
    for event, elapsed_s in events:
        now += elapsed_s
        event(health, now)
        health.observe(now)
        status = health.status(now)
        assert health.is_schedulable or status not in {READY, BACKOFF}
        assert not (health.is_schedulable and status in {STARTING, DRAINING, CORDONED})
        assert (status is EJECTED) == health.is_ejected
        assert bool(health.reason(now)) == (status is not READY)
        assert 0 <= health.request_limit(SLOTS, 0, now) <= SLOTS
    statuses = [STARTING, *(change.status for change in changes)]
    assert statuses[-1] is health.status(now)
    assert [change.previous for change in changes] == statuses[:-1]
    assert all(change.status is not change.previous for change in changes)
