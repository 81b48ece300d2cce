"""How long requests wait for a replica that is away: bounded from when it was last there, whatever it says."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import Absence
from argosy.policy.outage_tracker import AGAIN_S, LOADING_S

PATIENCE_S = 20.0
NEWS = st.lists(st.tuples(st.sampled_from(["there", "lost", "coming"]), st.floats(0.1, 400.0)))


def told(absence: Absence, news: str, now: float) -> None:
    match news:
        case "there":
            absence.there()
        case "lost":
            absence.lost(now)
        case _:
            absence.coming(now)


def test_one_that_was_there_is_waited_for_and_one_that_never_was_is_not() -> None:
    absence = Absence(PATIENCE_S)
    assert absence.until == math.inf  # until it has been asked
    absence.lost(10.0)
    assert absence.until == -math.inf
    absence.there()
    absence.lost(20.0)
    absence.lost(30.0)
    assert absence.until == 20.0 + PATIENCE_S


def test_one_that_says_that_it_is_coming_gets_the_time_that_loading_takes_once() -> None:
    absence = Absence(PATIENCE_S)
    absence.coming(10.0)
    absence.lost(20.0)
    assert absence.until == 10.0 + PATIENCE_S
    absence.coming(25.0)
    assert absence.until == 10.0 + LOADING_S


def test_while_it_is_away_a_request_now_and_then_finds_out() -> None:
    absence = Absence(PATIENCE_S)
    absence.lost(1.0)
    assert absence.more(1.0) == 1
    absence.asked(1.0)
    absence.lost(1.1)
    assert [absence.more(now) for now in (1.0, 1.0 + AGAIN_S)] == [0, 1]


@given(NEWS, st.sampled_from([PATIENCE_S, 2 * LOADING_S]))
def test_nobody_waits_for_longer_than_from_when_it_was_there_or_first_said_that_it_would_be(
    events: list[tuple[str, float]], patience_s: float
) -> None:
    absence, now, since = Absence(patience_s), 0.0, -math.inf
    for news, pause_s in events:
        now += pause_s
        if not absence.away and absence.met:
            since = now
        if news == "coming" and since == -math.inf:
            since = now
        told(absence, news, now)
        coming_s = max(LOADING_S, patience_s)
        allowed_s = {"there": math.inf, "lost": patience_s, "coming": coming_s}[news]
        assert absence.until == since + allowed_s or (news == "there" and not absence.away)
        assert absence.away == (news != "there")
