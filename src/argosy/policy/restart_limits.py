"""Timeouts of replicas, and limits of their restarts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """When replicas count as hung, and when those that exit are started again. Times are in seconds."""

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
