"""Endpoints for alerts: what fires, who was notified, silences, and test notices."""

from __future__ import annotations

import time
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from argosy.alerting import MAX_SILENCE_S, ShownAlert
from argosy.gateway.admin.endpoints import AdminEndpoints, AdminRequest, AdminScope
from argosy.gateway.admin.replica_schemas import Reason
from argosy.policy.alerting import LabelName, LabelPattern, ReceiverName, Silence

endpoints = AdminEndpoints()

ALERTS = "/admin/alerts"


class AlertView(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="alert"):
    """An alert that fires, or has ended in the last day."""

    id: str
    """Fingerprint of its labels."""
    name: str
    severity: str
    """`page` or `ticket`."""
    labels: dict[str, str]
    state: Literal["firing", "silenced", "explained", "ended"]
    """`silenced` and `explained` alerts fire, but no receiver is notified of them."""
    summary: str
    description: str
    """Its meaning, in numbers."""
    runbook: str
    """Anchor in `docs/how-to/runbooks.md`."""
    started_at: float
    ended_at: float | None
    notified: dict[str, float]
    """Times of the latest notices about it, by receiver."""
    silence: str | None
    """Id of the silence that covers it."""
    explained_by: str | None
    """Name of the alert that explains it."""


class SilenceView(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="silence"):
    """Time in which matching alerts are not notified."""

    id: str
    matchers: dict[str, str]
    """Pattern of each label. `*` at its end stands for any text, and `!` at its beginning excludes what follows."""
    author: str
    reason: str
    created_at: float
    ends_at: float


class ReceiverView(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="receiver"):
    """A receiver of the settings, an Alertmanager by its address, or the watchdog."""

    name: str
    delivered_at: float | None
    failing_since: float | None
    """Time of the first failure since the last delivery."""
    error: str


class NoticeTestView(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="notice_test"
):
    """An ordered test notice."""

    id: str
    receiver: str
    sent_at: float | None
    """Time of its attempt; None while it waits."""
    error: str
    """Why it was not delivered; empty if it was, or waits."""


class AlertReport(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="alerts"):
    """Alerts, silences and receivers at one moment."""

    evaluated_at: float | None
    """Time of the last evaluation; None before the first. An old one means that no process evaluates alerts."""
    alerts: list[AlertView]
    """Alerts that fire first, pages before tickets."""
    silences: list[SilenceView]
    """Silences in force."""
    receivers: list[ReceiverView]
    tests: list[NoticeTestView]
    """Test notices of the last 10 minutes."""


class SilenceAlerts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new silence."""

    matchers: Annotated[dict[LabelName, LabelPattern], Meta(min_length=1, max_length=20)]
    """Pattern of each label that an alert must have."""
    duration_s: Annotated[float, Meta(ge=60, le=MAX_SILENCE_S)]
    reason: Annotated[str, Meta(min_length=1, max_length=500)]
    """Why, for others who look for the alert."""


class OrderNoticeTest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A test notice to order."""

    receiver: ReceiverName
    """Name in `alerting.receivers`."""


class EndSilence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the end of a silence."""

    reason: Reason = ""


@endpoints.register("GET", ALERTS, "viewer", "gateway")
def list_alerts(scope: AdminScope, request: AdminRequest) -> AlertReport:  # noqa: ARG001 - lists all
    """List the alerts, the silences in force, and whether notices reach their receivers."""
    admin, now = scope.alerts, time.time()
    state, orders = admin.read_state(), admin.orders.read()
    return AlertReport(
        evaluated_at=state.evaluated_at or None,
        alerts=[_view_alert(each) for each in admin.list_alerts(state, orders.silences, now)],
        silences=[_view_silence(each) for each in orders.silences if each.ends_at > now],
        receivers=[
            ReceiverView(name=name, **msgspec.structs.asdict(each))
            for name, each in state.receivers.items()
        ],
        tests=[
            NoticeTestView(
                id=each.id,
                receiver=each.receiver,
                sent_at=state.tests[each.id].at if each.id in state.tests else None,
                error=state.tests[each.id].error if each.id in state.tests else "",
            )
            for each in orders.tests
        ],
    )


@endpoints.register("POST", ALERTS + "/silences", "operator", "gateway", body_type=SilenceAlerts)
def silence_alerts(scope: AdminScope, request: AdminRequest) -> SilenceView:
    """Silence matching alerts for some time. They are evaluated and shown, but not notified."""
    body = request.body
    return _view_silence(
        scope.alerts.orders.add_silence(
            body.matchers, body.duration_s, actor=request.actor, reason=body.reason
        )
    )


@endpoints.register(
    "DELETE", ALERTS + "/silences/{id}", "operator", "gateway", query_type=EndSilence
)
def end_silence(scope: AdminScope, request: AdminRequest) -> SilenceView:
    """End a silence now."""
    return _view_silence(
        scope.alerts.orders.end_silence(
            request.resource_id, actor=request.actor, reason=request.query.reason
        )
    )


@endpoints.register("POST", ALERTS + "/tests", "operator", "gateway", body_type=OrderNoticeTest)
def order_notice_test(scope: AdminScope, request: AdminRequest) -> NoticeTestView:
    """Order a test notice to a receiver. Its result is in the list of alerts within some 20 seconds."""
    order = scope.alerts.orders.add_test(request.body.receiver, actor=request.actor)
    return NoticeTestView(id=order.id, receiver=order.receiver, sent_at=None, error="")


def _view_alert(shown: ShownAlert) -> AlertView:
    alert = shown.alert
    state: Literal["firing", "silenced", "explained", "ended"] = "ended"
    if alert.is_firing:
        state = "silenced" if shown.silence else "explained" if shown.explained_by else "firing"
    return AlertView(
        id=alert.fingerprint,
        name=alert.name,
        severity=alert.severity,
        labels=alert.labels,
        state=state,
        summary=alert.summary,
        description=alert.description,
        runbook=alert.runbook,
        started_at=alert.started_at,
        ended_at=alert.ended_at,
        notified=alert.notified,
        silence=None if shown.silence is None else shown.silence.id,
        explained_by=None if shown.explained_by is None else shown.explained_by.name,
    )


def _view_silence(silence: Silence) -> SilenceView:
    return SilenceView(**msgspec.structs.asdict(silence))
