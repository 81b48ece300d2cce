"""Endpoints for pools and replicas: their state with its reason, and the decisions of operators."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence

import structlog

from argosy.deployment import GATEWAY_POOL
from argosy.gateway.admin.endpoints import AdminEndpoints, AdminRequest, AdminScope
from argosy.gateway.admin.replica_schemas import (
    ArithmeticGroupView,
    DrainReplica,
    EventsQuery,
    PoolView,
    ReplicaChangeView,
    ReplicaEventView,
    ReplicaFilter,
    ReplicaLogQuery,
    ReplicaLogView,
    ReplicaName,
    ReplicaView,
    SleepReplica,
    WeighReplica,
    to_replica_view,
)
from argosy.gateway.admin.schemas import Page, build_page, get_given_fields
from argosy.gateway.event_loop import LoopSlices
from argosy.gateway.model_registry import ReplicaChange
from argosy.gateway.pool import Pool, change_sleep
from argosy.gateway.upstream import UpstreamError
from argosy.process import run_in_daemon_thread
from argosy.protocol import ApiError
from argosy.store import CONTROLLER_LOG, AuditEntry, ReplicaState, Store

endpoints = AdminEndpoints()
log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

REPLICAS = "/admin/replicas"
AUDIT_ACTIONS = "replica."
"""Beginning of the audit actions that are decisions about replicas."""


@endpoints.register("GET", "/admin/pools", "viewer", "gateway", is_nonblocking=True)
def list_pools(scope: AdminScope, request: AdminRequest) -> Page[PoolView]:  # noqa: ARG001 - lists all pools
    """List the pools, each with its replicas by status and its arithmetics."""
    return build_page([_build_pool_view(pool) for pool in scope.replicas.pools()])


@endpoints.register(
    "GET", REPLICAS, "viewer", "gateway", query_type=ReplicaFilter, is_nonblocking=True
)
async def list_replicas(scope: AdminScope, request: AdminRequest) -> Page[ReplicaView]:
    """List the replicas with their status and its reason, as this gateway sees them."""
    query, slices, views = request.query, LoopSlices(), []
    for pool, replica in list(scope.replicas.replicas(query.model)):
        view = to_replica_view(pool, replica)
        if query.status in {None, view.status} and query.replica in {None, view.replica}:
            views.append(view)
        await slices.pause()
    return build_page(views)


@endpoints.register(
    "GET",
    REPLICAS + "/events",
    "viewer",
    "gateway",
    query_type=EventsQuery,
    is_nonblocking=True,
)
async def list_replica_events(scope: AdminScope, request: AdminRequest) -> Page[ReplicaEventView]:
    """List recent status changes that this gateway saw and the decisions of operators, newest first."""
    query = request.query
    wall_offset = time.time() - time.monotonic()
    events = [
        ReplicaEventView(
            at=change.at + wall_offset,
            model=pool.model,
            replica=change.replica,
            status=change.status,
            previous=change.previous,
            reason=change.reason,
        )
        for pool in scope.replicas.pools(query.model)
        for change in pool.status_changes
    ]
    if scope.store is not None:
        entries = await run_in_daemon_thread(_read_decisions, scope.store, query)
        models = [pool.model for pool in scope.replicas.pools()]
        events += [_to_event_view(entry, models) for entry in entries]
    matching = [
        event
        for event in events
        if query.model in {None, event.model}
        and query.replica in {None, event.replica}
        and (query.since or 0.0) <= event.at < (query.until or math.inf)
    ]
    matching.sort(key=lambda event: event.at, reverse=True)
    return build_page(matching[: query.limit], has_more=len(matching) > query.limit)


@endpoints.register(
    "GET",
    REPLICAS + "/log",
    "operator",
    "gateway",
    query_type=ReplicaLogQuery,
    is_nonblocking=True,
)
async def read_replica_log(scope: AdminScope, request: AdminRequest) -> ReplicaLogView:
    """Get the end of the log of a replica, a gateway or the controller, also after its process is gone.

    It may contain what users sent, so that the audit log has who read it. At most the last 64 KiB of a run are read.
    """
    query, logs = request.query, scope.replica_logs
    is_running = query.replica.startswith((f"{GATEWAY_POOL}-", CONTROLLER_LOG)) or any(
        replica.name == query.replica for _, replica in scope.replicas.replicas()
    )
    runs = await logs.list_runs(query.replica, is_running=is_running)
    run = next((each for each in runs if query.started_at in {None, each.started_at}), None)
    if run is None and query.started_at is not None:
        raise ApiError(404, "not_found", "The log of this run is not kept. Use one of `runs`.")
    if run is not None:
        subject = f"replica_log:{query.replica}"
        await scope.record_content_read(request, "replica log", subject)
    return ReplicaLogView(
        replica=query.replica,
        run=run,
        lines=[]
        if run is None
        else await logs.read_lines(
            query.replica, run.started_at, query, as_text=query.format == "text"
        ),
        runs=runs,
    )


@endpoints.register(
    "POST",
    f"{REPLICAS}/sleep",
    "operator",
    "gateway",
    body_type=SleepReplica,
    is_nonblocking=True,
)
async def sleep_replica(scope: AdminScope, request: AdminRequest) -> ReplicaChangeView:
    """Free the memory of a native replica. It finishes its running requests before."""
    return await _change_sleep(scope, request, request.body.level, request.body.grace_s)


@endpoints.register(
    "POST",
    f"{REPLICAS}/wake",
    "operator",
    "gateway",
    body_type=ReplicaName,
    is_nonblocking=True,
)
async def wake_replica(scope: AdminScope, request: AdminRequest) -> ReplicaChangeView:
    """Let a native replica that sleeps allocate its memory again, and get requests."""
    return await _change_sleep(scope, request, 0, None)


async def _change_sleep(
    scope: AdminScope, request: AdminRequest, level: int, deadline_s: float | None
) -> ReplicaChangeView:
    """Change the sleep of the replicas with a name. They keep their state for all gateways themselves."""
    body = request.body
    changed = scope.replicas.find(body.replica, body.model)
    for pool, replica in changed:
        if not replica.is_native:
            raise ApiError(
                400,
                "invalid_value",
                f"{replica.name} is no native replica, so that it does not sleep.",
            )
        try:
            await change_sleep(replica, level, deadline_s)
        except (UpstreamError, TimeoutError) as error:
            raise ApiError(502, "upstream_failed", f"{replica.name}: {error}") from error
        await scope.replicas.record_sleep(
            pool.model, replica.name, level, body.reason, request.actor
        )
        log.info(
            "replica_sleep_changed",
            model=pool.model,
            replica=replica.name,
            level=level,
            actor=request.actor,
            reason=body.reason,
        )
    return ReplicaChangeView(
        persistent=True, replicas=[to_replica_view(pool, replica) for pool, replica in changed]
    )


def _register_change(
    action: str, state: ReplicaState | None, summary: str, body_type: type
) -> None:
    """Register the endpoint that applies one kind of decision."""

    async def change_replica(scope: AdminScope, request: AdminRequest) -> ReplicaChangeView:
        fields = get_given_fields(request.body)
        replica, model = fields.pop("replica"), fields.pop("model")
        change = ReplicaChange(
            action=action, **fields | ({} if state is None else {"state": state})
        )
        changed = await scope.replicas.change(replica, model, change, request.actor)
        return ReplicaChangeView(
            persistent=scope.replicas.is_persistent,
            replicas=[to_replica_view(pool, replica) for pool, replica in changed],
        )

    change_replica.__name__ = f"{action}_replica"
    change_replica.__doc__ = summary
    endpoints.register(
        "POST",
        f"{REPLICAS}/{action}",
        "operator",
        "gateway",
        body_type=body_type,
        is_nonblocking=True,
    )(change_replica)


def _build_pool_view(pool: Pool) -> PoolView:
    now = time.monotonic()
    groups = pool.group_by_arithmetic()
    return PoolView(
        model=pool.model,
        version=pool.version,
        routing=pool.routing_policy,
        active_requests=pool.active_requests,
        replicas=len(pool.replicas),
        statuses=dict(
            Counter(replica.health.status(now).value for replica in pool.replicas.values())
        ),
        arithmetics=[
            ArithmeticGroupView(
                id=arithmetic_id,
                replicas=[replica.name for replica in group],
                arithmetic=next(
                    (each.report.arithmetic for each in group if each.report is not None), None
                ),
            )
            for arithmetic_id, group in groups.items()
        ],
        is_mixed=len(groups) > 1,
    )


def _read_decisions(store: Store, query: EventsQuery) -> list[AuditEntry]:
    is_about_one = query.model is not None and query.replica is not None
    subject = f"{query.model}/{query.replica}" if is_about_one else None
    return store.audit_log.list_entries(
        subject=subject,
        action_prefix=AUDIT_ACTIONS,
        since=query.since,
        until=query.until,
        limit=query.limit,
    )


def _to_event_view(entry: AuditEntry, models: Sequence[str]) -> ReplicaEventView:
    """Build the view of a decision from its audit entry, whose details are values or [old, new].

    The subject is the model and the replica, both of which may contain slashes.
    """
    details = {
        name: value[-1] if isinstance(value, list) else value
        for name, value in entry.details.items()
    }
    candidates = [model for model in models if entry.subject.startswith(f"{model}/")]
    model = max(candidates, key=len, default=entry.subject.partition("/")[0])
    return ReplicaEventView(
        at=entry.at,
        model=model,
        replica=entry.subject.removeprefix(f"{model}/"),
        action=entry.action.removeprefix(AUDIT_ACTIONS),
        actor=entry.actor,
        weight=details.get("weight"),
        reason=details.get("reason") or "",
    )


_DECISIONS: tuple[tuple[str, ReplicaState | None, str, type], ...] = (
    (
        "cordon",
        "cordoned",
        "Stop new requests to a replica. Running ones continue there.",
        ReplicaName,
    ),
    (
        "drain",
        "draining",
        "Stop new requests to a replica, and move its streams to other replicas.",
        DrainReplica,
    ),
    (
        "undrain",
        "active",
        "Let a replica get requests again, after a drain or a cordon.",
        ReplicaName,
    ),
    ("weight", None, "Set a replica's share of the requests relative to others.", WeighReplica),
)
for _action, _state, _summary, _body_type in _DECISIONS:
    _register_change(_action, _state, _summary, _body_type)
