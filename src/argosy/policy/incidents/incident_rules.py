"""When incidents open, which alerts join them, and when they close."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from argosy.policy.alerting import Alert
from argosy.policy.incidents.incident import (
    SCOPE_LABELS,
    Incident,
    IncidentAlert,
    TimelineEntry,
    add_entries,
    share_scope,
)

JOIN_S = 900.0
"""Time after the last start or end of an alert within which further alerts of its scope join."""
MAX_EARLY_S = 3600.0
"""Time before the onset from which alerts of its scope join, since pages of slow burns come late."""
CLOSE_S = 900.0
"""Time after the end of the last alert at which an incident closes."""
MAX_ALERTS = 100
ARGOSY = "argosy"


def update_incidents(
    incidents: Sequence[Incident],
    alerts: Mapping[str, Alert],
    onsets: Mapping[str, float],
    next_number: int,
    now: float,
    scopes: Mapping[str, Mapping[str, str]] | None = None,
) -> list[Incident]:
    """Return the incidents that change or are new.

    A page without an open incident of its scope opens one. Tickets only join.

    Args:
        incidents: Open incidents.
        alerts: Alerts by fingerprint, also those that ended lately.
        onsets: Most likely onset by fingerprint, where it is earlier than the start of the alert.
        next_number: Number of the next incident.
        now: Seconds since the epoch.
        scopes: Where the excess is, by fingerprint, of alerts whose labels name no part of the fleet.
    """
    scopes = scopes or {}
    current = {each.number: each for each in incidents}
    pages_first = sorted(
        alerts.items(), key=lambda each: (each[1].severity != "page", each[1].started_at)
    )
    for fingerprint, unscoped in pages_first:
        labels = {**scopes.get(fingerprint, {}), **unscoped.labels}
        alert = msgspec.structs.replace(unscoped, labels=labels)
        owner = _find_owner(list(current.values()), fingerprint, alert, now)
        if owner is not None:
            current[owner.number] = _join(owner, fingerprint, alert)
        elif alert.is_firing and alert.severity == "page":
            onset = min(alert.started_at, onsets.get(fingerprint, alert.started_at))
            opened = open_incident(
                next_number,
                alert.summary,
                alert.labels,
                now,
                ARGOSY,
                onset=onset,
                severity=alert.severity,
            )
            current[next_number] = _join(opened, fingerprint, alert)
            next_number += 1
    for number, incident in current.items():
        quiet_since = incident.quiet_since
        if quiet_since is not None and now - quiet_since >= CLOSE_S:
            current[number] = close_incident(incident, now, ARGOSY, "No alert fires any more.")
    before = {each.number: each for each in incidents}
    return [each for number, each in current.items() if each != before.get(number)]


def open_incident(
    number: int,
    title: str,
    labels: Mapping[str, str],
    now: float,
    actor: str,
    *,
    onset: float | None = None,
    severity: str = "ticket",
) -> Incident:
    """Return a new incident."""
    incident = Incident(
        number=number,
        title=title,
        severity=severity,
        scope={name: labels[name] for name in SCOPE_LABELS if name in labels},
        opened_at=now,
        opened_by=actor,
        onset=now if onset is None else onset,
    )
    entry = TimelineEntry(at=now, source="argosy", text=f"Opened: {title}", actor=actor)
    return add_entries(incident, [entry])


def close_incident(incident: Incident, now: float, actor: str, reason: str) -> Incident:
    """Return a closed incident."""
    entry = TimelineEntry(at=now, source="argosy", text=f"Closed. {reason}", actor=actor)
    closed = msgspec.structs.replace(incident, closed_at=now, closed_by=actor)
    return add_entries(closed, [entry])


def _find_owner(
    incidents: Sequence[Incident], fingerprint: str, alert: Alert, now: float
) -> Incident | None:
    """Return the incident that an alert belongs to, or joins; None if there is none."""
    for incident in incidents:
        if fingerprint in incident.alerts:
            return incident
    if not alert.is_firing:
        return None
    for incident in incidents:
        times = [incident.opened_at, *(each.started_at for each in incident.alerts.values())]
        last = now if incident.is_firing else max(*times, incident.quiet_since or 0.0)
        is_near = incident.onset - MAX_EARLY_S <= alert.started_at <= last + JOIN_S
        if is_near and any(share_scope(alert.labels, labels) for labels in incident.all_labels):
            return incident
    return None


def _join(incident: Incident, fingerprint: str, alert: Alert) -> Incident:
    """Return the incident with the state of an alert, and entries for what has changed."""
    known = incident.alerts.get(fingerprint)
    if known is None and len(incident.alerts) >= MAX_ALERTS:
        return incident
    if known is not None and (known.started_at, known.ended_at) == (
        alert.started_at,
        alert.ended_at,
    ):
        return incident
    if known is None and not incident.is_open:
        return incident
    joined = IncidentAlert(
        name=alert.name,
        severity=alert.severity,
        labels=alert.labels,
        summary=alert.summary,
        description=alert.description,
        runbook=alert.runbook,
        started_at=alert.started_at,
        ended_at=alert.ended_at,
    )
    entries = []
    if known is None or known.started_at != alert.started_at:
        text = f"{alert.severity.capitalize()} {alert.name} fires: {alert.summary}. {alert.description}"
        reference = f"alert/{fingerprint}/{alert.started_at}"
        entries.append(
            TimelineEntry(at=alert.started_at, source="alert", text=text, reference=reference)
        )
    if alert.ended_at is not None:
        text = f"{alert.name} ended: {alert.summary}"
        reference = f"alert/{fingerprint}/{alert.started_at}/end"
        entries.append(
            TimelineEntry(at=alert.ended_at, source="alert", text=text, reference=reference)
        )
    severity = "page" if "page" in {incident.severity, alert.severity} else "ticket"
    updated = msgspec.structs.replace(
        incident, alerts={**incident.alerts, fingerprint: joined}, severity=severity
    )
    return add_entries(updated, entries)
