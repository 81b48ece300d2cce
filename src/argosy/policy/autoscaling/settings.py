"""Settings of the autoscaler of one pool."""

from __future__ import annotations

import msgspec

from argosy.policy.autoscaling.schedule import ScheduleWindow


class AutoscalerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits and rules of one pool. The defaults were chosen by simulation, see docs/explanation/autoscaling.md.

    Raises:
        ValueError: The limits contradict each other, or a number is out of its range.
    """

    min_replicas: int = 1
    """Fewest replicas. With 0 the pool is scaled to zero when it is idle."""
    max_replicas: int
    """Most replicas."""
    spares: int = 0
    """Number of further replicas that are warm but do not serve, for bursts shorter than a start. A pool that is scaled
    to zero has none."""
    schedule: tuple[ScheduleWindow, ...] = ()
    """Times at which the minimum is higher."""
    is_advisory: bool = False
    """Whether decisions are recorded only."""
    uses_trend: bool = False
    """Whether the trend forecast is used while it is better than the last value on the recorded demand."""
    spare_fraction: float = 0.15
    """Part of the demand that is provided in addition."""
    kv_limit: float = 0.8
    """Part of the KV caches that may be in use."""
    drain_s: float = 60.0
    """Time in which the requests in the queue are to be served."""
    max_down_fraction: float = 0.8
    """Load of the remaining replicas up to which one is removed."""
    down_window_s: float = 600.0
    """Time whose peak demand the remaining replicas have to hold; at least two start-up times."""
    down_interval_s: float = 30.0
    """Time between two removals."""
    idle_s: float = 600.0
    """Time without requests after which the pool is scaled to zero."""
    stale_after_s: float = 15.0
    """Age from which metrics are not used."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas:
            raise ValueError("min_replicas must be at least 0 and at most max_replicas")
        if self.max_replicas < 1:
            raise ValueError("max_replicas must be at least 1; remove the pool to run no replicas")
        if self.spares < 0:
            raise ValueError("spares must be 0 or more")
        for window in self.schedule:
            if window.min_replicas > self.max_replicas:
                raise ValueError(
                    f"A schedule needs {window.min_replicas} replicas; raise max_replicas to that"
                )
        for field in ("kv_limit", "max_down_fraction"):
            if not 0.0 < getattr(self, field) <= 1.0:
                raise ValueError(f"{field} must be above 0 and at most 1")
        if self.spare_fraction < 0.0:
            raise ValueError("spare_fraction must be 0 or more")
        for field in ("drain_s", "down_window_s", "down_interval_s", "idle_s", "stale_after_s"):
            if not getattr(self, field) > 0.0:
                raise ValueError(f"{field} must be above 0")
