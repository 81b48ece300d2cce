"""Requests that replicas were lost with: turned away for a moment, remembered for a minute, never without bounds."""

from __future__ import annotations

from argosy.policy import PoisonRequestTracker
from argosy.policy.poison_requests import MAX_QUARANTINED, QUARANTINE_S, REJECTION_S


def test_one_that_was_given_up_waits_then_may_be_tried_and_is_forgotten() -> None:
    known = PoisonRequestTracker()
    assert known.retry_after_s(b"a", 0.0) == 0.0
    known.quarantine(b"a", 10.0)
    assert known.retry_after_s(b"a", 10.0) == REJECTION_S
    assert known.retry_after_s(b"b", 10.0) == 0.0
    assert known.retry_after_s(b"a", 10.0 + REJECTION_S) == 0.0
    assert known.is_quarantined(b"a", 9.9 + QUARANTINE_S)
    assert not known.is_quarantined(b"a", 10.0 + QUARANTINE_S)
    assert not len(known)


def test_one_that_is_given_up_again_waits_again_and_one_that_is_answered_does_not() -> None:
    known = PoisonRequestTracker()
    known.quarantine(b"a", 0.0)
    known.quarantine(b"b", 1.0)
    known.quarantine(b"a", 50.0)
    assert known.retry_after_s(b"a", 51.0) == REJECTION_S - 1.0
    assert known.is_quarantined(b"a", 70.0)
    assert not known.is_quarantined(b"b", 70.0)
    known.clear(b"a")
    assert not known.is_quarantined(b"a", 70.0)
    known.clear(b"a")


def test_memory_is_bounded() -> None:
    known = PoisonRequestTracker()
    for number in range(MAX_QUARANTINED + 10):
        known.quarantine(b"%d" % number, 0.0)
    assert len(known) == MAX_QUARANTINED
    assert not known.is_quarantined(b"9", 0.0)
    assert known.is_quarantined(b"10", 0.0)
