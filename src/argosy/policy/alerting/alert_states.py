"""States of alerts: they fire, keep firing while data are missing, and end after a quiet time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from argosy.policy.alerting.alert import (
    Alert,
    AlertCondition,
    build_labels,
    compute_fingerprint,
)

MAX_ALERTS = 1000
"""Alerts that fire at once. Further conditions are left out."""
MAX_OBSERVED_S = 30.0
"""Longest time between two rounds that counts as observed."""
FLAP_CHANGES = 3
FLAP_WINDOW_S = 3600.0
"""An alert with `FLAP_CHANGES` starts and ends in this time fires until its condition was false for this time."""
ENDED_RETENTION_S = 86_400.0
MAX_ENDED = 200
"""Ended alerts that are kept, for operators and for repeated notices."""


class AlertTiming(msgspec.Struct, frozen=True):
    """How long the condition of an alert must be false before the alert ends."""

    page_s: float = 300.0
    ticket_s: float = 1800.0


DEFAULT_TIMING = AlertTiming()


def update_alerts(
    alerts: Mapping[str, Alert],
    conditions: Iterable[AlertCondition],
    *,
    is_complete: bool,
    now: float,
    elapsed_s: float,
    timing: AlertTiming = DEFAULT_TIMING,
) -> dict[str, Alert]:
    """Return the alerts after a round of the sources, by fingerprint.

    Args:
        alerts: Alerts of the last round, by fingerprint.
        conditions: What the sources report.
        is_complete: Whether all sources reported. If so, a condition that is not among them is false.
        now: Seconds since the epoch.
        elapsed_s: Seconds since the last round, by any clock.
        timing: When alerts end.
    """
    elapsed_s = min(max(elapsed_s, 0.0), MAX_OBSERVED_S)
    updated: dict[str, Alert] = {}
    num_firing = sum(each.is_firing for each in alerts.values())
    seen = set[str]()
    for condition in conditions:
        labels = build_labels(condition)
        fingerprint = compute_fingerprint(labels)
        seen.add(fingerprint)
        alert = alerts.get(fingerprint)
        if condition.is_firing:
            if alert is None or not alert.is_firing:
                if num_firing >= MAX_ALERTS:
                    continue
                num_firing += 1
            updated[fingerprint] = _fire(alert, condition, labels, now)
        elif alert is not None:
            is_quiet = condition.is_firing is False
            updated[fingerprint] = _be_quiet(alert, now, elapsed_s, timing) if is_quiet else alert
    for fingerprint, alert in alerts.items():
        if fingerprint not in seen:
            is_quiet = is_complete and alert.is_firing
            updated[fingerprint] = _be_quiet(alert, now, elapsed_s, timing) if is_quiet else alert
    return _forget_ended(updated, now)


def _fire(
    alert: Alert | None, condition: AlertCondition, labels: dict[str, str], now: float
) -> Alert:
    started_at, notified = now, dict[str, float]()
    changes: tuple[float, ...] = (now,)
    if alert is not None and alert.is_firing:
        started_at, changes, notified = alert.started_at, alert.changes, alert.notified
    elif alert is not None:
        changes = (*_recent_changes(alert, now), now)
    return Alert(
        labels=labels,
        summary=condition.summary,
        description=condition.description,
        runbook=condition.runbook,
        started_at=started_at,
        changes=changes,
        notified=notified,
    )


def _be_quiet(alert: Alert, now: float, elapsed_s: float, timing: AlertTiming) -> Alert:
    if not alert.is_firing:
        return alert
    quiet_s = alert.quiet_s + elapsed_s
    keep_s = timing.page_s if alert.severity == "page" else timing.ticket_s
    if len(_recent_changes(alert, alert.started_at)) >= FLAP_CHANGES:
        keep_s = max(keep_s, FLAP_WINDOW_S)
    if quiet_s < keep_s:
        return msgspec.structs.replace(alert, quiet_s=quiet_s)
    changes = (*_recent_changes(alert, now), now)
    return msgspec.structs.replace(alert, quiet_s=quiet_s, ended_at=now, changes=changes)


def _recent_changes(alert: Alert, now: float) -> tuple[float, ...]:
    return tuple(each for each in alert.changes if now - each <= FLAP_WINDOW_S)


def _forget_ended(alerts: dict[str, Alert], now: float) -> dict[str, Alert]:
    ended = {
        fingerprint: each.ended_at
        for fingerprint, each in alerts.items()
        if each.ended_at is not None and now - each.ended_at <= ENDED_RETENTION_S
    }
    kept = set(sorted(ended, key=lambda each: ended[each], reverse=True)[:MAX_ENDED])
    return {name: each for name, each in alerts.items() if each.is_firing or name in kept}
