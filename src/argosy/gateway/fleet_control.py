"""Interface to the declared fleet of a gateway, which the control plane implements.

A gateway imports nothing of the control plane, which is a layer above it. Times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from argosy.policy.autoscaling import ScalingDecision
from argosy.policy.rollout import CommandKind, DigestVerdict, MetricVerdict, RolloutStep, Transition
from argosy.store import FleetStore


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


class FleetControl(Protocol):
    """A declared fleet. Every call may block on the store."""

    @property
    def name(self) -> str:
        """Name of the fleet."""

    @property
    def store(self) -> FleetStore:
        """Store of the fleet, with the events of its controllers."""

    def read_fleet(self) -> FleetView:
        """Return the fleet as its controller recorded it.

        Raises:
            NotFoundError: The fleet was never applied.
            ValueError: A record is of another version of Argosy.
        """

    def list_revisions(self, limit: int, before: int | None) -> list[FleetRevisionView]:
        """Return revisions with their changes, newest first.

        Args:
            limit: Maximum number of revisions.
            before: Only revisions with lower numbers.
        """

    def read_declaration(self, revision: int | None) -> FleetDeclarationView:
        """Return the declaration of a revision, or the one in force.

        Raises:
            NotFoundError: There is no such revision.
            ValueError: The declaration is invalid for this version.
        """

    def plan_change(self, declaration: str) -> FleetPlanView:
        """Return what applying a declaration would change.

        Args:
            declaration: The declaration in YAML or JSON.

        Raises:
            NotFoundError: The fleet was never applied.
            ValueError: The declaration is invalid, or changes what only the command line may change.
        """

    def apply_change(self, declaration: str, after: int, reason: str, actor: str) -> int:
        """Put a declaration in force, and return the number of the new revision.

        Args:
            declaration: The declaration in YAML or JSON.
            after: Number of the revision that the operator has seen as the latest.
            reason: Why.
            actor: Who.

        Raises:
            NotFoundError: The fleet was never applied.
            ConflictError: The latest revision is not `after`, or nothing would change.
            ValueError: The declaration is invalid, or changes what only the command line may change.
        """

    def plan_rollback(self, revision: int) -> FleetPlanView:
        """Return what putting the declaration of an earlier revision in force again would change.

        Raises:
            NotFoundError: There is no such revision.
            ValueError: Its declaration is invalid for this version.
        """

    def roll_back(self, revision: int, after: int | None, reason: str, actor: str) -> int:
        """Put the declaration of an earlier revision in force again, and return the number of the new revision.

        Args:
            revision: Number of the earlier revision.
            after: Number of the revision that the operator has seen as the latest; None to replace any.
            reason: Why.
            actor: Who.

        Raises:
            NotFoundError: There is no such revision.
            ConflictError: The latest revision is not `after`, or nothing would change.
            ValueError: Its declaration is invalid for this version.
        """

    def scale(self, pool: str, replicas: int | None, reason: str, actor: str) -> int:
        """Change the number of replicas of a pool, and return the number of the revision in force.

        Args:
            pool: Name of the pool.
            replicas: The number; None to let the autoscaler decide again.
            reason: Why.
            actor: Who.

        Raises:
            ConflictError: Another revision was applied meanwhile.
            ValueError: There is no such pool, its limits do not allow the number, or it has no autoscaler.
        """

    def command_rollout(
        self, pool: str, kind: CommandKind, *, rollout: str, reason: str, force: bool, actor: str
    ) -> None:
        """Store a command for the controller. `abort` also routes all users to the stable version at once.

        Args:
            pool: Name of the pool.
            kind: The command.
            rollout: Id of the rollout that the operator has seen.
            reason: Why.
            force: Whether to go on without evidence, or with a spent error budget.
            actor: Who.

        Raises:
            NotFoundError: The pool has had no rollout.
            ConflictError: The rollout has ended, another one runs, or it cannot be rolled back any more.
            ValueError: The command is forced without a reason.
        """


OpenFleetControl = Callable[[str, FleetStore], FleetControl]
"""Returns the control of a fleet by its name and its store."""
