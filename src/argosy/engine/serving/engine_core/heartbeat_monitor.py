"""Hang detection, memory bound and restart policy for the core process, as pure functions of time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from argosy.engine.serving.core_messages import Heartbeat

MAX_MISSED_HEARTBEATS = 10
"""A core that misses this many consecutive heartbeats is considered stopped."""
MemoryAction = Literal["drop_caches", "end_requests", "recycle"]
MEMORY_ACTIONS: dict[int, MemoryAction] = {1: "drop_caches", 3: "end_requests", 5: "recycle"}
"""Action by number of consecutive heartbeats above the memory bound. Each action has two heartbeats to take effect."""
MAX_LOAD_FRACTION = 0.1
"""Largest fraction of the time that a core which is recycled again and again may spend on loading."""
STARVED_FREE_RATIO = 0.1
"""Share of idle CPUs below which the machine may have starved a core."""
MIN_STARVED_SHARE = 0.1
"""Share of the time that counts as stalled at least, so that a core that hangs on a busy machine is found too."""
LOAD_PROGRESS_TIMEOUT_S = 600.0
"""A loading core that reports no progress for this long is considered hung."""


@dataclass(frozen=True, slots=True)
class CoreRestartPolicy:
    """Number and delay of restarts of a core that fails. Times are in seconds."""

    max_restarts: int = 5
    """Consecutive restarts allowed for cores that finished no request and were never healthy."""
    backoff_s: float = 0.25
    """Wait before the first restart. Doubled for each consecutive restart."""
    max_backoff_s: float = 15.0
    healthy_s: float = 30.0
    """A core that served this long resets the count of consecutive restarts."""

    def next_backoff_s(self, restarts: int) -> float | None:
        """Return the wait after `restarts` consecutive restarts, or None if the limit is reached."""
        if restarts >= self.max_restarts:
            return None
        return float(min(self.backoff_s * 2**restarts, self.max_backoff_s))


@dataclass(slots=True)
class HeartbeatMonitor:
    """Watches one core process: distinguishes loading, computing and hanging by its heartbeats."""

    stall_timeout_s: float
    """A ready core that is busy and completes no step for this long is considered hung. On a machine without idle CPUs,
    a second counts as the CPU time that the core got in it."""
    heartbeat_interval_s: float
    started_at: float
    """Start time in seconds, on the clock of every `now` below."""
    is_serving: bool = field(default=False, init=False)
    """Whether loading is complete."""
    _memory_bound_bytes: int = field(default=0, init=False)
    _min_recycled_at: float = field(default=0.0, init=False)
    _beats_above_bound: int = field(default=0, init=False)
    _last_step: int = field(default=-1, init=False)
    _last_progress_at: float = field(default=0.0, init=False)
    _stalled_s: float = field(default=0.0, init=False)
    _last_heartbeat_at: float = field(default=0.0, init=False)
    _last_check_at: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._reset_clocks(self.started_at)

    def record_load_progress(self, now: float) -> None:
        """Record progress of loading."""
        self._last_progress_at = now

    def record_ready(self, now: float, load_s: float = 0.0, memory_bound_bytes: int = 0) -> None:
        """Record that loading is complete. Heartbeats and steps are expected from then on."""
        self.is_serving = True
        self._memory_bound_bytes = memory_bound_bytes
        self._min_recycled_at = now + load_s / MAX_LOAD_FRACTION
        self._reset_clocks(now)

    def record_heartbeat(self, heartbeat: Heartbeat, now: float) -> MemoryAction | None:
        """Record a heartbeat. Return what to do about the core's memory, if anything."""
        usage, elapsed_s = heartbeat.usage, now - self._last_heartbeat_at
        self._last_heartbeat_at = now
        if not heartbeat.busy or heartbeat.step != self._last_step:
            self._last_step, self._stalled_s = heartbeat.step, 0.0
        elif usage.host_free_cpus < STARVED_FREE_RATIO * usage.host_cpus:
            self._stalled_s += elapsed_s * min(1.0, max(MIN_STARVED_SHARE, usage.cpus))
        else:
            self._stalled_s += elapsed_s
        if not 0 < self._memory_bound_bytes < heartbeat.usage.memory_bytes:
            self._beats_above_bound = 0
            return None
        self._beats_above_bound += 1
        action = MEMORY_ACTIONS.get(self._beats_above_bound)
        if action != "recycle":
            return action
        self._beats_above_bound = 0
        return action if now >= self._min_recycled_at else None

    def check(self, now: float) -> str | None:
        """Return why the core must be killed, or None. Call it once per heartbeat interval."""
        was_suspended = (
            now - self._last_check_at > MAX_MISSED_HEARTBEATS * self.heartbeat_interval_s / 2
        )
        self._last_check_at = now
        if was_suspended:  # this process was suspended or starved, so the core cannot be judged
            self._reset_clocks(now)
            return None
        if not self.is_serving:
            is_stuck = now - self._last_progress_at >= LOAD_PROGRESS_TIMEOUT_S
            return f"no progress in loading for {LOAD_PROGRESS_TIMEOUT_S:g} s" if is_stuck else None
        if now - self._last_heartbeat_at >= MAX_MISSED_HEARTBEATS * self.heartbeat_interval_s:
            return f"no heartbeat for {MAX_MISSED_HEARTBEATS * self.heartbeat_interval_s:g} s"
        if self._stalled_s >= self.stall_timeout_s:
            return f"busy without a step for {self.stall_timeout_s:g} s"
        return None

    def _reset_clocks(self, now: float) -> None:
        self._last_progress_at = self._last_heartbeat_at = self._last_check_at = now
        self._stalled_s = 0.0
