"""When a replica is left alone: outcomes in three classes, a breaker, and how many may be out at once."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass


class Outcome(enum.Enum):
    """What an attempt says about the replica that it went to."""

    SUCCESS = "success"
    """It answered: also with a refusal that is the request's own fault (4xx)."""
    BACKPRESSURE = "backpressure"
    """It is alive and full (429, 503): see `backpressure`; nothing is held against it."""
    FAILURE = "failure"
    """No connection, a stall, a cut stream, any other 5xx, what is neither answer nor refusal (a redirect). 401 and 402
    too: our own key for it is wrong, or our account there empty; and 424: TGI's engine failed."""


def classify(status: int) -> Outcome:
    """The outcome for an HTTP status."""
    if status in {429, 503}:
        return Outcome.BACKPRESSURE
    refused = 400 <= status < 500 and status not in {401, 402, 424}
    return Outcome.SUCCESS if refused or status in {200, 201} else Outcome.FAILURE


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When a breaker opens, and for how long."""

    consecutive: int = 3
    """So many failures in a row open it."""
    share: float = 0.5
    """So does this part of the last `sample` attempts, once there were that many."""
    sample: int = 20
    open_s: float = 2.0
    """How long it stays open the first time; each failed probe doubles that."""
    open_most_s: float = 10.0
    well_s: float = 30.0
    """One that opens again within so long of having closed was not well between: the doubling goes on."""


class Breaker:
    """One replica's: closed, open, or half-open while one probe is out."""

    __slots__ = (
        "_closed_at",
        "_limits",
        "_opened",
        "_probing",
        "_recent",
        "_row",
        "open_until",
    )

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        self._limits = limits or BreakerLimits()
        self._recent: deque[bool] = deque(maxlen=self._limits.sample)
        self._row = 0
        self._opened = 0
        """Times in a row that it opened without being well between."""
        self._closed_at = float("-inf")
        self._probing = False
        self.open_until: float | None = None
        """None: closed."""

    @property
    def closed(self) -> bool:
        """Whether requests may go there as far as failures are concerned."""
        return self.open_until is None

    def wants_probe(self, now: float) -> bool:
        """Whether it is time to try it; the caller that sends the probe says `probe_sent`."""
        return self.open_until is not None and now >= self.open_until and not self._probing

    def probe_sent(self) -> None:
        """A probe is out: no second one until it has come back."""
        self._probing = True

    def record(self, outcome: Outcome, now: float) -> None:
        """Take in how an attempt went."""
        if not self.closed:
            return  # attempts that began before it opened say nothing new
        failed = outcome is Outcome.FAILURE
        self._recent.append(failed)
        self._row = self._row + 1 if failed else 0
        full = len(self._recent) == self._limits.sample
        if self._row >= self._limits.consecutive or (
            failed and full and sum(self._recent) >= self._limits.share * self._limits.sample
        ):
            if now - self._closed_at > self._limits.well_s:
                self._opened = 0
            self._open(now)

    def probed(self, outcome: Outcome, now: float) -> None:
        """Take in how the probe went: it alone says whether requests may go there again."""
        self._probing = False
        if outcome is Outcome.FAILURE:
            self._open(now)
            return
        self._close(now)

    def _open(self, now: float) -> None:
        limits = self._limits
        self.open_until = now + min(limits.open_s * 2**self._opened, limits.open_most_s)
        self._opened = min(self._opened + 1, 30)

    def _close(self, now: float) -> None:
        self.open_until = None
        self._closed_at = now
        self._row = 0
        self._recent.clear()


def usable(breakers: Mapping[str, Breaker]) -> list[str]:
    """Names of the replicas that requests may go to: the closed ones, and never fewer than half.

    When most of a pool seems broken it is more often the network, or the judge, than all replicas: then
    those that are soonest to be tried again stay in use.
    """
    closed = [name for name, breaker in breakers.items() if breaker.closed]
    short = len(breakers) - len(breakers) // 2 - len(closed)
    if short <= 0:
        return closed
    opened = {n: b.open_until for n, b in breakers.items() if b.open_until is not None}
    return closed + sorted(opened, key=opened.__getitem__)[:short]
