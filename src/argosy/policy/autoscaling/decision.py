"""Input and output of the autoscaler: what is known of one pool at one moment, and the replica count that follows."""

from __future__ import annotations

import enum
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
    """Number of replicas that the controller aims for. Those that are not ready, failing or asleep are starting, also
    while they wait for a machine."""
    ready_replicas: int
    """Number of replicas that serve."""
    failing_replicas: int = 0
    """Number of desired replicas that fail to start. They are no supply."""
    sleeping_replicas: int = 0
    """Number of desired replicas that sleep. They are supply, since waiting requests wake them up."""
    wake_s: float = 0.0
    """Time in which they wake up, as measured. 0 while none has woken up."""
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


class ScalingAction(enum.StrEnum):
    """Effect of a decision on the replica count."""

    SCALE_UP = "scale_up"
    SCALE_DOWN = "scale_down"
    HOLD = "hold"


class ScalingOwner(enum.StrEnum):
    """Owner of the replica count. There is one at a time."""

    AUTOSCALER = "autoscaler"
    OPERATOR = "operator"
    """An operator has set the count, and the autoscaler is paused."""
    DECLARATION = "declaration"
    """The autoscaler is advisory: it only records what it would do."""


class DemandBasis(enum.StrEnum):
    """Value that a decision takes for the demand."""

    MEAN = "mean of 120 s"
    BURST = "mean of 6 s"
    TREND = "forecast"


class ScalingArithmetic(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of one decision, with which it can be computed again by hand."""

    desired_replicas: int
    ready_replicas: int
    starting_replicas: int
    failing_replicas: int
    sleeping_replicas: int = 0
    minimum: int
    """Fewest replicas now: of the settings or the schedule."""
    maximum: int
    demand_tokens_per_s: float = 0.0
    demand_basis: DemandBasis = DemandBasis.MEAN
    spare_fraction: float = 0.0
    backlog_tokens: float = 0.0
    """Tokens of requests that have waited for more than a second."""
    drain_s: float = 0.0
    capacity_tokens_per_s: float | None = None
    needed_for_tokens: float = 0.0
    """Replicas before rounding."""
    needed_for_kv: float = 0.0
    """Replicas before rounding."""
    needed: int = 0
    """Replicas that have to work."""
    peak_tokens_per_s: float = 0.0
    """Highest 60-second mean within `peak_window_s`."""
    peak_kv_replicas: float = 0.0
    peak_window_s: float = 0.0
    trend_error: float | None = None
    """Mean error of the trend forecast on the recorded demand, as a share of that of the last value. It is used below
    `MAX_TREND_ERROR`; None before it has been scored often enough."""


class ScalingDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Decision about one pool at one moment."""

    at: float
    """Seconds since the epoch."""
    action: ScalingAction
    owner: ScalingOwner
    target: int
    """Number of replicas to aim for, without spares. During a rollout, it is the sum over both versions."""
    recommended: int
    """Number that the rules give. It differs from `target` if the autoscaler is paused or advisory."""
    spares: int
    """Number of further replicas to keep warm."""
    reason: str
    """Sentence that explains the decision."""
    arithmetic: ScalingArithmetic


def describe_need(arithmetic: ScalingArithmetic) -> str:
    """Return the computation of the need as a clause."""
    a = arithmetic
    if a.needed_for_kv > a.needed_for_tokens:
        return f"the KV caches in use need {a.needed_for_kv:.2f} replicas"
    if a.capacity_tokens_per_s is None:
        return "the capacity of a replica is not known yet"
    backlog = f" + {a.backlog_tokens:,.0f} tokens / {a.drain_s:g} s" if a.backlog_tokens else ""
    return (
        f"({1.0 + a.spare_fraction:g} x {a.demand_tokens_per_s:,.1f} tokens/s ({a.demand_basis}){backlog})"
        f" / {a.capacity_tokens_per_s:,.1f} tokens/s = {a.needed_for_tokens:.2f} replicas"
    )
