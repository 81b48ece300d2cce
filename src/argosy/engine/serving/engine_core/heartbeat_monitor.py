"""When a core counts as hung, and how often it is started again: pure decisions about time."""

from __future__ import annotations

from dataclasses import dataclass, field

from argosy.engine.serving.core_messages import Beat

MISSED_BEATS = 10
"""A core that misses this many beats in a row is taken for stopped."""
LOADING_SILENCE_S = 600.0
"""A core that loads and reports no progress for this long is taken for hung."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often, and how soon, a core that dies is started again. Times are in seconds."""

    limit: int = 5
    """Restarts in a row of cores that finished no request and had no healthy time."""
    backoff_s: float = 0.25
    """Wait before the first restart; doubled for each in a row."""
    longest_s: float = 15.0
    healthy_s: float = 30.0
    """A core that served this long is forgiven what went before."""

    def wait_s(self, restarts: int) -> float | None:
        """How long to wait after `restarts` restarts in a row; None when that was the last one."""
        if restarts >= self.limit:
            return None
        return float(min(self.backoff_s * 2**restarts, self.longest_s))


@dataclass(slots=True)
class Vigil:
    """Watches one life of a core: tells loading, thinking and hanging apart by its beats."""

    stall_s: float
    """A ready core that is busy and makes no step for this long is hung."""
    beat_s: float
    started: float
    """Seconds on the clock that every `now` below is read from."""
    serving: bool = field(default=False, init=False)
    """Whether loading is done."""
    _step: int = field(default=-1, init=False)
    _stepped: float = field(default=0.0, init=False)
    _heard: float = field(default=0.0, init=False)
    _looked: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._restart_clocks(self.started)

    def progress(self, now: float) -> None:
        """Loading goes on."""
        self._stepped = now

    def ready(self, now: float) -> None:
        """Loading is done: from now on beats and steps are expected."""
        self.serving = True
        self._restart_clocks(now)

    def beat(self, beat: Beat, now: float) -> None:
        """A beat came."""
        self._heard = now
        if not beat.busy or beat.step != self._step:
            self._step = beat.step
            if self.serving:
                self._stepped = now

    def verdict(self, now: float) -> str | None:
        """Why this core should be killed, or None. Expects to be asked about once a beat."""
        slept = now - self._looked > MISSED_BEATS * self.beat_s / 2
        self._looked = now
        if slept:  # it is we who were stopped, or starved: nothing can be said of the core
            self._restart_clocks(now)
            return None
        if not self.serving:
            silent = now - self._stepped >= LOADING_SILENCE_S
            return f"no progress in loading for {LOADING_SILENCE_S:g} s" if silent else None
        if now - self._heard >= MISSED_BEATS * self.beat_s:
            return f"no heartbeat for {MISSED_BEATS * self.beat_s:g} s"
        if now - self._stepped >= self.stall_s:
            return f"busy without a step for {self.stall_s:g} s"
        return None

    def _restart_clocks(self, now: float) -> None:
        self._stepped = self._heard = self._looked = now
