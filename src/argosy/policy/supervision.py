"""When a replica is started, started again, ended because it hangs, or given up: decisions about time alone."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Action(enum.Enum):
    """What to do about a replica now."""

    NOTHING = "nothing"
    START = "start"
    KILL = "kill"
    GIVE_UP = "give up"
    """It will not be started any more, or not soon; said each time."""


@dataclass(frozen=True, slots=True)
class Life:
    """One life of a replica, as far as is known. Times are seconds on the clock that every `now` is read from."""

    began: float
    heard_at: float | None = None
    """When it last answered; None: it does not yet."""
    ready_at: float | None = None
    """When it began to take requests."""
    ended_at: float | None = None
    refusal: str = ""
    """Why it could not start, in its own words."""


@dataclass(frozen=True, slots=True)
class CustodyLimits:
    """How patient to be. Times are in seconds."""

    stall_s: float = 10.0
    """A replica that has answered and then gives no answer for this long hangs."""
    start_s: float = 120.0
    """So does one that gives no first answer for this long."""
    failed_starts: int = 5
    """So many starts in a row that come to nothing, and it is given up."""
    rest_s: float = 60.0
    """Then one that has served is tried once more after so long, again and again: what is in its way may pass."""
    healthy_s: float = 10.0
    """A life that was ready for this long ends the row of short ones."""
    backoff_s: float = 0.25
    """Wait after the second short life in a row (after the first there is none); doubled for each one more."""
    backoff_most_s: float = 5.0


class Custody:
    """One replica's, over all its lives."""

    __slots__ = (
        "_buried",
        "_failed",
        "_given_up",
        "_limits",
        "_looked",
        "_served",
        "_short",
        "_woke",
    )

    def __init__(self, limits: CustodyLimits | None = None) -> None:
        self._limits = limits or CustodyLimits()
        self._buried: Life | None = None
        self._failed = 0
        """Lives in a row that never became ready."""
        self._short = 0
        """Lives in a row that were not ready for long."""
        self._served = False
        self._given_up = False
        self._looked: float | None = None
        self._woke = float("-inf")

    @property
    def given_up(self) -> bool:
        """Whether it is not to be started, at least not soon."""
        return self._given_up

    def decide(self, life: Life | None, now: float) -> Action:
        """What to do, its latest life being `life` (None: it had none). Expects to be asked about once a second."""
        self._notice_sleep(now)
        if life is None:
            return Action.START
        if self._given_up:
            return self._once_more(life, now)
        self._served = self._served or life.ready_at is not None
        if life.ended_at is None:
            return Action.KILL if self._hangs(life, now) else Action.NOTHING
        if self._buried is None or life.began != self._buried.began:
            self._bury(life, life.ended_at)
        if self._given_up:
            return Action.GIVE_UP
        return Action.START if now >= life.ended_at + self._wait_s() else Action.NOTHING

    def _once_more(self, life: Life, now: float) -> Action:
        """What to do about one that was given up."""
        if not self._served or life.ended_at is None or now < life.ended_at + self._limits.rest_s:
            return Action.NOTHING
        self._given_up = False
        self._failed = self._limits.failed_starts - 1
        return Action.START

    def _notice_sleep(self, now: float) -> None:
        """When it is we who were stopped or starved, silence says nothing about the replica."""
        if self._looked is not None and now - self._looked > self._limits.stall_s / 2:
            self._woke = now
        self._looked = now

    def _hangs(self, life: Life, now: float) -> bool:
        if life.heard_at is None:
            return now - max(life.began, self._woke) > self._limits.start_s
        return now - max(life.heard_at, self._woke) > self._limits.stall_s

    def _bury(self, life: Life, ended_at: float) -> None:
        """Take in a death, once."""
        limits, self._buried = self._limits, life
        if life.ready_at is None:
            self._failed += 1
        else:
            self._failed = 0
        healthy = life.ready_at is not None and ended_at - life.ready_at >= limits.healthy_s
        self._short = 0 if healthy else self._short + 1
        hopeless = bool(life.refusal) and not self._served
        self._given_up = hopeless or self._failed >= limits.failed_starts

    def _wait_s(self) -> float:
        if self._short < 2:
            return 0.0
        return min(
            self._limits.backoff_s * 2.0 ** min(self._short - 2, 30), self._limits.backoff_most_s
        )
