"""Requests that replicas were lost with: turned away for a moment, remembered for a minute, never without bounds."""

from __future__ import annotations

from argosy.policy import Suspects
from argosy.policy.poison_requests import MOST, REMEMBERED_S, WAIT_S


def test_one_that_was_given_up_waits_then_may_be_tried_and_is_forgotten() -> None:
    known = Suspects()
    assert known.wait_s(b"a", 0.0) == 0.0
    known.given_up(b"a", 10.0)
    assert known.wait_s(b"a", 10.0) == WAIT_S
    assert known.wait_s(b"b", 10.0) == 0.0
    assert known.wait_s(b"a", 10.0 + WAIT_S) == 0.0
    assert known.knows(b"a", 9.9 + REMEMBERED_S)
    assert not known.knows(b"a", 10.0 + REMEMBERED_S)
    assert not len(known)


def test_one_that_is_given_up_again_waits_again_and_one_that_is_answered_does_not() -> None:
    known = Suspects()
    known.given_up(b"a", 0.0)
    known.given_up(b"b", 1.0)
    known.given_up(b"a", 50.0)
    assert known.wait_s(b"a", 51.0) == WAIT_S - 1.0
    assert known.knows(b"a", 70.0)
    assert not known.knows(b"b", 70.0)
    known.cleared(b"a")
    assert not known.knows(b"a", 70.0)
    known.cleared(b"a")


def test_memory_is_bounded() -> None:
    known = Suspects()
    for number in range(MOST + 10):
        known.given_up(b"%d" % number, 0.0)
    assert len(known) == MOST
    assert not known.knows(b"9", 0.0)
    assert known.knows(b"10", 0.0)
