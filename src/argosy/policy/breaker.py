"""When a replica is left alone: outcomes in three classes, a breaker, and how many may be out at once."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass


class AttemptOutcome(enum.Enum):
    """What an attempt says about the replica that it went to."""

    SUCCESS = "success"
    """It answered: also with a refusal that is the request's own fault (4xx)."""
    BACKPRESSURE = "backpressure"
    """It is alive and full (429, 503): see `backpressure`; nothing is held against it."""
    FAILURE = "failure"
    """No connection, a stall, a cut stream, any other 5xx, what is neither answer nor refusal (a redirect). 401 and 402
    too: our own key for it is wrong, or our account there empty; and 424: TGI's engine failed."""


def classify_status(status: int) -> AttemptOutcome:
    """The outcome for an HTTP status."""
    if status in {429, 503}:
        return AttemptOutcome.BACKPRESSURE
    refused = 400 <= status < 500 and status not in {401, 402, 424}
    return AttemptOutcome.SUCCESS if refused or status in {200, 201} else AttemptOutcome.FAILURE


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When a breaker opens, and for how long."""

    consecutive_failures: int = 3
    """So many failures in a row open it."""
    failure_ratio: float = 0.5
    """So does this part of the last `sample` attempts, once there were that many."""
    sample_size: int = 20
    base_open_s: float = 2.0
    """How long it stays open the first time; each failed probe doubles that."""
    max_open_s: float = 10.0
    reset_after_s: float = 30.0
    """One that opens again within so long of having closed was not well between: the doubling goes on."""


class Breaker:
    """One replica's: closed, open, or half-open while one probe is out."""

    __slots__ = (
        "_closed_at",
        "_consecutive_failures",
        "_consecutive_openings",
        "_limits",
        "_probe_in_flight",
        "_recent_failures",
        "open_until",
    )

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        self._limits = limits or BreakerLimits()
        self._recent_failures: deque[bool] = deque(maxlen=self._limits.sample_size)
        self._consecutive_failures = 0
        self._consecutive_openings = 0
        """Times in a row that it opened without being well between."""
        self._closed_at = float("-inf")
        self._probe_in_flight = False
        self.open_until: float | None = None
        """None: closed."""

    @property
    def is_closed(self) -> bool:
        """Whether requests may go there as far as failures are concerned."""
        return self.open_until is None

    def is_probe_due(self, now: float) -> bool:
        """Whether it is time to try it; the caller that sends the probe says `probe_sent`."""
        return self.open_until is not None and now >= self.open_until and not self._probe_in_flight

    def on_probe_sent(self) -> None:
        """A probe is out: no second one until it has come back."""
        self._probe_in_flight = True

    def record_outcome(self, outcome: AttemptOutcome, now: float) -> None:
        """Take in how an attempt went."""
        if not self.is_closed:
            return  # attempts that began before it opened say nothing new
        failed = outcome is AttemptOutcome.FAILURE
        self._recent_failures.append(failed)
        self._consecutive_failures = self._consecutive_failures + 1 if failed else 0
        full = len(self._recent_failures) == self._limits.sample_size
        if self._consecutive_failures >= self._limits.consecutive_failures or (
            failed
            and full
            and sum(self._recent_failures) >= self._limits.failure_ratio * self._limits.sample_size
        ):
            if now - self._closed_at > self._limits.reset_after_s:
                self._consecutive_openings = 0
            self._open(now)

    def record_probe_outcome(self, outcome: AttemptOutcome, now: float) -> None:
        """Take in how the probe went: it alone says whether requests may go there again."""
        self._probe_in_flight = False
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
    """Names of the replicas that requests may go to: the closed ones, and never fewer than half.

    When most of a pool seems broken it is more often the network, or the judge, than all replicas: then
    those that are soonest to be tried again stay in use.
    """
    closed = [name for name, breaker in breakers.items() if breaker.is_closed]
    short = len(breakers) - len(breakers) // 2 - len(closed)
    if short <= 0:
        return closed
    opened = {n: b.open_until for n, b in breakers.items() if b.open_until is not None}
    return closed + sorted(opened, key=opened.__getitem__)[:short]
