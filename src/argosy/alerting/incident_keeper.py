"""Keeps the incidents of a fleet: opens and closes them by its alerts, and collects what is known about them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import msgspec
import structlog

from argosy.alerting.alert_records import AlertRecords
from argosy.alerting.incident_records import IncidentRecords
from argosy.alerting.objective_alerts import ObjectiveAlerts
from argosy.alerting.traffic_watch import TrafficWatch
from argosy.policy.alerting import Alert
from argosy.policy.detection import EVENTS, WINDOW_S, PastChange, Slice, rank_changes
from argosy.policy.incidents import (
    Incident,
    PoolVersions,
    RollbackAdvice,
    TimelineEntry,
    add_entries,
    judge_rollback,
    select_causes,
    update_incidents,
)
from argosy.policy.objectives import BudgetImpact
from argosy.process import run_in_daemon_thread
from argosy.store import AuditEntry, FleetEvent, FleetStore, Store, StoreError, UsageFilter
from argosy.telemetry import RepeatedWarning

INTERVAL_S = 10.0
MAX_READ = 500
"""Events and audit entries that are read for an incident."""
MAX_CHANGES = 10
MAX_SLICES = 12
MAX_HEALTHY = 20
MAX_BUDGETS = 10
MIN_SCORE = 0.03
"""Score up to which a change does not explain an incident: that of changes of other parts of the fleet."""
WINDOW_OF_ALERT_S = 300.0
"""Time before an alert of an objective in which its misses began."""
MIN_LOCATED_EXCESS = 0.8
"""Part of the excess from which a model is the scope of an objective that names none."""
DAY_S = 86_400.0
RECENT_S = 900.0
"""Time in which few failures make a replica or a tenant healthy."""
T = TypeVar("T")
_OBJECTIVE_LABELS = frozenset({"alertname", "severity", "objective", "tier"})
_ALERT_EVENTS = frozenset({"alert_fires", "alert_ended"})
_NO_CHANGES = _ALERT_EVENTS | {"scaling_decision", "store_unavailable", "rollout_gate"}
"""Kinds of events that are no changes of the fleet."""
_OWN_DECISIONS = "incident."
"""Beginning of the reason of events about incidents themselves."""
_AUDITED_DECISIONS = ("fleet.", "pool.", "rollout.", "incident.")
"""Actions that the event log has as well."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.alerting")

ReadVersions = Callable[[], Sequence[PoolVersions]]
"""Returns the pools whose version has changed lately. Blocks on the store."""
RollBack = Callable[[RollbackAdvice, str], None]
"""Rolls a pool back, with the reason. Blocks on the store. Raises ConflictError if it cannot be."""


class IncidentKeeper:
    """Keeps the incidents, if this process evaluates the alerts. Use it from one event loop.

    Args:
        alerts: The alerts.
        store: The store of the incidents and of the audit log.
        fleet: Name of the fleet; empty for gateways without one.
        watch: The traffic.
        list_serving: Returns the names of the replicas that serve now.
        objectives: The objectives; None without any.
        events: Store and name of the fleet whose events belong to the timeline; None without a fleet.
        read_versions: Reads the latest versions, for rollbacks.
        roll_back: Rolls a pool back.
        clock: Returns seconds since the epoch.
    """

    def __init__(
        self,
        alerts: AlertRecords,
        store: Store,
        fleet: str,
        watch: TrafficWatch,
        *,
        list_serving: Callable[[], Collection[str]],
        objectives: ObjectiveAlerts | None = None,
        events: tuple[FleetStore, str] | None = None,
        read_versions: ReadVersions = tuple,
        roll_back: RollBack | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._alerts = alerts
        self._store = store
        self._records = IncidentRecords(store.fleets, fleet)
        self._watch = watch
        self._list_serving = list_serving
        self._objectives = objectives
        self._events = events
        self._read_versions = read_versions
        self._roll_back = roll_back
        self._clock = clock
        self._store_problem, self._source_problem = RepeatedWarning(log), RepeatedWarning(log)

    async def run(self) -> None:
        """Keep the incidents until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                if self._alerts.is_held:
                    await self.update()
            except StoreError as error:
                self._store_problem.report("incidents_not_saved", str(error))
            except Exception:
                log.exception("incident_update_failed")

    async def update(self) -> None:
        """Update the incidents once.

        Raises:
            StoreError: The store cannot be used.
        """
        now, alerts = self._clock(), self._alerts.state.alerts
        onsets = {
            fingerprint: min(
                (each.onset for each in self._watch.deviations_of(alert.labels)), default=now
            )
            for fingerprint, alert in alerts.items()
        }
        known = await run_in_daemon_thread(self._records.list_all)
        is_open = {each.number for each in known if each.is_open}
        next_number = max((each.number for each in known), default=0) + 1
        changed = update_incidents(
            [each for each in known if each.is_open],
            alerts,
            onsets,
            next_number,
            now,
            self._locate(alerts),
        )
        for incident in changed:
            if incident.number not in is_open:
                await self._open(incident)
            elif incident.is_open:
                await run_in_daemon_thread(
                    self._records.change,
                    incident.number,
                    lambda old, new=incident: _merge(old, new),
                )
            else:
                await self._close(incident)
        current = [
            each for each in await run_in_daemon_thread(self._records.list_all) if each.is_open
        ]
        self._watch.is_learning = not any(each.severity == "page" for each in current)
        for incident in current:
            await self._collect(incident, alerts, now)

    async def _open(self, incident: Incident) -> None:
        if await run_in_daemon_thread(self._records.add, incident):
            log.warning(
                "incident_opened",
                incident=incident.name,
                title=incident.title,
                scope=dict(incident.scope),
            )

    async def _close(self, incident: Incident) -> None:
        await run_in_daemon_thread(
            self._records.change,
            incident.number,
            lambda old: msgspec.structs.replace(
                _merge(old, incident), closed_at=incident.closed_at, closed_by=incident.closed_by
            ),
        )
        log.info("incident_closed", incident=incident.name, title=incident.title)

    def _locate(self, alerts: Mapping[str, Alert]) -> dict[str, dict[str, str]]:
        """Return the model with the excess of each objective whose labels name no part of the fleet."""
        located = {}
        for fingerprint, alert in alerts.items():
            labels = alert.labels.keys()
            if alert.is_firing and "objective" in labels and labels <= _OBJECTIVE_LABELS:
                parts = self._watch.monitor.excess_by_model(alert.started_at - WINDOW_OF_ALERT_S)
                model = max(parts, key=lambda each: parts[each], default="")
                if model and parts[model] >= MIN_LOCATED_EXCESS:
                    located[fingerprint] = {"model": model}
        return located

    # --- evidence --------------------------------------------------------------------------------

    async def _collect(self, incident: Incident, alerts: Mapping[str, Alert], now: float) -> None:
        """Add what is known by now to an open incident."""
        events, missing_events = await self._read(self._read_events, incident.onset - DAY_S)
        audit, missing_audit = await self._read(self._read_audit, incident.onset - DAY_S)
        changes = [*map(_change_of_event, _select(events)), *map(_change_of_audit, audit)]
        scope = dict(incident.scope)
        for labels in incident.all_labels:
            scope = {**labels, **scope}
        ranked = [
            each
            for each in rank_changes(select_causes(incident, changes), incident.onset, scope)
            if each.score > MIN_SCORE
        ][:MAX_CHANGES]
        begin = incident.onset - WINDOW_S
        entries = [
            _entry_of_event(each)
            for each in events
            if each.at >= begin and each.kind not in _ALERT_EVENTS
        ]
        entries += [_entry_of_audit(each) for each in audit if each.at >= begin]
        event, slices = self._find_slices(incident)
        model = scope.get("model", "")
        requests, failed, counts = self._watch.monitor.count_since(model, incident.onset)
        _, _, recent = self._watch.monitor.count_since(model, now - RECENT_S)
        evidence = msgspec.structs.replace(
            incident,
            changes=tuple(ranked),
            slices=tuple(slices),
            sliced_event=event,
            requests=requests,
            failed=failed,
            tenants=tuple(
                value
                for (name, value), count in sorted(counts.items())
                if name == "tenant" and count[0]
            )[:MAX_HEALTHY],
            budgets=await self._read_budgets(incident, scope, now),
            request_nano_dollars=await self._read_price(incident, model),
            healthy=self._find_healthy(alerts, recent),
            missing=tuple(
                name
                for name, is_missing in (
                    ("fleet events", missing_events),
                    ("audit log", missing_audit),
                )
                if is_missing
            ),
        )
        evidence = await self._advise(evidence, alerts, now)
        entries += evidence.entries[len(incident.entries) :]

        def update(old: Incident) -> Incident:
            if not old.is_open:
                return old
            return add_entries(_with_evidence(old, evidence), entries)

        await run_in_daemon_thread(self._records.change, incident.number, update)

    async def _read(self, read: Callable[[float], list[T]], since: float) -> tuple[list[T], bool]:
        try:
            return await run_in_daemon_thread(read, since), False
        except StoreError as error:
            self._source_problem.report("incident_source_unreadable", str(error))
            return [], True

    def _read_events(self, since: float) -> list[FleetEvent]:
        if self._events is None:
            return []
        store, fleet = self._events
        return store.list_events(fleet, since=since, limit=MAX_READ)

    def _read_audit(self, since: float) -> list[AuditEntry]:
        entries = self._store.audit_log.list_entries(since=since, limit=MAX_READ)
        return [each for each in entries if not each.action.startswith(_AUDITED_DECISIONS)]

    async def _read_budgets(
        self, incident: Incident, scope: Mapping[str, str], now: float
    ) -> tuple[BudgetImpact, ...]:
        """Return what the objectives of an incident have lost; what is known already if the store cannot be read."""
        if self._objectives is None:
            return ()
        named = {each["objective"] for each in incident.all_labels if "objective" in each}
        try:
            found = await self._objectives.read_impact(scope.get("model"), incident.onset, now)
        except StoreError as error:
            self._source_problem.report("incident_source_unreadable", str(error))
            return incident.budgets
        found.sort(key=lambda each: (each.objective not in named, -each.misses))
        return tuple(each for each in found if each.misses or each.objective in named)[:MAX_BUDGETS]

    async def _read_price(self, incident: Incident, model: str) -> int | None:
        """Return the mean price of a request of the day before an incident. It is read once."""
        if incident.request_nano_dollars is not None:
            return incident.request_nano_dollars
        where = UsageFilter(since=incident.onset - DAY_S, until=incident.onset, model=model or None)
        try:
            rows = await run_in_daemon_thread(self._store.ledger.report, (), where)
        except (StoreError, ValueError) as error:
            self._source_problem.report("incident_source_unreadable", str(error))
            return None
        requests = sum(each.requests for each in rows)
        return sum(each.nano_dollars for each in rows) // requests if requests else 0

    def _find_slices(self, incident: Incident) -> tuple[str, list[Slice]]:
        """Return the event of the incident's models whose excess is concentrated most, and where it is."""
        best: tuple[float, str, list[Slice]] = 0.0, "", []
        models = sorted({each["model"] for each in incident.all_labels if "model" in each})
        for model in models:
            for kind in EVENTS:
                slices = self._watch.monitor.slices(model, kind.name, incident.onset)
                if slices and slices[0].share > slices[0].share_before:
                    first = slices[0]
                    weight = (first.share - first.share_before) * max(
                        0.05, first.excess_share - first.request_share
                    )
                    if weight > best[0]:
                        versions = [
                            each for each in slices[MAX_SLICES:] if each.dimension == "version"
                        ]
                        best = weight, kind.description, [*slices[:MAX_SLICES], *versions]
        return best[1], best[2]

    def _find_healthy(
        self, alerts: Mapping[str, Alert], counts: Mapping[tuple[str, str], tuple[int, int]]
    ) -> tuple[str, ...]:
        ill = {
            value for each in alerts.values() if each.is_firing for value in each.labels.values()
        }
        serving = self._list_serving()
        healthy = [
            f"{name} {value}"
            for (name, value), (failed, requests) in sorted(counts.items())
            if (name == "tenant" or (name == "replica" and value in serving))
            and value
            and value not in ill
            and failed * 50 <= requests
        ]
        return tuple(healthy[:MAX_HEALTHY])

    # --- rollback --------------------------------------------------------------------------------

    async def _advise(
        self, incident: Incident, alerts: Mapping[str, Alert], now: float
    ) -> Incident:
        """Return the incident with advice about a rollback, which is carried out if nothing speaks against it."""
        if incident.rollback is not None and incident.rollback.is_done:
            return incident
        try:
            versions = await run_in_daemon_thread(self._read_versions)
            rolled_back = await run_in_daemon_thread(self._records.read_rollbacks)
            versions = [
                msgspec.structs.replace(each, last_rollback_at=rolled_back.get(each.pool))
                for each in versions
            ]
            pages = [
                each.labels
                for each in alerts.values()
                if each.is_firing and each.severity == "page"
            ]
            parts = self._watch.monitor.excess_by_model(incident.onset)
            advice = judge_rollback(incident, versions, pages, now, parts)
        except (StoreError, ValueError) as error:
            self._source_problem.report("incident_source_unreadable", str(error))
            return incident
        if advice is None or advice.obstacles or self._roll_back is None:
            return msgspec.structs.replace(incident, rollback=advice)
        reason = f"{incident.name}: {' '.join(advice.reasons)}"
        try:
            await run_in_daemon_thread(self._roll_back, advice, reason)
        except StoreError as error:
            obstacle = f"The rollback was refused: {error}"
            return msgspec.structs.replace(
                incident, rollback=msgspec.structs.replace(advice, obstacles=(obstacle,))
            )
        log.warning("incident_rolled_back", incident=incident.name, pool=advice.pool)
        entry = TimelineEntry(
            at=now,
            source="rollback",
            text=f"Rolled back {advice.pool}. {' '.join(advice.reasons)}",
            actor="argosy",
            reference=f"rollback/{advice.rollout}",
        )
        done = msgspec.structs.replace(advice, is_done=True)
        return add_entries(msgspec.structs.replace(incident, rollback=done), [entry])


_EVIDENCE = (
    "changes",
    "slices",
    "sliced_event",
    "requests",
    "failed",
    "tenants",
    "budgets",
    "request_nano_dollars",
    "healthy",
    "missing",
    "rollback",
)


def _with_evidence(old: Incident, new: Incident) -> Incident:
    return msgspec.structs.replace(old, **{name: getattr(new, name) for name in _EVIDENCE})


def _merge(old: Incident, new: Incident) -> Incident:
    """Return an incident as it is stored, with the alerts and entries of its update."""
    known = {(each.at, each.text) for each in old.entries}
    merged = msgspec.structs.replace(old, alerts=new.alerts, severity=new.severity)
    return add_entries(merged, [each for each in new.entries if (each.at, each.text) not in known])


def _select(events: Sequence[FleetEvent]) -> list[FleetEvent]:
    return [
        each
        for each in events
        if each.kind not in _NO_CHANGES and not each.reason.startswith(_OWN_DECISIONS)
    ]


def _describe_event(event: FleetEvent) -> str:
    subject = event.replica or event.pool
    parts = [event.kind.replace("_", " "), subject, event.outcome[:200], event.reason[:500]]
    return ": ".join(each for each in parts if each)


def _change_of_event(event: FleetEvent) -> PastChange:
    scope = {"pool": event.pool, "replica": event.replica}
    return PastChange(
        at=event.at,
        kind=event.kind,
        text=_describe_event(event),
        scope={name: value for name, value in scope.items() if value},
        source="fleet_events",
    )


def _change_of_audit(entry: AuditEntry) -> PastChange:
    return PastChange(
        at=entry.at,
        kind=entry.action,
        text=f"{entry.action} of {entry.subject}",
        actor=entry.actor,
        scope={"tenant": entry.organisation} if entry.organisation else {},
        source="audit",
    )


def _entry_of_event(event: FleetEvent) -> TimelineEntry:
    return TimelineEntry(
        at=event.at, source="event", text=_describe_event(event), reference=f"event/{event.number}"
    )


def _entry_of_audit(entry: AuditEntry) -> TimelineEntry:
    return TimelineEntry(
        at=entry.at,
        source="audit",
        text=f"{entry.action} of {entry.subject}",
        actor=entry.actor,
        reference=f"audit/{entry.entry}",
    )
