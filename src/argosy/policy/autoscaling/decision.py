"""Output of the autoscaler: the replica count, how it was computed, and a sentence that explains it."""

from __future__ import annotations

import enum

import msgspec


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
