"""A declared fleet as the admin API shows it. Times are seconds since the epoch."""

from __future__ import annotations

from typing import Any

import msgspec

from argosy.policy.autoscaling import ScalingDecision
from argosy.policy.rollout import DigestVerdict, MetricVerdict, RolloutStep, Transition


class FleetReplicaView(msgspec.Struct, frozen=True, kw_only=True, tag_field="object"):
    """A replica as the controller knows it, also if no gateway routes to it."""

    replica: str
    pool: str
    phase: str
    reason: str
    """Why it is in this phase."""
    since: float
    """When the phase began."""
    generation: int
    """Version of the pool's settings that it runs."""
    launcher: str
    node: str
    zone: str
    running: int
    """Requests that it runs, by its latest report."""


class VersionView(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a pool during a rollout."""

    digest: str
    share: float
    """Part of the users that get it."""
    desired: int
    existing: int
    ready: int


class PoolRolloutView(msgspec.Struct, frozen=True, kw_only=True):
    """The rollout of a pool that runs, or the last one."""

    rollout: str
    """Id of the rollout."""
    strategy: str
    state: str
    state_since: float
    started_at: float
    summary: str
    """State, and what it waits for, in one sentence."""
    is_running: bool
    can_roll_back: bool
    """Whether `abort` is possible."""
    can_retry: bool
    """Whether the declared version was rolled back, so that `resume` lets it be tried again."""
    needs_promotion: bool
    """Whether the evidence suffices, and the plan waits for `promote`."""
    cause: str | None
    """Cause of a rollback."""
    stable: VersionView
    candidate: VersionView
    steps: tuple[RolloutStep, ...]
    """Steps of the plan. That of all users follows them."""
    step: int
    """Position among the steps; their number with all users."""
    result: str
    """Recommendation of the gate; empty without measurements."""
    result_reason: str
    regression: float
    """Mean e-value of a regression."""
    regression_threshold: float
    """E-value of a regression from which the candidate is rolled back."""
    equivalence_threshold: float
    """E-value of a metric from which it counts as no worse than its margin."""
    metrics: tuple[MetricVerdict, ...]
    check: str
    """Result of the pinned prompts."""
    check_reason: str
    error_budget: float | None
    """Remaining part of the error budget; None if it is not known."""
    pending_commands: tuple[str, ...]
    """Commands that no controller has followed yet, oldest first."""
    refusals: tuple[str, ...]
    """Commands that the controller refused last, and why."""
    rejected: tuple[DigestVerdict, ...]
    """Versions that were rolled back."""
    transitions: tuple[Transition, ...]


class FleetPoolView(msgspec.Struct, frozen=True, kw_only=True, tag_field="object"):
    """A declared pool in numbers, without spares unless the name says so."""

    pool: str
    model: str
    ready: int
    """Replicas that are ready, with spares."""
    desired: int
    """Replicas that there shall be, with spares."""
    existing: int
    """Replicas that exist, with spares."""
    spares: int
    minimum: int
    """Fewest replicas that the declaration allows to serve."""
    maximum: int | None
    declared: int | None
    """Number that the declaration or an operator set; None if the autoscaler decides."""
    autoscaling: str
    """Mode of the autoscaler: `off`, `advisory` or `on`."""
    decision: ScalingDecision | None
    """Last decision of the autoscaler."""
    rollout: PoolRolloutView | None


class FleetGatewaysView(msgspec.Struct, frozen=True, kw_only=True):
    """Gateways that the controller runs, in numbers."""

    ready: int
    desired: int
    existing: int


class FleetView(msgspec.Struct, frozen=True, kw_only=True, tag_field="object"):
    """The declared fleet of the gateway, as its controller recorded it."""

    fleet: str
    revision: int
    """Number of the revision in force."""
    is_as_declared: bool
    """Whether each pool has exactly its replicas, all are ready, and no rollout runs."""
    is_read_only: bool
    """Whether nothing can be changed, as in the fleet of `argosy serve`, whose command line declares it."""
    has_leader: bool
    """Whether a controller leads the fleet."""
    leader: str
    epoch: int
    """Number of controllers that have led."""
    lease_age_s: float | None
    """Seconds since the leader last renewed its lease; None before the first controller."""
    url: str
    """Address of the first gateway that the controller runs; empty without one."""
    gateways: FleetGatewaysView | None
    """None if the controller runs no gateways."""
    pools: list[FleetPoolView]
    replicas: list[FleetReplicaView]
    """Replicas and gateways that exist or shall exist."""


class FleetChangeView(msgspec.Struct, frozen=True, kw_only=True):
    """A difference between two declarations."""

    path: str
    """Path of the setting, with the names of list items: `pools[chat].options.max_seqs`."""
    action: str
    old: Any
    new: Any
    effect: str
    """Effect on what runs."""
    count: int
    """Number of replicas, or of gateways, that it concerns."""


class FleetPlanView(msgspec.Struct, frozen=True, kw_only=True):
    """Changes that a declaration would make, and what they would disturb."""

    revision: int
    """Number of the revision in force, with which it was compared."""
    changes: list[FleetChangeView]
    running_requests: int
    """Number of requests that run on replicas that would stop or be replaced."""
    cached_tokens: int
    """Number of tokens of prompts in the KV caches of these replicas."""
    lines: list[str]
    """The plan as `argosy plan` prints it."""


class FleetDeclarationView(msgspec.Struct, frozen=True, kw_only=True):
    """A declaration that was applied."""

    fleet: str
    revision: int
    declaration: str
    """The declaration in YAML, without the settings that have their defaults."""


class FleetRevisionView(msgspec.Struct, frozen=True, kw_only=True, tag_field="object"):
    """A declaration that was applied, and how it differs from the one before."""

    revision: int
    applied_at: float
    author: str
    reason: str
    rollback_of: int | None
    """Number of the revision whose declaration this one repeats."""
    changes: list[FleetChangeView]
    problem: str
    """Why the changes cannot be shown; empty if they can."""
