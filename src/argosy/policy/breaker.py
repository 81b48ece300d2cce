"""Circuit breaker of a replica, and the limit on how many replicas of a pool may be ejected at a time."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass


class AttemptOutcome(enum.Enum):
    """Class of an attempt's result, by what it implies about the replica."""

    SUCCESS = "success"
    """The replica responded, possibly with a rejection that the request caused (4xx)."""
    BACKPRESSURE = "backpressure"
    """The replica is healthy and full (429, 503); see `Backpressure`. The breaker does not count this as a failure."""
    FAILURE = "failure"
    """Connection error, stall, truncated stream, other 5xx, or a status that is neither success nor error (redirect).

    Status 401, 402 and 407 count too, because the gateway's own key for the replica or for a proxy is wrong, or its
    account is empty.
    Status 424 counts because TGI answers it when its engine failed.
    """


def classify_status(status: int) -> AttemptOutcome:
    """Return the outcome for an HTTP status."""
    if status in {429, 503}:
        return AttemptOutcome.BACKPRESSURE
    client_error = 400 <= status < 500 and status not in {401, 402, 407, 424}
    return (
        AttemptOutcome.SUCCESS if client_error or status in {200, 201} else AttemptOutcome.FAILURE
    )


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """Thresholds that open a breaker, and the times for which it stays open."""

    consecutive_failures: int = 3
    """Consecutive failures that open the breaker."""
    failure_ratio: float = 0.5
    """Failed fraction of the last `sample_size` attempts that opens the breaker; needs that many attempts."""
    sample_size: int = 20
    base_open_s: float = 2.0
    """Seconds for which the breaker stays open the first time, doubled by each failed probe."""
    max_open_s: float = 10.0
    reset_after_s: float = 30.0
    """Seconds closed after which the open time starts again at `base_open_s` instead of doubling."""


class Breaker:
    """Circuit breaker of one replica. Once its open time has passed, the outcome of a probe closes it or reopens it."""

    __slots__ = (
        "_closed_at",
        "_consecutive_failures",
        "_consecutive_openings",
        "_limits",
        "_recent_failures",
        "open_until",
    )

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        self._limits = limits or BreakerLimits()
        self._recent_failures: deque[bool] = deque(maxlen=self._limits.sample_size)
        self._consecutive_failures = 0
        self._consecutive_openings = 0
        """Openings without `reset_after_s` closed seconds in between."""
        self._closed_at = float("-inf")
        self.open_until: float | None = None
        """Time until which the breaker is open; None while it is closed."""

    @property
    def is_closed(self) -> bool:
        """Whether the breaker permits requests."""
        return self.open_until is None

    def is_probe_due(self, now: float) -> bool:
        """Return whether the open time has passed, so that the outcome of a probe decides."""
        return self.open_until is not None and now >= self.open_until

    def record_outcome(self, outcome: AttemptOutcome, now: float) -> None:
        """Record the outcome of an attempt; ignored while the breaker is open."""
        if not self.is_closed:
            return  # the attempt began before the breaker opened, so its outcome is no news
        failed = outcome is AttemptOutcome.FAILURE
        self._recent_failures.append(failed)
        if not failed:
            self._consecutive_failures = 0
            return
        self._consecutive_failures += 1
        sample_full = len(self._recent_failures) == self._limits.sample_size
        if self._consecutive_failures >= self._limits.consecutive_failures or (
            sample_full
            and sum(self._recent_failures) >= self._limits.failure_ratio * self._limits.sample_size
        ):
            if now - self._closed_at > self._limits.reset_after_s:
                self._consecutive_openings = 0
            self._open(now)

    def record_probe_outcome(self, outcome: AttemptOutcome, now: float) -> None:
        """Record the outcome of a probe, which alone can close an open breaker."""
        if outcome is AttemptOutcome.FAILURE:
            self._open(now)
            return
        self._close(now)

    def _open(self, now: float) -> None:
        limits = self._limits
        self.open_until = now + min(
            limits.base_open_s * 2**self._consecutive_openings, limits.max_open_s
        )
        self._consecutive_openings = min(self._consecutive_openings + 1, 30)

    def _close(self, now: float) -> None:
        self.open_until = None
        self._closed_at = now
        self._consecutive_failures = 0
        self._recent_failures.clear()


def eligible_replicas(breakers: Mapping[str, Breaker]) -> list[str]:
    """Return the names of the replicas with a closed breaker, and never fewer than half of the pool.

    When most of a pool seems to fail, the fault is more often in the network or the gateway than in all replicas.
    In that case the replicas whose breakers end their open time first stay eligible.
    """
    closed = [name for name, breaker in breakers.items() if breaker.is_closed]
    missing = len(breakers) - len(breakers) // 2 - len(closed)
    if missing <= 0:
        return closed
    open_until = {
        name: breaker.open_until
        for name, breaker in breakers.items()
        if breaker.open_until is not None
    }
    return closed + sorted(open_until, key=open_until.__getitem__)[:missing]
