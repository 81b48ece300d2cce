"""Custody: a replica is started once, again when it died, ended when it hangs, and given up when that is no use."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import ProcessRun, RestartLimits, SupervisionAction, SupervisionPolicy

LIMITS = RestartLimits()
NOTHING, START, KILL, GIVE_UP = (
    SupervisionAction.NOTHING,
    SupervisionAction.START,
    SupervisionAction.KILL,
    SupervisionAction.GIVE_UP,
)


def started(custody: SupervisionPolicy, now: float) -> ProcessRun:
    assert custody.decide(None, now) is START
    return ProcessRun(now)


def test_what_is_not_there_is_started_and_what_lives_is_left_alone() -> None:
    custody = SupervisionPolicy()
    life = started(custody, 0.0)
    for now in range(1, 60):
        assert custody.decide(life, float(now)) is NOTHING
        life = replace(life, last_response_at=float(now), ready_at=1.0)


def test_the_first_death_costs_no_wait_and_each_further_short_life_doubles_it() -> None:
    custody, now, waits = SupervisionPolicy(), 0.0, []
    life = started(custody, now)
    for _ in range(8):
        now += 1.0
        died = replace(life, ready_at=now, last_response_at=now, exited_at=now)
        waited = 0.0
        while custody.decide(died, now + waited) is NOTHING:
            waited += 0.25
        waits.append(waited)
        now += waited
        life = ProcessRun(now)
    assert waits == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    long = replace(life, ready_at=now, exited_at=now + LIMITS.healthy_after_s)
    assert custody.decide(long, now + LIMITS.healthy_after_s) is START


def test_starts_that_come_to_nothing_end_in_giving_up() -> None:
    custody, now, starts = SupervisionPolicy(), 0.0, 1
    life = started(custody, now)
    while (
        action := custody.decide(replace(life, exited_at=life.started_at + 1), now + 1)
    ) is not GIVE_UP:
        now += 1.0
        if action is START:
            starts += 1
            life = ProcessRun(now)
    assert starts == LIMITS.max_failed_starts
    assert custody.has_given_up
    assert custody.decide(replace(life, exited_at=now), now + 1000) is NOTHING


def test_one_that_has_served_is_tried_once_more_each_minute() -> None:
    custody, now, starts = SupervisionPolicy(), 100.0, []
    life = started(custody, 0.0)
    assert custody.decide(replace(life, ready_at=1.0, exited_at=now), now) is START
    life = ProcessRun(now)
    while now < 400.0:
        now += 0.5
        if custody.decide(replace(life, exited_at=life.started_at + 0.5), now) is START:
            life = ProcessRun(now)
            starts.append(now)
    *_, before, last = starts
    assert last - before == LIMITS.give_up_retry_interval_s + 0.5
    assert len(starts) == LIMITS.max_failed_starts - 1 + 4
    assert custody.has_given_up
    while custody.decide(replace(life, exited_at=life.started_at + 0.5), now) is not START:
        now += 0.5
    assert not custody.has_given_up


def test_a_refusal_is_final_unless_it_has_served_before() -> None:
    refused = ProcessRun(0.0, exited_at=1.0, start_error="no such model")
    hopeless = SupervisionPolicy()
    started(hopeless, 0.0)
    assert hopeless.decide(refused, 1.0) is GIVE_UP
    proven = SupervisionPolicy()
    started(proven, 0.0)
    assert proven.decide(ProcessRun(0.0, ready_at=1.0, exited_at=20.0), 20.0) is START
    assert proven.decide(replace(refused, started_at=20.0, exited_at=21.0), 30.0) is START


def test_silence_is_a_stall_once_it_has_answered() -> None:
    custody = SupervisionPolicy(RestartLimits(hang_timeout_s=5.0))
    life = replace(started(custody, 0.0), last_response_at=1.0)
    for now in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0):
        assert custody.decide(life, now) is NOTHING
    assert custody.decide(life, 6.1) is KILL
    assert custody.decide(life, 6.2) is KILL  # until it has ended


def test_a_start_may_take_longer() -> None:
    custody = SupervisionPolicy()
    life = started(custody, 0.0)
    now = 0.0
    while custody.decide(life, now) is NOTHING:
        now += 1.0
    assert LIMITS.start_timeout_s <= now <= LIMITS.start_timeout_s + 2


def test_after_our_own_sleep_silence_says_nothing() -> None:
    custody = SupervisionPolicy(RestartLimits(hang_timeout_s=5.0))
    life = replace(started(custody, 0.0), last_response_at=1.0)
    assert custody.decide(life, 2.0) is NOTHING
    assert custody.decide(life, 500.0) is NOTHING
    for now in (501.0, 502.0, 503.0, 504.0, 505.0):
        assert custody.decide(life, now) is NOTHING
    assert custody.decide(life, 505.1) is KILL


Step = tuple[str, float]


@given(
    st.lists(
        st.tuples(st.sampled_from(["hear", "ready", "end", "refuse", "look"]), st.floats(0.0, 8.0))
    )
)
def test_whatever_happens_a_decision_suits_the_life(steps: list[Step]) -> None:
    """The living are never started, the dead never killed, and what has been decided is not decided anew."""
    custody, now = SupervisionPolicy(), 0.0
    life: ProcessRun | None = None
    for what, passed in steps:
        now += passed
        if life is not None and life.exited_at is None:
            life = {
                "hear": replace(life, last_response_at=now),
                "ready": replace(life, ready_at=life.ready_at or now),
                "end": replace(life, exited_at=now),
                "refuse": replace(life, start_error="no", exited_at=now),
                "look": life,
            }[what]
        action = custody.decide(life, now)
        dead = life is None or life.exited_at is not None
        assert action not in ({KILL} if dead else {START, GIVE_UP})
        assert not (custody.has_given_up and action in {START, KILL})
        if action is START:
            life = ProcessRun(now)
            assert custody.decide(life, now) is NOTHING
        elif action is not KILL:
            assert custody.decide(life, now) is NOTHING
