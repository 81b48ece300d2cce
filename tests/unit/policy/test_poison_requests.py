"""Quarantine of requests that crashed replicas: rejected for a moment, remembered for a minute, bounded in number."""

from __future__ import annotations

from argosy.policy import PoisonRequestTracker
from argosy.policy.retries import MAX_QUARANTINED, QUARANTINE_S, REJECTION_S


def test_quarantined_request_is_rejected_then_retried_then_forgotten() -> None:
    tracker = PoisonRequestTracker()
    assert tracker.retry_after_s(b"a", 0.0) == 0.0
    tracker.quarantine(b"a", 10.0)
    assert tracker.retry_after_s(b"a", 10.0) == REJECTION_S
    assert tracker.retry_after_s(b"b", 10.0) == 0.0
    assert tracker.retry_after_s(b"a", 10.0 + REJECTION_S) == 0.0
    assert tracker.is_quarantined(b"a", 9.9 + QUARANTINE_S)
    assert not tracker.is_quarantined(b"a", 10.0 + QUARANTINE_S)
    assert not len(tracker)


def test_second_crash_renews_quarantine_and_success_clears_it() -> None:
    tracker = PoisonRequestTracker()
    tracker.quarantine(b"a", 0.0)
    tracker.quarantine(b"b", 1.0)
    tracker.quarantine(b"a", 50.0)
    assert tracker.retry_after_s(b"a", 51.0) == REJECTION_S - 1.0
    assert tracker.is_quarantined(b"a", 70.0)
    assert not tracker.is_quarantined(b"b", 70.0)
    tracker.clear(b"a")
    assert not tracker.is_quarantined(b"a", 70.0)
    tracker.clear(b"a")


def test_oldest_quarantined_request_is_dropped_at_capacity() -> None:
    tracker = PoisonRequestTracker()
    for number in range(MAX_QUARANTINED + 10):
        tracker.quarantine(b"%d" % number, 0.0)
    assert len(tracker) == MAX_QUARANTINED
    assert not tracker.is_quarantined(b"9", 0.0)
    assert tracker.is_quarantined(b"10", 0.0)
