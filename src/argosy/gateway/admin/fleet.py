"""Endpoints for the declared fleet that a gateway belongs to: pools, revisions, rollouts, scaling and events."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta

from argosy.deployment import (
    AppliedDeclaration,
    FleetPlan,
    FleetStatus,
    RevisionChanges,
    find_store_problem,
    list_revision_changes,
)
from argosy.gateway.admin.endpoints import AdminEndpoints, AdminRequest, AdminScope
from argosy.gateway.admin.replica_schemas import Reason
from argosy.gateway.admin.schemas import Page, build_page, split_names
from argosy.policy.rollout import CommandKind
from argosy.process import run_in_daemon_thread
from argosy.store import FleetEvent, Timestamp

POLL_INTERVAL_S = 0.5
MAX_DECLARATION_CHARACTERS = 256 * 1024
"""Size of a declaration. Larger ones belong in files, for the command line."""

Declaration = Annotated[str, Meta(min_length=1, max_length=MAX_DECLARATION_CHARACTERS)]
"""Declaration of a fleet in YAML or JSON."""

endpoints = AdminEndpoints()


class FleetEventsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the event log."""

    after: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Number of the last event that the caller has. 0 returns the latest events."""
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    replica: Annotated[str, Meta(max_length=200)] | None = None
    """Only events of this replica."""
    pool: Annotated[str, Meta(max_length=200)] | None = None
    """Only events of this pool."""
    kind: Annotated[str, Meta(max_length=1000)] = ""
    """Only events of these kinds, separated by commas, such as `scaling_decision`."""
    outcome: Annotated[str, Meta(max_length=100)] | None = None
    """Only events with this outcome, such as `failed`."""
    since: Timestamp | None = None
    """Only events at this time or later."""
    until: Timestamp | None = None
    """Only events before this time."""
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 0.0
    """How long to wait for an event if there is none after `after`."""


class FleetEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Events of controllers, oldest first."""

    fleet: str
    data: list[FleetEvent]
    last: int
    """Value for `after` of the next request."""
    problem: str = ""
    """Why no events are recorded at present, with what to do; empty if they are."""


@endpoints.register(
    "GET",
    "/admin/events",
    "viewer",
    "gateway",
    query_type=FleetEventsQuery,
    is_nonblocking=True,
    is_long_poll=True,
)
async def list_fleet_events(scope: AdminScope, request: AdminRequest) -> FleetEvents:
    """List or await what the controllers of the gateway's fleet did, and why."""
    query, fleet = request.query, scope.declared_fleet
    selection = msgspec.structs.asdict(query) | {"kinds": split_names(query.kind)}
    del selection["kind"], selection["wait_s"]
    read_events = partial(fleet.store.list_events, fleet.name, **selection)
    deadline = time.monotonic() + query.wait_s
    while True:
        async with scope.limiter.slot(request.principal):
            events = await run_in_daemon_thread(read_events)
        if events or time.monotonic() >= deadline:
            break
        await asyncio.sleep(POLL_INTERVAL_S)
    async with scope.limiter.slot(request.principal):
        problem = await run_in_daemon_thread(find_store_problem, fleet.store, fleet.name)
    last = events[-1].number if events else query.after
    return FleetEvents(fleet=fleet.name, data=events, last=last, problem=problem)


# --- state and history ---------------------------------------------------------------------------


class RevisionsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the list of revisions."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    before: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Only revisions with lower numbers."""


class PlanQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of a plan."""

    revision: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    """Revision whose declaration would be put in force again."""


class DeclarationQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of a declaration."""

    revision: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Revision. By default the one in force."""


@endpoints.register("GET", "/admin/fleet", "viewer", "gateway")
def get_fleet(scope: AdminScope, request: AdminRequest) -> FleetStatus:  # noqa: ARG001 - the whole fleet
    """Get the declared fleet: pools, replicas, rollouts and decisions of the autoscalers."""
    return scope.declared_fleet.read_fleet()


@endpoints.register("GET", "/admin/fleet/revisions", "viewer", "gateway", query_type=RevisionsQuery)
def list_fleet_revisions(scope: AdminScope, request: AdminRequest) -> Page[RevisionChanges]:
    """List the applied declarations with their changes, newest first."""
    fleet, limit = scope.declared_fleet, request.query.limit
    found = list_revision_changes(fleet.store, fleet.name, limit + 1, request.query.before)
    return build_page(found[:limit], has_more=len(found) > limit)


@endpoints.register("GET", "/admin/fleet/plan", "viewer", "gateway", query_type=PlanQuery)
def plan_fleet_rollback(scope: AdminScope, request: AdminRequest) -> FleetPlan:
    """Show what putting the declaration of an earlier revision in force again would change."""
    return scope.declared_fleet.plan_rollback(request.query.revision)


@endpoints.register(
    "GET", "/admin/fleet/declaration", "operator", "gateway", query_type=DeclarationQuery
)
def get_fleet_declaration(scope: AdminScope, request: AdminRequest) -> AppliedDeclaration:
    """Get the declaration in force, or that of a revision, in YAML."""
    return scope.declared_fleet.read_declaration(request.query.revision)


class PlanChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A declaration that may be applied."""

    declaration: Declaration


@endpoints.register(
    "POST", "/admin/fleet/plan", "operator", "gateway", body_type=PlanChange, changes_nothing=True
)
def plan_fleet_change(scope: AdminScope, request: AdminRequest) -> FleetPlan:
    """Show what applying a declaration would change. Nothing is changed."""
    return scope.declared_fleet.plan_change(request.body.declaration)


# --- decisions -----------------------------------------------------------------------------------


class ApplyChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Puts a declaration in force."""

    declaration: Declaration
    after: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    """Revision with which the caller has compared it (`revision` of its plan). A later one is a conflict."""
    reason: Reason = ""


class RollBackFleet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Puts an earlier declaration in force again."""

    revision: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    after: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Revision that the caller has seen as the latest. A later one is a conflict. By default any is replaced."""
    reason: Reason = ""


class ScalePool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes the number of replicas of a pool."""

    pool: Annotated[str, Meta(min_length=1, max_length=200)]
    replicas: Annotated[int, Meta(ge=0, le=100_000)] | None
    """The number; null to let the autoscaler decide again."""
    reason: Reason = ""


class CommandRollout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Command to a rollout."""

    pool: Annotated[str, Meta(min_length=1, max_length=200)]
    rollout: Annotated[str, Meta(min_length=1, max_length=200)]
    """Id of the rollout that the caller has seen. Another one is a conflict."""
    force: bool = False
    """Whether to go on without evidence, or with a spent error budget. Needs a reason."""
    reason: Reason = ""


class FleetDecisionView(msgspec.Struct, frozen=True, kw_only=True):
    """A decision that was stored. The controller carries it out."""

    fleet: str
    revision: int
    """Number of the revision in force."""


class RolloutCommandView(msgspec.Struct, frozen=True, kw_only=True):
    """A command that was stored for the controller."""

    fleet: str
    pool: str
    rollout: str
    command: CommandKind


@endpoints.register("POST", "/admin/fleet/apply", "operator", "gateway", body_type=ApplyChange)
def apply_fleet_change(scope: AdminScope, request: AdminRequest) -> FleetDecisionView:
    """Put a declaration in force as a new revision, except for what only the command line may change."""
    body, fleet = request.body, scope.declared_fleet
    revision = fleet.apply_change(body.declaration, body.after, body.reason, request.actor)
    return FleetDecisionView(fleet=fleet.name, revision=revision)


@endpoints.register("POST", "/admin/fleet/rollback", "operator", "gateway", body_type=RollBackFleet)
def roll_back_fleet(scope: AdminScope, request: AdminRequest) -> FleetDecisionView:
    """Put the declaration of an earlier revision in force again, as a new revision."""
    body, fleet = request.body, scope.declared_fleet
    revision = fleet.roll_back(body.revision, body.after, body.reason, request.actor)
    return FleetDecisionView(fleet=fleet.name, revision=revision)


@endpoints.register("POST", "/admin/fleet/scale", "operator", "gateway", body_type=ScalePool)
def scale_pool(scope: AdminScope, request: AdminRequest) -> FleetDecisionView:
    """Change the number of replicas of a pool, as a new revision. A number pauses its autoscaler."""
    body, fleet = request.body, scope.declared_fleet
    revision = fleet.scale(body.pool, body.replicas, body.reason, request.actor)
    return FleetDecisionView(fleet=fleet.name, revision=revision)


def _register_command(kind: CommandKind, summary: str) -> None:
    """Register the endpoint of one command to rollouts."""

    def command_rollout(scope: AdminScope, request: AdminRequest) -> RolloutCommandView:
        body, fleet = request.body, scope.declared_fleet
        fleet.command_rollout(
            body.pool,
            kind,
            rollout=body.rollout,
            reason=body.reason,
            force=body.force,
            actor=request.actor,
        )
        return RolloutCommandView(
            fleet=fleet.name, pool=body.pool, rollout=body.rollout, command=kind
        )

    command_rollout.__name__ = f"{kind}_rollout"
    command_rollout.__doc__ = summary
    endpoints.register(
        "POST",
        f"/admin/fleet/rollout/{kind}",
        "operator",
        "gateway",
        body_type=CommandRollout,
    )(command_rollout)


for _kind, _summary in (
    (CommandKind.PAUSE, "Stop a rollout at its step. A worse version is still rolled back."),
    (CommandKind.RESUME, "Continue a paused rollout, or permit a version that was rolled back."),
    (CommandKind.PROMOTE, "Let a rollout go to its next step now."),
    (CommandKind.ABORT, "Send all users back to the stable version at once."),
):
    _register_command(_kind, _summary)
