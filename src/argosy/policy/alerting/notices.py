"""Notices: which groups of alerts are notified now, and what of them is delivered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from argosy.policy.alerting.alert import Alert, compute_fingerprint
from argosy.policy.alerting.routing import ResolvedRoute, Silence, find_silence, index_inhibitors

MAX_GROUPS = 500
"""Groups of all receivers. Alerts beyond them are not notified."""
MAX_ALERTS_OF_NOTICE = 50
CLAIM_S = 60.0
"""Time after which a notice is sent again whose sender has recorded no result."""
FIRST_RETRY_S = 5.0
MAX_RETRY_S = 300.0
MAX_NOTICE_AGE_S = 86_400.0
"""Age from which a notice that cannot be delivered is dropped."""


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """Message about the alerts of a group to its receiver. Times are seconds since the epoch."""

    id: str
    """Identity, also in a repeated delivery."""
    alerts: tuple[Alert, ...]
    """Alerts that fire, and those that ended since the last notice."""
    omitted: int = 0
    """Further alerts, beyond `MAX_ALERTS_OF_NOTICE`."""
    firing: tuple[str, ...] = ()
    """Fingerprints of all that fire."""
    created_at: float
    is_test: bool = False
    attempts: int = 0
    due_at: float = 0.0
    """Time of the next attempt."""
    error: str = ""
    """Result of the last attempt."""

    @property
    def status(self) -> Literal["firing", "resolved"]:
        """`resolved` if no alert of the group fires any more."""
        return "firing" if self.firing else "resolved"


class NoticeGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Alerts that are notified together to one receiver, and what it has been sent."""

    key: str
    receiver: str
    labels: dict[str, str]
    """Labels that the alerts share."""
    created_at: float
    notified_at: float | None = None
    """Time of the last notice; None before the first."""
    delivered_at: float | None = None
    firing: tuple[str, ...] = ()
    """Fingerprints that the last notice named as firing."""
    num_notices: int = 0
    pending: Notice | None = None
    """Notice to deliver. No further one is created before."""

    def on_attempt(self, now: float) -> NoticeGroup:
        """Record that the pending notice is about to be sent."""
        assert self.pending is not None
        claimed = msgspec.structs.replace(
            self.pending, attempts=self.pending.attempts + 1, due_at=now + CLAIM_S
        )
        return msgspec.structs.replace(self, pending=claimed)

    def on_result(self, now: float, error: str, *, is_final: bool) -> NoticeGroup:
        """Record the result of an attempt: empty, or an error after which it is tried again unless it is final."""
        notice = self.pending
        assert notice is not None
        if not error:
            return msgspec.structs.replace(self, pending=None, delivered_at=now)
        if is_final or now - notice.created_at > MAX_NOTICE_AGE_S:
            return msgspec.structs.replace(self, pending=None)
        delay_s = min(FIRST_RETRY_S * 2 ** min(notice.attempts - 1, 10), MAX_RETRY_S)
        waiting = msgspec.structs.replace(notice, due_at=now + delay_s, error=error)
        return msgspec.structs.replace(self, pending=waiting)


def update_groups(
    groups: Mapping[str, NoticeGroup],
    alerts: Mapping[str, Alert],
    find_routes: Callable[[Mapping[str, str]], Iterable[ResolvedRoute]],
    silences: Sequence[Silence],
    now: float,
) -> dict[str, NoticeGroup]:
    """Return the groups after a change of alerts, silences or time, with the notices that are to be sent.

    Args:
        groups: Groups by key.
        alerts: Alerts by fingerprint.
        find_routes: Returns the routes of the alert with the given labels.
        silences: Silences, also those that are over.
        now: Seconds since the epoch.
    """
    firing = {fingerprint: each for fingerprint, each in alerts.items() if each.is_firing}
    find_inhibitor = index_inhibitors(firing.values())
    members: defaultdict[str, set[str]] = defaultdict(set)
    routes: dict[str, ResolvedRoute] = {}
    updated = dict(groups)
    for fingerprint, alert in firing.items():
        is_suppressed = find_silence(alert.labels, silences, now) or find_inhibitor(alert.labels)
        for route in find_routes(alert.labels):
            labels = {name: alert.labels[name] for name in route.group_by if name in alert.labels}
            key = f"{route.receiver}/{compute_fingerprint(labels)}"
            routes[key] = route
            if is_suppressed:
                continue
            if key not in updated:
                if len(updated) >= MAX_GROUPS:
                    continue
                updated[key] = NoticeGroup(
                    key=key, receiver=route.receiver, labels=labels, created_at=now
                )
            members[key].add(fingerprint)
    for key, group in updated.items():
        if group.pending is None:
            updated[key] = _decide(group, members[key], alerts, routes.get(key), now)
    return {
        key: group
        for key, group in updated.items()
        if group.pending is not None or group.firing or members[key]
    }


def _decide(
    group: NoticeGroup,
    members: set[str],
    alerts: Mapping[str, Alert],
    route: ResolvedRoute | None,
    now: float,
) -> NoticeGroup:
    """Return a group with its next notice, if it needs one now."""
    known = set(group.firing)
    ended = {each for each in known if each not in alerts or not alerts[each].is_firing}
    still = known - ended
    """Alerts that were notified and fire, also if a silence began since."""
    has_news = bool(members - known or ended)
    if group.notified_at is None:
        is_due = bool(members) and (route is None or now - group.created_at >= route.group_wait_s)
    elif has_news:
        is_due = (
            route is None
            or now - group.notified_at >= route.group_interval_s
            or not still | members
        )
    else:
        is_due = (
            bool(still & members)
            and route is not None
            and now - group.notified_at >= route.repeat_interval_s
        )
    if not is_due:
        return group
    firing = sorted(members | still)
    shown = [alerts[each] for each in (*firing, *sorted(ended)) if each in alerts]
    notice = Notice(
        id=f"{group.key}/{group.created_at:.3f}/{group.num_notices + 1}",
        alerts=tuple(shown[:MAX_ALERTS_OF_NOTICE]),
        omitted=max(0, len(shown) - MAX_ALERTS_OF_NOTICE),
        firing=tuple(firing),
        created_at=now,
        due_at=now,
    )
    return msgspec.structs.replace(
        group,
        notified_at=now,
        firing=notice.firing,
        num_notices=group.num_notices + 1,
        pending=notice,
    )
