"""Input of the autoscaler: what is known of one pool at one moment."""

from __future__ import annotations

import math

import msgspec


class ArrivedTokens(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of the requests that arrived during an interval, whether they were admitted or not."""

    tokens: float
    """In the unit of the capacity, for example by `weighted_tokens`."""
    duration_s: float


class ManualScale(msgspec.Struct, frozen=True, kw_only=True):
    """A replica count that an operator has set. The autoscaler is paused until it is removed."""

    replicas: int
    set_by: str
    """Name of the operator."""


class PoolObservation(msgspec.Struct, frozen=True, kw_only=True):
    """Demand and supply of one pool. Replica counts exclude spares."""

    at: float
    """Seconds since the epoch."""
    desired_replicas: int
    """Number of replicas that the controller aims for. Those that are neither ready nor failing are starting, also
    while they wait for a machine."""
    ready_replicas: int
    """Number of replicas that serve."""
    failing_replicas: int = 0
    """Number of desired replicas that fail to start. They are no supply."""
    arrivals: tuple[ArrivedTokens, ...] = ()
    """Arrivals since the previous observation, oldest first. Several short intervals show a burst sooner than one."""
    queued_requests: int = 0
    """Number of requests that wait in the gateways."""
    queued_tokens: float = 0.0
    """Tokens of the requests that wait in the gateways."""
    queue_age_s: float = 0.0
    """How long the oldest of them has waited."""
    running_requests: int = 0
    kv_used_replicas: float = 0.0
    """KV cache in use, as the number of replicas whose whole cache it would fill."""
    capacity_tokens_per_s: float | None = None
    """Tokens per second that a replica serves within the objectives; None while unknown. See `CapacityEstimator`."""
    startup_s: float
    """Expected time from the start of a replica until it serves."""
    metrics_age_s: float | None = None
    """Age of the oldest report that the other fields depend on; None if a gateway or replica has not reported yet."""
    rollout_in_progress: bool = False
    """Whether a rollout divides the replicas between two versions."""
    manual_scale: ManualScale | None = None

    def find_defect(self, stale_after_s: float) -> str | None:
        """Return why no decision may rest on the metrics, as a clause; None if nothing is wrong."""
        if self.metrics_age_s is None:
            return "metrics are missing"
        if not self.metrics_age_s <= stale_after_s:
            return f"metrics are {self.metrics_age_s:.0f} s old"
        numbers = [
            self.queued_tokens,
            self.queue_age_s,
            self.kv_used_replicas,
            self.startup_s,
            0.0 if self.capacity_tokens_per_s is None else self.capacity_tokens_per_s,
        ]
        for arrival in self.arrivals:
            numbers += (arrival.tokens, arrival.duration_s)
        if not all(math.isfinite(number) and number >= 0.0 for number in numbers):
            return "a metric is negative or not a number"
        return None
