"""Supervision: a process is started, restarted after exit, killed when it hangs, given up after failed starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import (
    FailFleet,
    FleetSupervision,
    GiveUpReplica,
    KillReplica,
    ProcessRun,
    RestartLimits,
    StartReplica,
    WakeAt,
)
from argosy.policy.supervision import SupervisionAction, SupervisionPolicy

LIMITS = RestartLimits()
NOTHING, START, KILL, GIVE_UP = (
    SupervisionAction.NOTHING,
    SupervisionAction.START,
    SupervisionAction.KILL,
    SupervisionAction.GIVE_UP,
)


def started(policy: SupervisionPolicy, now: float) -> ProcessRun:
    assert policy.decide(None, now) is START
    return ProcessRun(now)


def test_missing_process_is_started_and_healthy_one_left_alone() -> None:
    policy = SupervisionPolicy()
    run = started(policy, 0.0)
    for now in range(1, 60):
        assert policy.decide(run, float(now)) is NOTHING
        run = replace(run, last_response_at=float(now), ready_at=1.0)


@pytest.mark.parametrize(
    ("exit_", "reason"),
    [
        ({"exit_status": 3}, "it exited with status 3"),
        ({"exit_status": 0}, "it exited with status 0"),
        ({"exit_status": -11}, "it crashed with SIGSEGV"),
        (
            {"exit_status": -9, "ran_out_of_memory": True},
            "the system killed it because memory ran out",
        ),
        ({"exit_status": -9}, "it was killed (SIGKILL), by a person or because memory ran out"),
        ({"exit_status": -15}, "it was killed (SIGTERM)"),
        ({"exit_status": -99}, "it was killed (signal 99)"),
        ({"exit_status": 1, "start_error": "no GPU"}, "it could not start: no GPU"),
        ({}, "it exited"),
    ],
)
def test_exit_reason_names_status_signal_or_error(exit_: dict[str, Any], reason: str) -> None:
    assert ProcessRun(0.0, exited_at=1.0, **exit_).exit_reason == reason


def test_first_restart_is_immediate_and_short_runs_double_the_delay() -> None:
    policy, now, delays = SupervisionPolicy(), 0.0, []
    run = started(policy, now)
    for _ in range(8):
        now += 1.0
        exited = replace(run, ready_at=now, last_response_at=now, exited_at=now)
        delay = 0.0
        while policy.decide(exited, now + delay) is NOTHING:
            delay += 0.25
        delays.append(delay)
        now += delay
        run = ProcessRun(now)
    assert delays == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    long_run = replace(run, ready_at=now, exited_at=now + LIMITS.healthy_after_s)
    assert policy.decide(long_run, now + LIMITS.healthy_after_s) is START


def test_repeated_failed_starts_end_in_giving_up() -> None:
    policy, now, starts = SupervisionPolicy(), 0.0, 1
    run = started(policy, now)
    while (
        action := policy.decide(replace(run, exited_at=run.started_at + 1), now + 1)
    ) is not GIVE_UP:
        now += 1.0
        if action is START:
            starts += 1
            run = ProcessRun(now)
    assert starts == LIMITS.max_failed_starts
    assert policy.has_given_up
    assert policy.decide(replace(run, exited_at=now), now + 1000) is NOTHING


def test_process_that_was_ready_is_retried_every_minute() -> None:
    policy, now, starts = SupervisionPolicy(), 100.0, []
    run = started(policy, 0.0)
    assert policy.decide(replace(run, ready_at=1.0, exited_at=now), now) is START
    run = ProcessRun(now)
    while now < 400.0:
        now += 0.5
        if policy.decide(replace(run, exited_at=run.started_at + 0.5), now) is START:
            run = ProcessRun(now)
            starts.append(now)
    *_, before, last = starts
    assert last - before == LIMITS.give_up_retry_interval_s + 0.5
    assert len(starts) == LIMITS.max_failed_starts - 1 + 4
    assert policy.has_given_up
    while policy.decide(replace(run, exited_at=run.started_at + 0.5), now) is not START:
        now += 0.5
    assert not policy.has_given_up


def test_start_error_is_final_unless_process_was_ready_before() -> None:
    failed_start = ProcessRun(0.0, exited_at=1.0, start_error="no such model")
    unproven = SupervisionPolicy()
    started(unproven, 0.0)
    assert unproven.decide(failed_start, 1.0) is GIVE_UP
    proven = SupervisionPolicy()
    started(proven, 0.0)
    assert proven.decide(ProcessRun(0.0, ready_at=1.0, exited_at=20.0), 20.0) is START
    assert proven.decide(replace(failed_start, started_at=20.0, exited_at=21.0), 30.0) is START


def test_silence_after_a_response_is_a_hang() -> None:
    policy = SupervisionPolicy(RestartLimits(hang_timeout_s=5.0))
    run = replace(started(policy, 0.0), last_response_at=1.0)
    for now in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0):
        assert policy.decide(run, now) is NOTHING
    assert policy.decide(run, 6.1) is KILL
    assert policy.decide(run, 6.2) is KILL  # repeated until the process exits


def test_start_has_its_own_timeout() -> None:
    policy = SupervisionPolicy()
    run = started(policy, 0.0)
    now = 0.0
    while policy.decide(run, now) is NOTHING:
        now += 1.0
    assert LIMITS.start_timeout_s <= now <= LIMITS.start_timeout_s + 2


def test_silence_is_ignored_after_the_supervisor_itself_was_suspended() -> None:
    policy = SupervisionPolicy(RestartLimits(hang_timeout_s=5.0))
    run = replace(started(policy, 0.0), last_response_at=1.0)
    assert policy.decide(run, 2.0) is NOTHING
    assert policy.decide(run, 500.0) is NOTHING
    for now in (501.0, 502.0, 503.0, 504.0, 505.0):
        assert policy.decide(run, now) is NOTHING
    assert policy.decide(run, 505.1) is KILL


Step = tuple[str, float]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["respond", "ready", "exit", "fail", "check"]), st.floats(0.0, 8.0)
        )
    )
)
def test_decision_fits_the_process_state_for_any_event_sequence(steps: list[Step]) -> None:
    """A running process is never started, an exited one never killed, and no decision is repeated."""
    policy, now = SupervisionPolicy(), 0.0
    run: ProcessRun | None = None
    for event, elapsed_s in steps:
        now += elapsed_s
        if run is not None and run.exited_at is None:
            run = {
                "respond": replace(run, last_response_at=now),
                "ready": replace(run, ready_at=run.ready_at or now),
                "exit": replace(run, exited_at=now),
                "fail": replace(run, start_error="no", exited_at=now),
                "check": run,
            }[event]
        action = policy.decide(run, now)
        has_exited = run is None or run.exited_at is not None
        assert action not in ({KILL} if has_exited else {START, GIVE_UP})
        assert not (policy.has_given_up and action in {START, KILL})
        if action is START:
            run = ProcessRun(now)
            assert policy.decide(run, now) is NOTHING
        elif action is not KILL:
            assert policy.decide(run, now) is NOTHING


def test_fleet_gets_each_action_once_until_it_has_ended() -> None:
    fleet = FleetSupervision(["a", "b"], RestartLimits(hang_timeout_s=5.0))
    wake = WakeAt(0.5)
    assert fleet.on_tick({}, 0.0) == [StartReplica("a"), StartReplica("b"), wake]
    assert fleet.on_tick({}, 0.0) == [wake]
    for name in ("a", "b"):
        fleet.on_action_ended(name)
    healthy = ProcessRun(0.0, last_response_at=0.0, ready_at=0.0)
    crashed = replace(healthy, exited_at=1.0, exit_status=-11)
    assert fleet.on_tick({"a": healthy, "b": crashed}, 1.0) == [
        StartReplica("b", "it crashed with SIGSEGV"),
        WakeAt(1.5),
    ]
    for now in (3.0, 5.0):
        fleet.on_tick({"a": healthy, "b": crashed}, now)
    kill = KillReplica("a", 5.0)
    assert fleet.on_tick({"a": healthy, "b": crashed}, 5.1) == [kill, WakeAt(5.6)]
    assert fleet.on_tick({"a": healthy, "b": crashed}, 5.2) == [WakeAt(5.7)]
    fleet.on_action_ended("a")
    killed = replace(healthy, exited_at=5.2, exit_status=-9)
    assert fleet.on_tick({"a": killed, "b": crashed}, 5.3) == [
        StartReplica("a", "it did not respond for 5 s and was killed"),
        WakeAt(5.8),
    ]


@pytest.mark.parametrize(
    ("start_error", "reason"),
    [
        ("no GPU", "no GPU"),
        ("", "every replica exited before it was ready; see the log"),
    ],
)
def test_fleet_fails_once_all_replicas_are_given_up(start_error: str, reason: str) -> None:
    fleet = FleetSupervision(["a"], RestartLimits(max_failed_starts=1))
    fleet.on_tick({}, 0.0)
    fleet.on_action_ended("a")
    run = ProcessRun(0.0, exited_at=1.0, exit_status=3, start_error=start_error)
    exits = "the process exits before it is ready: it exited with status 3"
    given_up = GiveUpReplica("a", start_error or exits)
    failed = FailFleet(reason)
    assert fleet.on_tick({"a": run}, 1.0) == [given_up, failed, WakeAt(1.5)]
    assert fleet.on_tick({"a": run}, 2.0) == [failed, WakeAt(2.5)]
