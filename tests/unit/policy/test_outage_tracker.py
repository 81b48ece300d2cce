"""How long requests wait for a replica that is away: bounded from when it was last there, whatever it says."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import OutageTracker
from argosy.policy.outage_tracker import RETRY_INTERVAL_S, STARTING_GRACE_S

PATIENCE_S = 20.0
NEWS = st.lists(st.tuples(st.sampled_from(["there", "lost", "coming"]), st.floats(0.1, 400.0)))


def told(absence: OutageTracker, news: str, now: float) -> None:
    match news:
        case "there":
            absence.mark_up()
        case "lost":
            absence.mark_down(now)
        case _:
            absence.mark_starting(now)


def test_one_that_was_there_is_waited_for_and_one_that_never_was_is_not() -> None:
    absence = OutageTracker(PATIENCE_S)
    assert absence.grace_ends_at == math.inf  # until it has been asked
    absence.mark_down(10.0)
    assert absence.grace_ends_at == -math.inf
    absence.mark_up()
    absence.mark_down(20.0)
    absence.mark_down(30.0)
    assert absence.grace_ends_at == 20.0 + PATIENCE_S


def test_one_that_says_that_it_is_coming_gets_the_time_that_loading_takes_once() -> None:
    absence = OutageTracker(PATIENCE_S)
    absence.mark_starting(10.0)
    absence.mark_down(20.0)
    assert absence.grace_ends_at == 10.0 + PATIENCE_S
    absence.mark_starting(25.0)
    assert absence.grace_ends_at == 10.0 + STARTING_GRACE_S


def test_while_it_is_away_a_request_now_and_then_finds_out() -> None:
    absence = OutageTracker(PATIENCE_S)
    absence.mark_down(1.0)
    assert absence.probe_budget(1.0) == 1
    absence.on_dispatched(1.0)
    absence.mark_down(1.1)
    assert [absence.probe_budget(now) for now in (1.0, 1.0 + RETRY_INTERVAL_S)] == [0, 1]


@given(NEWS, st.sampled_from([PATIENCE_S, 2 * STARTING_GRACE_S]))
def test_nobody_waits_for_longer_than_from_when_it_was_there_or_first_said_that_it_would_be(
    events: list[tuple[str, float]], patience_s: float
) -> None:
    absence, now, since = OutageTracker(patience_s), 0.0, -math.inf
    for news, pause_s in events:
        now += pause_s
        if not absence.is_down and absence.was_ever_up:
            since = now
        if news == "coming" and since == -math.inf:
            since = now
        told(absence, news, now)
        coming_s = max(STARTING_GRACE_S, patience_s)
        allowed_s = {"there": math.inf, "lost": patience_s, "coming": coming_s}[news]
        assert absence.grace_ends_at == since + allowed_s or (
            news == "there" and not absence.is_down
        )
        assert absence.is_down == (news != "there")
