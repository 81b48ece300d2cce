"""Incident: one disturbance with its alerts, its timeline, and what is known about its cause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from argosy.policy.detection import RankedChange, Slice
from argosy.policy.objectives import BudgetImpact

MAX_ENTRIES = 500
"""Entries of a timeline. Later ones are left out, and the last entry says so."""
SCOPE_LABELS = ("model", "pool", "replica", "tenant", "version")
"""Labels of alerts that name a part of the fleet."""

EntrySource = Literal["alert", "event", "audit", "comment", "argosy", "rollback"]


class TimelineEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened. Entries are appended and never changed."""

    at: float
    """Seconds since the epoch."""
    source: EntrySource
    text: str
    actor: str = ""
    reference: str = ""
    """Identity at its source, such as `event/12`, so that nothing is entered twice."""


class IncidentAlert(msgspec.Struct, frozen=True, kw_only=True):
    """Alert of an incident."""

    name: str
    severity: str
    labels: Mapping[str, str]
    summary: str
    description: str
    runbook: str
    started_at: float
    ended_at: float | None = None


class RollbackAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """Whether to go back to the last version of a pool. It is done without a person if nothing speaks against it."""

    pool: str
    rollout: str
    """Id of the rollout that would be rolled back."""
    candidate: str
    """Digest of the version that serves now."""
    reasons: tuple[str, ...] = ()
    """Sentences for it."""
    obstacles: tuple[str, ...] = ()
    """Sentences against doing it without a person."""
    is_done: bool = False


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """Disturbance of the fleet. Times are seconds since the epoch."""

    number: int
    title: str
    severity: str
    """`page` or `ticket`: the highest of its alerts."""
    scope: Mapping[str, str]
    """Labels of the alert with which it began, as far as they name a part of the fleet."""
    opened_at: float
    opened_by: str
    onset: float
    """Most likely time at which it began."""
    closed_at: float | None = None
    closed_by: str = ""
    alerts: Mapping[str, IncidentAlert] = {}
    """Alerts by fingerprint."""
    entries: tuple[TimelineEntry, ...] = ()
    changes: tuple[RankedChange, ...] = ()
    """Changes before the onset, the best fitting first."""
    slices: tuple[Slice, ...] = ()
    """Where the excess is, first where it is concentrated most."""
    sliced_event: str = ""
    """Event whose excess that is, as the end of a sentence."""
    healthy: tuple[str, ...] = ()
    """Models, replicas and tenants without a deviation."""
    requests: int = 0
    """Requests of its scope since the onset, or until it was closed."""
    failed: int = 0
    tenants: tuple[str, ...] = ()
    """Tenants with failed requests."""
    budgets: tuple[BudgetImpact, ...] = ()
    """Budgets of its objectives."""
    request_nano_dollars: int | None = None
    """Mean price of a request of its scope in the day before the onset; None if it is not known."""
    missing: tuple[str, ...] = ()
    """Sources that could not be read."""
    cause: str = ""
    """Cause that a person has confirmed; empty before."""
    cause_by: str = ""
    rollback: RollbackAdvice | None = None

    @property
    def name(self) -> str:
        """Name for people, such as `INC-17`."""
        return f"INC-{self.number}"

    @property
    def is_open(self) -> bool:
        """Whether it goes on."""
        return self.closed_at is None

    @property
    def deciding_alerts(self) -> list[IncidentAlert]:
        """Its pages, or its tickets if it has no page. A ticket that goes on does not keep it open."""
        return [each for each in self.alerts.values() if each.severity == self.severity]

    @property
    def is_firing(self) -> bool:
        """Whether one of its pages fires, or one of its tickets if it has no page."""
        return any(each.ended_at is None for each in self.deciding_alerts)

    @property
    def quiet_since(self) -> float | None:
        """Time of the end of the last of these; None while one fires, or without alerts."""
        if self.is_firing or not self.deciding_alerts:
            return None
        return max(each.ended_at or 0.0 for each in self.deciding_alerts)

    @property
    def lost_nano_dollars(self) -> int | None:
        """Price of the failed requests, had they been answered as those of the day before; None if it is not known."""
        price = self.request_nano_dollars
        return None if price is None else price * self.failed

    @property
    def all_labels(self) -> list[Mapping[str, str]]:
        """Its scope, and the labels of its alerts."""
        return [self.scope, *(each.labels for each in self.alerts.values())]


def share_scope(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return whether two scopes have a part of the fleet in common. Those without any share the whole fleet."""
    parts = [
        {name: labels[name] for name in SCOPE_LABELS if name in labels} for labels in (one, other)
    ]
    if not (parts[0] and parts[1]):
        return parts[0] == parts[1]
    return any(parts[1].get(name) == value for name, value in parts[0].items())


def add_entries(incident: Incident, entries: Iterable[TimelineEntry]) -> Incident:
    """Append entries that the timeline does not have yet, in the order of their times."""
    known = {each.reference for each in incident.entries if each.reference}
    new = sorted(
        (each for each in entries if not each.reference or each.reference not in known),
        key=lambda each: each.at,
    )
    room = MAX_ENTRIES - len(incident.entries)
    if not new or room <= 0:
        return incident
    if len(new) >= room:
        text = f"The timeline has {MAX_ENTRIES} entries. Later ones are only in their sources."
        new = [*new[: room - 1], TimelineEntry(at=new[room - 1].at, source="argosy", text=text)]
    return msgspec.structs.replace(incident, entries=(*incident.entries, *new))
