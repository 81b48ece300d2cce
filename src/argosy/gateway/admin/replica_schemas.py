"""JSON types of the endpoints for pools and replicas. Times are seconds since the epoch."""

from __future__ import annotations

import time
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from argosy.gateway.pool import Pool, ReplicaEndpoint
from argosy.policy import ReplicaStatus
from argosy.policy.reconciliation import Severity, status_severity
from argosy.protocol import ArithmeticIdentity, ResourceUsage, StartupProgress
from argosy.store import Name, ReplicaLogRun, ReplicaState, ReplicaWeight, Timestamp
from argosy.telemetry import LogSelection

ReplicaNameText = Annotated[str, Meta(min_length=1, max_length=500)]
StatusName = Annotated[str, Meta(pattern=rf"^({'|'.join(ReplicaStatus)})$(?!\n)")]
Reason = Annotated[str, Meta(max_length=500)]


# --- responses -----------------------------------------------------------------------------------


class ArithmeticGroupView(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas of a pool that compute the same bytes, and may resume each other's streams."""

    id: str
    replicas: list[str]
    arithmetic: ArithmeticIdentity | None
    """Parts of the identity. None for servers whose arithmetic is only named in the settings."""


class PoolView(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="pool"):
    """The replicas of one version of a model."""

    model: str
    version: str
    """Digest of the version; empty if changes of the model are no rollouts."""
    routing: str
    active_requests: int
    """Requests of this gateway that wait or run."""
    replicas: int
    statuses: dict[str, int]
    """Number of replicas by status."""
    arithmetics: list[ArithmeticGroupView]
    is_mixed: bool
    """Whether streams cannot be resumed on every replica of the pool."""


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="replica"):
    """A replica as this gateway sees it."""

    model: str
    version: str
    """Digest of the version of the model; empty if changes of the model are no rollouts."""
    replica: str
    kind: str
    status: ReplicaStatus
    reason: str
    """Why the replica has this status; empty if it is ready."""
    severity: Severity | None
    """How urgent the status is; None if the replica is ready."""
    since: float | None
    """When this gateway first saw this status; None if that was at its own start."""
    state: ReplicaState
    """Decision of operators or of the settings file."""
    weight: float
    changed_by: str
    """Name of the operator who decided; empty if only the settings file applies."""
    changed_at: float | None
    is_drained: bool
    """Whether an operator drains the replica and no request is left there."""
    in_flight: int
    """Running requests of this gateway."""
    slots: int
    """Requests that the replica runs at a time."""
    running: int
    waiting: int
    """Requests of all clients, by the replica's latest report."""
    queued_tokens: int
    kv_usage_ratio: float
    kv_blocks_total: int | None
    """KV blocks of a native replica; None for others."""
    usage: ResourceUsage | None
    """CPU and memory of a native replica and its machine; None for others."""
    report_age_s: float | None
    """Age of the latest load report; None without one."""
    max_model_len: int | None
    arithmetic_id: str
    arithmetic: ArithmeticIdentity | None
    no_drafts_reason: str
    """Why outputs are not drafted. Empty if they may be, or if it is not known."""
    exact: bool
    """Whether the replica's results do not depend on other requests. Streams of other replicas are not resumed."""
    proxy: str
    """Proxy through which the gateway reaches the replica; empty if it does so directly."""
    build: str
    model_revision: str
    model_digest: str
    accelerator: str
    zone: str
    labels: dict[str, str]
    phase: str
    startup: StartupProgress | None
    sleep_level: int
    """How much memory sleep has freed: 0 none, 1 all but the weights, 2 the weights, too."""
    wake_s: float
    """Seconds that the replica took to wake up last; 0 if it has not slept."""
    awake_bytes: int
    """Memory that the replica needs while it is awake at most; 0 if unknown."""


class ReplicaChangeView(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="replica.change"
):
    """Result of a decision."""

    persistent: bool
    """Whether the decision is stored and applies to every gateway of the store. Otherwise it is kept in the memory of
    this gateway until it stops."""
    replicas: list[ReplicaView]


class ReplicaEventView(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="replica.event"
):
    """Status change that this gateway saw, or decision of an operator."""

    at: float
    model: str
    replica: str
    status: str | None = None
    """New status; None for a decision."""
    previous: str | None = None
    action: str | None = None
    """Decision: `cordon`, `drain`, `undrain` or `weight`."""
    actor: str | None = None
    weight: float | None = None
    reason: str = ""


class ReplicaLogView(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="replica.log"
):
    """End of the log of one run of a replica."""

    replica: str
    run: ReplicaLogRun | None
    """The run that the lines are of. None if the controller has recorded none."""
    lines: list[str]
    """The last lines that are selected, at most 500. Control characters are kept in `raw` format, except for colours.
    Long lines are cut, unless they are events in JSON."""
    runs: list[ReplicaLogRun]
    """Runs whose logs are kept, the latest first."""


def to_replica_view(pool: Pool, replica: ReplicaEndpoint) -> ReplicaView:
    """Build the view of a replica at this moment."""
    now, wall_now = time.monotonic(), time.time()
    health, load, report, admin = replica.health, replica.load, replica.report, replica.admin
    health.observe(now)
    since = health.status_since
    has_report = load.reported_at > 0
    is_idle = not load.in_flight and not (
        report.server_load if report is not None else load.running + load.waiting
    )
    return ReplicaView(
        model=pool.model,
        version=pool.version,
        replica=replica.name,
        kind=replica.kind,
        status=health.status(now),
        reason=health.reason(now),
        severity=status_severity(health.status(now)),
        since=wall_now - (now - since) if since else None,
        state=admin.state.value,
        weight=admin.weight,
        changed_by=admin.setting.changed_by if admin.setting else "",
        changed_at=admin.setting.changed_at if admin.setting else None,
        is_drained=admin.state == "draining" and is_idle,
        in_flight=load.in_flight,
        slots=replica.slots,
        running=load.running,
        waiting=load.waiting,
        queued_tokens=load.queued_tokens,
        kv_usage_ratio=load.kv_usage_ratio,
        kv_blocks_total=report.kv_blocks_total if report else None,
        usage=report.usage if report else None,
        report_age_s=now - load.reported_at if has_report else None,
        max_model_len=replica.max_model_len,
        arithmetic_id=replica.arithmetic_id,
        arithmetic=report.arithmetic if report else None,
        no_drafts_reason=report.no_drafts_reason if report else "",
        exact=replica.is_exact,
        proxy="" if (proxy := replica.upstream.proxy) is None else proxy.name,
        build=report.build if report else "",
        model_revision=report.model_revision if report else "",
        model_digest=report.model_digest if report else "",
        accelerator=report.accelerator if report else "",
        zone=report.zone if report else "",
        labels=report.labels if report else {},
        phase=report.phase if report else "",
        startup=report.startup if report else None,
        sleep_level=report.sleep_level if report else 0,
        wake_s=report.wake_s if report else 0.0,
        awake_bytes=report.awake_bytes if report else 0,
    )


# --- parameters and bodies -----------------------------------------------------------------------


class ReplicaFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the list of replicas."""

    model: Name | None = None
    replica: ReplicaNameText | None = None
    status: StatusName | None = None


class EventsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the list of events."""

    model: Name | None = None
    replica: ReplicaNameText | None = None
    since: Timestamp | None = None
    """Only events at this time or later."""
    until: Timestamp | None = None
    """Only events before this time."""
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100


class ReplicaLogQuery(LogSelection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of a log."""

    replica: ReplicaNameText
    """Name of the replica or gateway, which may be gone, or `controller`."""
    started_at: Annotated[float, Meta(ge=0)] | None = None
    """Start of an earlier run, as in `runs`. The latest run by default."""
    format: Literal["raw", "text"] = "raw"
    """Whether events in JSON are formatted for people."""


class ReplicaName(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replica that a decision is about."""

    replica: ReplicaNameText
    """Name of the replica."""
    model: Name | None = None
    """Model, if replicas of several models have the name and only one is meant."""
    reason: Reason = ""
    """Why, for other operators."""


class DrainReplica(ReplicaName, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replica to drain."""

    grace_s: Annotated[float, Meta(ge=0, le=86_400)] = 0.0
    """How long running streams may continue there before they move."""


class SleepReplica(ReplicaName, frozen=True, kw_only=True):
    """Body of `POST /admin/replicas/sleep`."""

    level: Literal[1, 2] = 1
    """1 keeps the weights, 2 drops them too."""
    grace_s: Annotated[float, Meta(ge=0, le=86_400)] = 30.0
    """Time after which running requests end that keep the replica awake."""


class WeighReplica(ReplicaName, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replica and its weight."""

    weight: ReplicaWeight
    """Share of the requests relative to other replicas, for example 0.5 for half."""
