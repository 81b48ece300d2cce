"""When a replica is started, started again, ended because it hangs, or given up: decisions about time alone."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class SupervisionAction(enum.Enum):
    """What to do about a replica now."""

    NOTHING = "nothing"
    START = "start"
    KILL = "kill"
    GIVE_UP = "give up"
    """It will not be started any more, or not soon; said each time."""


@dataclass(frozen=True, slots=True)
class ProcessRun:
    """One life of a replica, as far as is known. Times are seconds on the clock that every `now` is read from."""

    started_at: float
    last_response_at: float | None = None
    """When it last answered; None: it does not yet."""
    ready_at: float | None = None
    """When it began to take requests."""
    exited_at: float | None = None
    start_error: str = ""
    """Why it could not start, in its own words."""


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """How patient to be. Times are in seconds."""

    hang_timeout_s: float = 10.0
    """A replica that has answered and then gives no answer for this long hangs."""
    start_timeout_s: float = 120.0
    """So does one that gives no first answer for this long."""
    max_failed_starts: int = 5
    """So many starts in a row that come to nothing, and it is given up."""
    give_up_retry_interval_s: float = 60.0
    """Then one that has served is tried once more after so long, again and again: what is in its way may pass."""
    healthy_after_s: float = 10.0
    """A life that was ready for this long ends the row of short ones."""
    base_backoff_s: float = 0.25
    """Wait after the second short life in a row (after the first there is none); doubled for each one more."""
    max_backoff_s: float = 5.0


class SupervisionPolicy:
    """One replica's, over all its lives."""

    __slots__ = (
        "_failed_starts",
        "_has_given_up",
        "_last_checked_at",
        "_last_exited",
        "_limits",
        "_resumed_at",
        "_short_runs",
        "_was_ever_ready",
    )

    def __init__(self, limits: RestartLimits | None = None) -> None:
        self._limits = limits or RestartLimits()
        self._last_exited: ProcessRun | None = None
        self._failed_starts = 0
        """Lives in a row that never became ready."""
        self._short_runs = 0
        """Lives in a row that were not ready for long."""
        self._was_ever_ready = False
        self._has_given_up = False
        self._last_checked_at: float | None = None
        self._resumed_at = float("-inf")

    @property
    def has_given_up(self) -> bool:
        """Whether it is not to be started, at least not soon."""
        return self._has_given_up

    def decide(self, run: ProcessRun | None, now: float) -> SupervisionAction:
        """What to do, its latest life being `life` (None: it had none). Expects to be asked about once a second."""
        self._detect_suspension(now)
        if run is None:
            return SupervisionAction.START
        if self._has_given_up:
            return self._decide_after_give_up(run, now)
        self._was_ever_ready = self._was_ever_ready or run.ready_at is not None
        if run.exited_at is None:
            return SupervisionAction.KILL if self._is_hung(run, now) else SupervisionAction.NOTHING
        if self._last_exited is None or run.started_at != self._last_exited.started_at:
            self._record_exit(run, run.exited_at)
        if self._has_given_up:
            return SupervisionAction.GIVE_UP
        return (
            SupervisionAction.START
            if now >= run.exited_at + self._backoff_s()
            else SupervisionAction.NOTHING
        )

    def _decide_after_give_up(self, life: ProcessRun, now: float) -> SupervisionAction:
        """What to do about one that was given up."""
        if (
            not self._was_ever_ready
            or life.exited_at is None
            or now < life.exited_at + self._limits.give_up_retry_interval_s
        ):
            return SupervisionAction.NOTHING
        self._has_given_up = False
        self._failed_starts = self._limits.max_failed_starts - 1
        return SupervisionAction.START

    def _detect_suspension(self, now: float) -> None:
        """When it is we who were stopped or starved, silence says nothing about the replica."""
        if (
            self._last_checked_at is not None
            and now - self._last_checked_at > self._limits.hang_timeout_s / 2
        ):
            self._resumed_at = now
        self._last_checked_at = now

    def _is_hung(self, life: ProcessRun, now: float) -> bool:
        if life.last_response_at is None:
            return now - max(life.started_at, self._resumed_at) > self._limits.start_timeout_s
        return now - max(life.last_response_at, self._resumed_at) > self._limits.hang_timeout_s

    def _record_exit(self, life: ProcessRun, ended_at: float) -> None:
        """Take in a death, once."""
        limits, self._last_exited = self._limits, life
        if life.ready_at is None:
            self._failed_starts += 1
        else:
            self._failed_starts = 0
        healthy = life.ready_at is not None and ended_at - life.ready_at >= limits.healthy_after_s
        self._short_runs = 0 if healthy else self._short_runs + 1
        hopeless = bool(life.start_error) and not self._was_ever_ready
        self._has_given_up = hopeless or self._failed_starts >= limits.max_failed_starts

    def _backoff_s(self) -> float:
        if self._short_runs < 2:
            return 0.0
        return min(
            self._limits.base_backoff_s * 2.0 ** min(self._short_runs - 2, 30),
            self._limits.max_backoff_s,
        )
