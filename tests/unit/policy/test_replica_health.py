"""Health of a replica: its status after events, with its circuit breaker, backpressure and grace period."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import (
    AdminState,
    AttemptOutcome,
    Backpressure,
    Breaker,
    BreakerLimits,
    OutageTracker,
    ReplicaHealth,
    ReplicaStatus,
    StatusChange,
    classify_status,
    eligible_replicas,
)
from argosy.policy.backpressure import MAX_RETRY_AFTER_S
from argosy.policy.outage_tracker import RETRY_INTERVAL_S, STARTING_GRACE_S

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


# --- circuit breaker ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statuses", "outcome"),
    [
        ((200, 400, 404), AttemptOutcome.SUCCESS),  # the client's own mistakes count as success
        ((429, 503), AttemptOutcome.BACKPRESSURE),
        ((500, 502, 401, 402, 424, 204, 301, 307), AttemptOutcome.FAILURE),
    ],
    ids=lambda value: value.name if isinstance(value, AttemptOutcome) else "",
)
def test_status_is_classified(statuses: tuple[int, ...], outcome: AttemptOutcome) -> None:
    assert {classify_status(status) for status in statuses} == {outcome}


def open_breaker(now: float = 0.0) -> Breaker:
    """Return a breaker that three failures at `now` have opened."""
    breaker = Breaker()
    for _ in range(3):
        breaker.record_outcome(AttemptOutcome.FAILURE, now)
    assert not breaker.is_closed
    return breaker


def test_consecutive_failures_open_breaker_and_backpressure_does_not() -> None:
    breaker = Breaker()
    for outcome in (
        *[AttemptOutcome.BACKPRESSURE] * 100,
        *[AttemptOutcome.FAILURE] * 2,
        AttemptOutcome.SUCCESS,
    ):
        breaker.record_outcome(outcome, 0.0)
    for _ in range(2):
        breaker.record_outcome(AttemptOutcome.FAILURE, 0.0)
    assert breaker.is_closed
    assert not breaker.is_probe_due(1000.0)
    breaker.record_outcome(AttemptOutcome.FAILURE, 0.0)
    assert not breaker.is_closed


def test_failure_ratio_opens_breaker_without_consecutive_failures() -> None:
    for failure_period, closed in ((3, True), (2, False)):
        breaker = Breaker(BreakerLimits(sample_size=10))
        for number in range(60):
            breaker.record_outcome(
                AttemptOutcome.SUCCESS if number % failure_period else AttemptOutcome.FAILURE, 0.0
            )
        assert breaker.is_closed == closed


def test_failed_probe_doubles_the_open_interval() -> None:
    breaker, intervals, now = open_breaker(), [], 0.0
    for _ in range(1100):
        assert breaker.open_until is not None
        intervals.append(breaker.open_until - now)
        assert not breaker.is_probe_due(breaker.open_until - 0.1)
        now = breaker.open_until
        assert breaker.is_probe_due(now)
        breaker.record_probe_outcome(AttemptOutcome.FAILURE, now)
    assert intervals == [2.0, 4.0, 8.0, *[10.0] * 1097]
    assert breaker.open_until is not None
    breaker.record_probe_outcome(AttemptOutcome.BACKPRESSURE, breaker.open_until)
    assert breaker.is_closed


def test_short_recovery_does_not_reset_the_open_interval() -> None:
    breaker, intervals, now = Breaker(), [], 100.0
    for closed_s in (1.0, 1.0, 1.0, 1.0, 60.0, 1.0):
        for _ in range(3):
            breaker.record_outcome(AttemptOutcome.FAILURE, now)
        assert breaker.open_until is not None
        intervals.append(breaker.open_until - now)
        now = breaker.open_until
        breaker.record_probe_outcome(AttemptOutcome.SUCCESS, now)
        assert breaker.is_closed
        now += closed_s
    assert intervals == [2.0, 4.0, 8.0, 10.0, 10.0, 2.0]


def test_failures_before_closing_do_not_count_afterwards() -> None:
    breaker = Breaker(BreakerLimits(sample_size=4))
    for outcome in (
        AttemptOutcome.FAILURE,
        AttemptOutcome.SUCCESS,
        AttemptOutcome.FAILURE,
        AttemptOutcome.FAILURE,
    ):
        breaker.record_outcome(outcome, 0.0)
    assert not breaker.is_closed
    breaker.record_probe_outcome(AttemptOutcome.SUCCESS, 2.0)
    for _ in range(2):
        breaker.record_outcome(AttemptOutcome.FAILURE, 2.1)
    assert breaker.is_closed


def test_outcomes_of_earlier_requests_do_not_change_an_open_breaker() -> None:
    breaker = open_breaker()
    until = breaker.open_until
    breaker.record_outcome(AttemptOutcome.FAILURE, 0.1)
    breaker.record_outcome(AttemptOutcome.SUCCESS, 0.1)
    for _ in range(30):
        breaker.record_outcome(AttemptOutcome.FAILURE, 0.2)
    assert breaker.open_until == until
    breaker.record_outcome(AttemptOutcome.SUCCESS, 2.1)
    breaker.record_outcome(AttemptOutcome.FAILURE, 2.2)
    assert breaker.open_until == until
    breaker.record_probe_outcome(AttemptOutcome.SUCCESS, 2.3)
    assert breaker.is_closed


@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_at_least_half_of_a_pool_stays_eligible(open_flags: list[bool]) -> None:
    pool = {}
    for number, is_open in enumerate(open_flags):
        pool[str(number)] = open_breaker(float(-number)) if is_open else Breaker()
    closed = [name for name, breaker in pool.items() if breaker.is_closed]
    earliest_open = [name for name in reversed(pool) if name not in closed]
    assert (
        eligible_replicas(pool)
        == closed + earliest_open[: max(0, len(pool) - len(pool) // 2 - len(closed))]
    )


# --- backpressure ---------------------------------------------------------------------------------


def pause_s(backpressure: Backpressure, now: float) -> float:
    """Return the seconds without a request, rounded up to an eighth."""
    eighths = next(n for n in range(1000) if backpressure.concurrency_limit(now + n / 8))
    assert backpressure.is_backing_off(now) == (eighths > 0)
    return eighths / 8


def test_replica_without_rejections_has_no_cap() -> None:
    assert Backpressure().concurrency_limit(0.0) == math.inf
    assert not Backpressure().is_backing_off(0.0)


def test_rejection_caps_concurrency_at_running_count_and_cap_rises_over_time() -> None:
    backpressure = Backpressure()
    for running in (9, 8, 7, 4):  # all requests of one burst are rejected
        backpressure.on_rejected(running, 10.0)
    assert not backpressure.is_backing_off(10.0)
    assert [backpressure.concurrency_limit(now) for now in (10.0, 11.0, 14.0)] == [4.0, 6.0, 24.0]
    backpressure.on_rejected(100, 20.0)
    assert backpressure.concurrency_limit(35.0) == 340.0


@pytest.mark.parametrize("retry_after_s", [None, 0.0, 0.1])
def test_repeated_rejections_while_idle_double_the_pause(retry_after_s: float | None) -> None:
    backpressure, pauses, now = Backpressure(), [], 0.0
    for number in range(7):
        for _ in range(5):  # all requests in flight are rejected
            backpressure.on_rejected(0, now, retry_after_s)
        pauses.append(pause_s(backpressure, now))
        now += pauses[-1]
        assert backpressure.concurrency_limit(now) == 1.0
        if number == 5:
            backpressure.on_accepted()
    assert pauses == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 0.5]
    for _ in range(1100):
        backpressure.on_rejected(0, now, retry_after_s)
        now += 4.0
    assert backpressure.concurrency_limit(now) == 1.0


@given(running=st.integers(0, 300), retry_after_s=st.floats(0.0, 1e300), now=st.floats(0.0, 1e6))
def test_retry_after_sets_the_pause_within_its_maximum(
    running: int, retry_after_s: float, now: float
) -> None:
    backpressure = Backpressure()
    backpressure.on_rejected(running, now, retry_after_s)
    pause = pause_s(backpressure, now)
    assert min(retry_after_s, MAX_RETRY_AFTER_S) <= pause <= MAX_RETRY_AFTER_S
    assert backpressure.concurrency_limit(now + pause) < max(1, running) + 0.15
    assert backpressure.concurrency_limit(now + pause + 1.0) > max(1, running) + 1
    backpressure.on_rejected(3, now)  # sent before the replica asked for the pause
    assert pause_s(backpressure, now) == pause


def test_retry_after_is_reported_only_during_the_pause() -> None:
    backpressure = Backpressure()
    assert backpressure.retry_after_s(0.0) == 0.0
    backpressure.on_rejected(0, 0.0, 1000.0)
    assert [backpressure.retry_after_s(now) for now in (0.0, 40.0, MAX_RETRY_AFTER_S)] == [
        1000.0,
        960.0,
        0.0,
    ]
    backpressure.on_rejected(0, 70.0)  # without Retry-After
    assert backpressure.retry_after_s(70.0) == 0.0


# --- grace period of a replica that is down -------------------------------------------------------


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
    assert tracker.grace_ends_at == math.inf, "before the first observation"
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
