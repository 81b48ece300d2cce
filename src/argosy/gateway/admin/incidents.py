"""Endpoints for incidents, for changes of traffic, and for alerts of other programs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from argosy.alerting import (
    ReceivedAlert,
    TrafficStatus,
    read_traffic_status,
    receive_alerts,
)
from argosy.gateway.admin.endpoints import AdminEndpoints, AdminRequest, AdminScope
from argosy.gateway.admin.replica_schemas import Reason
from argosy.gateway.admin.schemas import Page, build_page
from argosy.policy.incidents import Incident, write_postmortem
from argosy.store import NotFoundError

MAX_ALERTS = 100
"""Alerts of one request of another program."""

IncidentNumber = Annotated[int, Meta(ge=1, le=2**31 - 1)]
ScopeName = Annotated[str, Meta(max_length=200)]

endpoints = AdminEndpoints()


class IncidentsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the list of incidents."""

    open: bool = False
    """Only those that go on."""
    limit: Annotated[int, Meta(ge=1, le=250)] = 50


class IncidentSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Incident in a list. Times are seconds since the epoch."""

    number: int
    name: str
    title: str
    severity: str
    scope: Mapping[str, str]
    onset: float
    opened_at: float
    opened_by: str
    closed_at: float | None
    is_firing: bool
    num_alerts: int
    cause: str


class IncidentView(Incident, frozen=True, kw_only=True):
    """Incident with what follows from its record."""

    display_name: str
    firing: bool
    """Whether one of its alerts fires."""


class OpenIncident(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Opens an incident by hand."""

    title: Annotated[str, Meta(min_length=1, max_length=300)]
    model: ScopeName = ""
    pool: ScopeName = ""
    replica: ScopeName = ""
    tenant: ScopeName = ""


class CloseIncident(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Closes an incident."""

    incident: IncidentNumber
    reason: Reason = ""


class CommentIncident(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Appends a comment to an incident."""

    incident: IncidentNumber
    text: Annotated[str, Meta(min_length=1, max_length=2000)]
    is_cause: bool = False
    """Whether the comment is the cause, which the caller confirms."""


class PostmortemDraft(msgspec.Struct, frozen=True):
    """Draft of a report."""

    markdown: str


class AlertsReceived(msgspec.Struct, frozen=True):
    """Answer to another program."""

    status: str = "success"


@endpoints.register("GET", "/admin/incidents", "viewer", "gateway", query_type=IncidentsQuery)
def list_incidents(scope: AdminScope, request: AdminRequest) -> Page[IncidentSummary]:
    """List incidents, the latest first."""
    query = request.query
    found = [each for each in scope.incidents.list_all() if each.is_open or not query.open]
    return build_page(
        [_summarise(each) for each in found[: query.limit]], has_more=len(found) > query.limit
    )


@endpoints.register("GET", "/admin/incidents/{id}", "viewer", "gateway")
def get_incident(scope: AdminScope, request: AdminRequest) -> IncidentView:
    """Get an incident by its number: its alerts, its timeline, and what is known of its cause."""
    return _view(scope.incidents.get(_parse_number(request.resource_id)))


@endpoints.register("GET", "/admin/incidents/{id}/postmortem", "viewer", "gateway")
def draft_postmortem(scope: AdminScope, request: AdminRequest) -> PostmortemDraft:
    """Draft a report about an incident in Markdown, from its record."""
    incident = scope.incidents.get(_parse_number(request.resource_id))
    return PostmortemDraft(write_postmortem(incident, time.time()))


@endpoints.register("POST", "/admin/incidents", "operator", "gateway", body_type=OpenIncident)
def open_incident(scope: AdminScope, request: AdminRequest) -> IncidentView:
    """Open an incident by hand."""
    body = request.body
    labels = {name: getattr(body, name) for name in ("model", "pool", "replica", "tenant")}
    given = {name: value for name, value in labels.items() if value}
    return _view(scope.incidents.open(body.title, given, request.actor, time.time()))


@endpoints.register(
    "POST", "/admin/incidents/close", "operator", "gateway", body_type=CloseIncident
)
def close_incident(scope: AdminScope, request: AdminRequest) -> IncidentView:
    """Close an incident, also while its alerts fire."""
    body = request.body
    return _view(scope.incidents.close(body.incident, body.reason, request.actor, time.time()))


@endpoints.register(
    "POST", "/admin/incidents/comment", "operator", "gateway", body_type=CommentIncident
)
def comment_incident(scope: AdminScope, request: AdminRequest) -> IncidentView:
    """Append a comment to the timeline of an incident, or confirm its cause."""
    body = request.body
    changed = scope.incidents.comment(
        body.incident, body.text, request.actor, time.time(), is_cause=body.is_cause
    )
    return _view(changed)


@endpoints.register("GET", "/admin/drift", "viewer", "gateway")
def get_drift(scope: AdminScope, request: AdminRequest) -> TrafficStatus:  # noqa: ARG001 - the whole gateway
    """Get the shares of watched events in the last day beside what was expected."""
    return read_traffic_status(scope.fleet_store, scope.fleet_name)


@endpoints.register(
    "POST",
    "/api/v2/alerts",
    "operator",
    "gateway",
    body_type=Annotated[list[ReceivedAlert], Meta(max_length=MAX_ALERTS)],
    changes_nothing=True,  # of the accounts
)
def post_alerts(scope: AdminScope, request: AdminRequest) -> AlertsReceived:
    """Receive alerts of another program, as Alertmanager does."""
    receive_alerts(scope.fleet_store, scope.fleet_name, request.body, time.time())
    return AlertsReceived()


def _parse_number(text: str) -> int:
    digits = text.upper().removeprefix("INC-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 10):
        raise NotFoundError(
            f"There is no incident {text[:50]!r}. An incident is a number, such as 17."
        )
    return int(digits)


def _summarise(incident: Incident) -> IncidentSummary:
    return IncidentSummary(
        number=incident.number,
        name=incident.name,
        title=incident.title,
        severity=incident.severity,
        scope=incident.scope,
        onset=incident.onset,
        opened_at=incident.opened_at,
        opened_by=incident.opened_by,
        closed_at=incident.closed_at,
        is_firing=incident.is_firing,
        num_alerts=len(incident.alerts),
        cause=incident.cause,
    )


def _view(incident: Incident) -> IncidentView:
    return IncidentView(
        **msgspec.structs.asdict(incident),
        display_name=incident.name,
        firing=incident.is_firing,
    )
