"""When a core counts as hung, and how often it is started again: pure decisions about time."""

from __future__ import annotations

from dataclasses import dataclass, field

from argosy.engine.serving.core_messages import Heartbeat

MAX_MISSED_HEARTBEATS = 10
"""A core that misses this many beats in a row is taken for stopped."""
LOAD_PROGRESS_TIMEOUT_S = 600.0
"""A core that loads and reports no progress for this long is taken for hung."""


@dataclass(frozen=True, slots=True)
class CoreRestartPolicy:
    """How often, and how soon, a core that dies is started again. Times are in seconds."""

    max_restarts: int = 5
    """Restarts in a row of cores that finished no request and had no healthy time."""
    backoff_s: float = 0.25
    """Wait before the first restart; doubled for each in a row."""
    max_backoff_s: float = 15.0
    healthy_s: float = 30.0
    """A core that served this long is forgiven what went before."""

    def next_backoff_s(self, restarts: int) -> float | None:
        """How long to wait after `restarts` restarts in a row; None when that was the last one."""
        if restarts >= self.max_restarts:
            return None
        return float(min(self.backoff_s * 2**restarts, self.max_backoff_s))


@dataclass(slots=True)
class HeartbeatMonitor:
    """Watches one life of a core: tells loading, thinking and hanging apart by its beats."""

    stall_timeout_s: float
    """A ready core that is busy and makes no step for this long is hung."""
    heartbeat_interval_s: float
    started_at: float
    """Seconds on the clock that every `now` below is read from."""
    is_serving: bool = field(default=False, init=False)
    """Whether loading is done."""
    _last_step: int = field(default=-1, init=False)
    _last_progress_at: float = field(default=0.0, init=False)
    _last_heartbeat_at: float = field(default=0.0, init=False)
    _last_check_at: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._reset_clocks(self.started_at)

    def record_load_progress(self, now: float) -> None:
        """Loading goes on."""
        self._last_progress_at = now

    def record_ready(self, now: float) -> None:
        """Loading is done: from now on beats and steps are expected."""
        self.is_serving = True
        self._reset_clocks(now)

    def record_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """A beat came."""
        self._last_heartbeat_at = now
        if not heartbeat.busy or heartbeat.step != self._last_step:
            self._last_step = heartbeat.step
            if self.is_serving:
                self._last_progress_at = now

    def check(self, now: float) -> str | None:
        """Why this core should be killed, or None. Expects to be asked about once a beat."""
        slept = now - self._last_check_at > MAX_MISSED_HEARTBEATS * self.heartbeat_interval_s / 2
        self._last_check_at = now
        if slept:  # it is we who were stopped, or starved: nothing can be said of the core
            self._reset_clocks(now)
            return None
        if not self.is_serving:
            silent = now - self._last_progress_at >= LOAD_PROGRESS_TIMEOUT_S
            return f"no progress in loading for {LOAD_PROGRESS_TIMEOUT_S:g} s" if silent else None
        if now - self._last_heartbeat_at >= MAX_MISSED_HEARTBEATS * self.heartbeat_interval_s:
            return f"no heartbeat for {MAX_MISSED_HEARTBEATS * self.heartbeat_interval_s:g} s"
        if now - self._last_progress_at >= self.stall_timeout_s:
            return f"busy without a step for {self.stall_timeout_s:g} s"
        return None

    def _reset_clocks(self, now: float) -> None:
        self._last_progress_at = self._last_heartbeat_at = self._last_check_at = now
