"""Policy that decides when a replica process is started, restarted, killed because it hangs, or given up."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass

_CRASH_SIGNALS = frozenset({"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS"})
"""Signals by which faulty code ends its own process."""


class SupervisionAction(enum.Enum):
    """Action that the supervisor takes on a replica process."""

    NOTHING = "nothing"
    START = "start"
    KILL = "kill"
    GIVE_UP = "give up"
    """Stop restarting the process, for good or until `give_up_retry_interval_s` has passed.

    The policy returns this action once for each time that it gives up.
    """


@dataclass(frozen=True, slots=True)
class ProcessRun:
    """State of one run of a replica process. Times are seconds on the clock of `now`."""

    started_at: float
    last_response_at: float | None = None
    """Time of the last response; None before the first."""
    ready_at: float | None = None
    """Time from which the replica accepts requests."""
    exited_at: float | None = None
    start_error: str = ""
    """Error message of a process that could not start."""
    exit_status: int | None = None
    """Exit status, or the negative number of the signal that ended the process."""
    ran_out_of_memory: bool = False
    """Whether the system killed a process for lack of memory while this one ended."""

    @property
    def exit_reason(self) -> str:
        """Why the process exited, as far as its status shows."""
        status = self.exit_status
        if self.start_error:
            return f"it could not start: {self.start_error}"
        if status is None:
            return "it exited"
        if status >= 0:
            return f"it exited with status {status}"
        if -status == signal.SIGKILL:
            if self.ran_out_of_memory:
                return "the system killed it because memory ran out"
            return "it was killed (SIGKILL), by a person or because memory ran out"
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"it crashed with {name}" if name in _CRASH_SIGNALS else f"it was killed ({name})"


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """Timeouts and limits of the supervision policy. Times are in seconds."""

    hang_timeout_s: float = 10.0
    """Silence after a response from which a replica counts as hung."""
    start_timeout_s: float = 120.0
    """Silence after the start from which a replica counts as hung."""
    step_timeout_s: float = 60.0
    """Time without a step of an engine that has requests, from which a replica counts as hung."""
    max_failed_starts: int = 5
    """Consecutive failed starts after which the replica is given up."""
    give_up_retry_interval_s: float = 60.0
    """Interval at which a given-up replica that was once ready is started again, since the cause may pass."""
    healthy_after_s: float = 10.0
    """Time ready after which a run counts as healthy and ends the series of short runs."""
    base_backoff_s: float = 0.25
    """Wait after the second consecutive short run, doubled for each further one; there is none after the first."""
    max_backoff_s: float = 5.0


class SupervisionPolicy:
    """Supervision state of one replica over all runs of its process."""

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
        """Consecutive runs that never became ready."""
        self._short_runs = 0
        """Consecutive runs that were not ready for `healthy_after_s`."""
        self._was_ever_ready = False
        self._has_given_up = False
        self._last_checked_at: float | None = None
        self._resumed_at = float("-inf")

    @property
    def has_given_up(self) -> bool:
        """Whether the process is not restarted, at least not soon."""
        return self._has_given_up

    def decide(self, run: ProcessRun | None, now: float) -> SupervisionAction:
        """Decide what to do; call it about once per second.

        Args:
            run: Latest run of the process; None before the first.
            now: Seconds on a monotonic clock.
        """
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

    def _decide_after_give_up(self, run: ProcessRun, now: float) -> SupervisionAction:
        if (
            not self._was_ever_ready
            or run.exited_at is None
            or now < run.exited_at + self._limits.give_up_retry_interval_s
        ):
            return SupervisionAction.NOTHING
        self._has_given_up = False
        self._failed_starts = self._limits.max_failed_starts - 1
        return SupervisionAction.START

    def _detect_suspension(self, now: float) -> None:
        """Restart the hang timeouts if the supervisor itself was stopped or starved since the last check.

        After such a gap, silence is no evidence against the replica.
        """
        if (
            self._last_checked_at is not None
            and now - self._last_checked_at > self._limits.hang_timeout_s / 2
        ):
            self._resumed_at = now
        self._last_checked_at = now

    def hang_timeout_s(self, run: ProcessRun) -> float:
        """Return the silence from which a run counts as hung."""
        has_responded = run.last_response_at is not None
        return self._limits.hang_timeout_s if has_responded else self._limits.start_timeout_s

    def _is_hung(self, run: ProcessRun, now: float) -> bool:
        last_sign_at = run.started_at if run.last_response_at is None else run.last_response_at
        return now - max(last_sign_at, self._resumed_at) > self.hang_timeout_s(run)

    def _record_exit(self, run: ProcessRun, exited_at: float) -> None:
        """Count the exit of a run; call it once per run."""
        limits, self._last_exited = self._limits, run
        if run.ready_at is None:
            self._failed_starts += 1
        else:
            self._failed_starts = 0
        healthy = run.ready_at is not None and exited_at - run.ready_at >= limits.healthy_after_s
        self._short_runs = 0 if healthy else self._short_runs + 1
        cannot_start = bool(run.start_error) and not self._was_ever_ready
        self._has_given_up = cannot_start or self._failed_starts >= limits.max_failed_starts

    def _backoff_s(self) -> float:
        if self._short_runs < 2:
            return 0.0
        return min(
            self._limits.base_backoff_s * 2.0 ** min(self._short_runs - 2, 30),
            self._limits.max_backoff_s,
        )
