"""Term of a leading controller, in which it observes the fleet, reconciles it, acts, publishes, and records."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog

from argosy.alerting import (
    AlertLoop,
    AlertRecords,
    BackupAlerts,
    BudgetAlerts,
    IncidentKeeper,
    MachineAlerts,
    ObjectiveAlerts,
    OrderBook,
    ReceivedAlerts,
    TrafficWatch,
)
from argosy.controller_keeper import LOG_NAME
from argosy.deployment import (
    GATEWAY_POOL,
    REQUEST_SETTINGS,
    AlertingConfig,
    FleetRecords,
    ObjectiveReader,
    ObservedRevision,
    ReplicaRecord,
    list_known_revisions,
)
from argosy.fleet.control.declared_fleet import DeclaredFleet
from argosy.fleet.control.environment import read_capacity
from argosy.fleet.control.fleet_alerts import FleetAlerts
from argosy.fleet.control.fleet_autoscaler import FleetAutoscaler
from argosy.fleet.control.fleet_incidents import (
    FleetTraffic,
    read_accepted_versions,
    read_pool_versions,
    roll_back,
)
from argosy.fleet.control.fleet_observer import FleetObserver
from argosy.fleet.control.fleet_rollouts import FleetRollouts
from argosy.fleet.control.gateway_publisher import GatewayPublisher
from argosy.fleet.control.hardware_meter import HardwareMeter
from argosy.fleet.control.leadership import Leadership
from argosy.fleet.control.replica_actions import ReplicaActions
from argosy.fleet.control.replica_log_recorder import ReplicaLogRecorder
from argosy.fleet.control.term_journal import FleetContext, TermJournal
from argosy.gateway import FleetPools, ModelStartup
from argosy.policy.alerting import Alert
from argosy.policy.reconciliation import (
    SERVING_PHASES,
    ObservedFleet,
    PhaseReport,
    ReplicaPhase,
    WarmUpState,
    continue_observation,
    parse_replica_name,
    reconcile,
)
from argosy.process import run_in_daemon_thread
from argosy.store import DeposedError, FleetLease, StoreError
from argosy.version import VERSION

DAY_S = 86_400.0
OBSERVATION_INTERVAL_S = 1.0
MAX_OBSERVATION_GAP_S = 5.0
"""Time without observation after which the silence of a replica is no evidence against it."""
EVENT_PRUNE_INTERVAL_S = 600.0
"""Interval at which old events are deleted."""
_LEAVING = frozenset({ReplicaPhase.DRAINING, ReplicaPhase.STOPPED})

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.fleet")


class LeaderTerm:
    """Term of a leader, with all that it knows of the fleet."""

    def __init__(self, context: FleetContext, leadership: Leadership) -> None:
        self._context = context
        self._leadership = leadership
        self._journal = TermJournal(context, leadership)
        self._records = self._journal.records
        self._publisher = GatewayPublisher(self._context.store.gateways, self._journal.wake)
        self._observer = FleetObserver(self._journal, self._publisher, context.create_launcher)
        self._autoscaler = FleetAutoscaler(self._journal, self._observer, self._publisher)
        self._rollouts = FleetRollouts(self._journal, self._observer, self._publisher)
        self._hardware = HardwareMeter(self._journal, self._observer, self._publisher)
        self._logs = ReplicaLogRecorder(
            self._journal,
            self._observer,
            self._publisher,
            context.list_watched_logs,
            context.folder / LOG_NAME,
        )
        self._actions = ReplicaActions(self._journal, self._observer, self._logs)
        self._background: set[asyncio.Task[None]] = set()
        self._read_revision = 0
        """Number of the revision that was read last, also if it is invalid."""
        self._declared: DeclaredFleet | None = None
        self._pools = FleetPools(fleet=self._context.fleet)
        self._observing_since = self._last_observed_at = self._context.clock()
        self._events_pruned_at = float("-inf")
        self._machine = read_capacity()

    async def run(self, lease: FleetLease, *, until_empty: bool) -> None:
        """Lead until cancelled, or until the fleet is empty.

        Raises:
            DeposedError, StaleEpochError: Another controller leads by now.
        """
        await self._journal.load()
        for record in list(self._records.replicas.values()):
            if record.warm_up is WarmUpState.RUNNING:  # that of the last leader
                self._records.replicas[record.name] = msgspec.structs.replace(
                    record, warm_up=WarmUpState.NOT_STARTED
                )
        self._pools = FleetPools(fleet=self._context.fleet, epoch=lease.epoch)
        self._journal.record_event("controller_leads", reason=f"epoch {lease.epoch}")
        self._run_in_background(self._publisher.run())
        self._run_in_background(self._rollouts.run())
        self._run_in_background(self._logs.run())
        for work in self._build_alerting(lease):
            self._run_in_background(work)
        journal = self._journal
        while True:
            journal.wake.clear()
            wake_at: float | None = None
            is_empty = False
            try:
                wake_at = await self._reconcile()
                is_empty = self._is_empty()  # as it is saved now
                await journal.save()
                if outage := self._leadership.take_outage():
                    journal.record_event("store_unavailable", reason=outage)
                self._rollouts.on_saved()
                await self._hardware.save()
                await self._prune_events()
            except DeposedError:
                raise
            except StoreError as error:
                log.warning("store_unavailable", reason=str(error))
            if journal.error is not None:
                raise journal.error
            if until_empty and is_empty:
                return
            interval_s = OBSERVATION_INTERVAL_S
            if wake_at is not None:
                interval_s = min(interval_s, max(0.0, wake_at - self._context.clock()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await journal.wake.wait()

    async def close(self) -> None:
        """End the actions and checks of this term. Replicas run on."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._actions.close()
        await self._logs.close()
        await self._rollouts.close()
        await self._observer.close()

    # --- one round -------------------------------------------------------------------------------

    async def _reconcile(self) -> float | None:
        """Observe, decide and act once. Returns when to do it again even if nothing changes."""
        declared = await self._read_declaration()
        if declared is None:
            return None
        busy_pools = self._actions.busy_pools
        unavailable = await self._observer.list_replicas(declared, self._leadership.lease.epoch)
        self._logs.record_ends()
        now = self._context.clock()
        self._observing_since = continue_observation(
            self._observing_since, self._last_observed_at, now, MAX_OBSERVATION_GAP_S
        )
        self._last_observed_at = now
        replicas = tuple(self._observer.observe(declared, now))
        listed = [each for _, each in self._observer.listed]
        self._hardware.record(declared, now)
        declared.hold_renewals(listed)
        self._autoscaler.decide(declared, self._rollouts.running, now)
        counts = self._autoscaler.desired_counts(declared)
        await self._rollouts.decide(declared, replicas, counts, now)
        undecided = self._rollouts.undecided
        observed = ObservedFleet(
            replicas=tuple(each for each in replicas if each.pool not in undecided),
            observing_since=self._observing_since,
            unavailable_launchers=unavailable,
        )
        gateways = [each for each in listed if each.pool == GATEWAY_POOL]
        desired = declared.desired_state(counts, self._rollouts.targets, undecided, gateways)
        result = reconcile(desired, observed, now)
        self._record_phases(result.phases, declared, now)
        self._records.observed = ObservedRevision(
            epoch=self._leadership.lease.epoch,
            revision=declared.number,
            machine=self._machine,
            version=VERSION,
        )
        self._actions.start(result.actions, declared, busy_pools)
        if not undecided:
            self._publish(declared)
        self._context.on_reconciled(observed, result)
        return result.wake_at

    async def _read_declaration(self) -> DeclaredFleet | None:
        """Return the revision in force, or the last valid one; None before the first."""
        store = self._context.store.fleets
        revision = await run_in_daemon_thread(store.latest_revision, self._context.fleet)
        if revision is None or revision.number == self._read_revision:
            return self._declared
        replicas = tuple(self._records.replicas.values())
        known = await run_in_daemon_thread(
            list_known_revisions, store, self._context.fleet, replicas
        )
        self._read_revision = revision.number
        try:
            declared = DeclaredFleet(revision, known, self._context.folder, self._context.store_url)
        except ValueError as error:
            log.error("declaration_invalid", revision=revision.number, reason=str(error))  # noqa: TRY400 - the reason suffices
            return self._declared
        self._declared = declared
        log.info("revision_in_force", fleet=self._context.fleet, revision=revision.number)
        self._journal.record_event("revision_in_force", reason=f"revision {revision.number}")
        return declared

    def _record_phases(
        self, phases: Mapping[str, PhaseReport], declared: DeclaredFleet, now: float
    ) -> None:
        """Keep the phases for `argosy status`, and record their changes as events."""
        pending, self._records.pending = self._records.pending, {}
        for name, report in phases.items():
            record = self._records.replicas.get(name)
            if record is None:
                if report.phase is not ReplicaPhase.PENDING:
                    continue  # removed since it was observed
                self._records.pending[name] = _describe_pending(
                    name, report, pending.get(name), now
                )
                continue
            is_new = report.phase is not record.phase or not record.phase_since
            is_turn = {report.phase, record.phase} == SERVING_PHASES  # gateways log each sleep
            if (is_new and not is_turn) or report.problem is not record.problem:
                self._journal.record_event(
                    "replica_phase",
                    record.pool,
                    name,
                    reason=report.reason,
                    outcome=report.phase,
                )
                write = log.warning if report.phase is ReplicaPhase.FAILED else log.info
                write(
                    "replica_phase_changed",
                    replica=name,
                    phase=report.phase,
                    previous=record.phase,
                    reason=report.reason,
                )
            self._records.replicas[name] = msgspec.structs.replace(
                record,
                phase=report.phase,
                problem=report.problem,
                reason=report.reason
                + self._estimate(record, report, declared, now)
                + self._actions.describe_refusal(name),
                phase_since=now if is_new else record.phase_since,
            )

    def _estimate(
        self, record: ReplicaRecord, report: PhaseReport, declared: DeclaredFleet, now: float
    ) -> str:
        """Return what completes the reason of a first start: how long it will take."""
        if report.phase is not ReplicaPhase.LOADING or record.ready_at is not None:
            return ""
        reading = self._observer.reading(record.name)
        if report.problem is not None or (reading is not None and reading.ready_problem):
            return ""
        expected_s = self._records.expected_start_s(declared.source(record.pool))
        if expected_s is None:
            return ""
        left_s = record.started_at + expected_s - now
        return f"; about {max(1, round(left_s))} s left" if left_s > -expected_s else ""

    # --- publication and records -----------------------------------------------------------------

    def _publish(self, declared: DeclaredFleet) -> None:
        """Publish the rotation to the gateways if it has changed."""
        members = [
            record
            for _, record in sorted(self._records.replicas.items())
            if record.in_rotation and record.url
        ]
        members, versions = self._rollouts.publish(declared, members)
        pools = msgspec.structs.replace(
            self._pools,
            models=declared.published_models(members),
            versions=versions,
            **{name: getattr(declared.config, name) for name in REQUEST_SETTINGS},
            objectives=declared.config.objectives,
            serving_replicas=declared.count_by_model(self._autoscaler.desired_counts(declared)),
            desired_replicas=self._autoscaler.published_counts(),
            pool_models={pool.name: pool.model for pool in declared.config.pools},
            startups=_find_startups(declared, self._records),
        )
        if not self._pools.version or pools != self._pools:
            self._pools = msgspec.structs.replace(pools, version=self._pools.version + 1)
            self._publisher.publish(self._pools)

    def _is_empty(self) -> bool:
        return (
            self._declared is not None
            and not (self._declared.config.pools or self._declared.config.gateways)
            and not (self._records.replicas or self._records.pending)
            and self._observer.is_empty
        )

    async def _prune_events(self) -> None:
        """Delete old events and logs at an interval.

        Raises:
            DeposedError: Another controller leads by now.
            StoreError: The store cannot be used. A later call tries again.
        """
        now = self._context.clock()
        if self._declared is None or now - self._events_pruned_at < EVENT_PRUNE_INTERVAL_S:
            return
        settings = self._declared.config.controller
        lease, keep_s = self._leadership.lease, settings.keep_events_days * DAY_S
        await run_in_daemon_thread(
            partial(self._context.store.replica_logs.prune, lease, keep_s=keep_s)
        )
        deleted = await run_in_daemon_thread(
            partial(
                self._context.store.fleets.prune_events,
                lease,
                keep_s=keep_s,
                max_count=settings.max_events,
            )
        )
        self._events_pruned_at = now
        if deleted:
            log.info("fleet_events_deleted", fleet=self._context.fleet, count=deleted)

    def _build_alerting(self, lease: FleetLease) -> list[Coroutine[Any, Any, None]]:
        """Return the evaluation of alerts, and the upkeep of incidents."""
        store, fleet, clock = self._context.store, self._context.fleet, self._context.clock
        fleets = store.fleets
        alerts = AlertRecords(fleets, fleet, lease.holder, is_leader=True)
        watch = TrafficWatch(
            *(FleetTraffic(self._publisher).read, fleets, fleet, self._read_alerting),
            read_accepted=partial(read_accepted_versions, fleets, fleet),
        )
        objectives = ObjectiveAlerts(
            ObjectiveReader(store.objective_hours, fleet),
            lambda: (
                []
                if self._declared is None
                else self._declared.config.objectives.build_objectives()
            ),
        )
        incidents = IncidentKeeper(
            alerts,
            store,
            fleet,
            watch,
            list_serving=self._list_serving,
            objectives=objectives,
            events=(fleets, fleet),
            read_versions=partial(read_pool_versions, fleets, fleet),
            roll_back=partial(roll_back, fleets, fleet),
            clock=clock,
        )
        sources = [
            FleetAlerts(self._journal, lambda: self._declared).read,
            MachineAlerts(store.gateways, self._context.folder, self._find_certificate).read,
            watch.read,
            BackupAlerts(fleets).read,
            BudgetAlerts(store.ledger, store.limits_and_prices).read,
            objectives.read,
            ReceivedAlerts(fleets, fleet).read,
        ]
        loop = AlertLoop(
            alerts,
            OrderBook(fleets, fleet, clock),
            sources,
            self._read_alerting,
            on_changed=self._record_alerts,
            clock=clock,
        )
        return [loop.run(), incidents.run()]

    def _list_serving(self) -> set[str]:
        return {
            name for name, each in self._records.replicas.items() if each.phase in SERVING_PHASES
        }

    def _read_alerting(self) -> AlertingConfig:
        return AlertingConfig() if self._declared is None else self._declared.config.alerting

    def _find_certificate(self) -> Path | None:
        tls = None if self._declared is None else self._declared.config.tls
        return None if tls is None else Path(tls.certificate)

    def _record_alerts(self, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            self._journal.record_event(
                "alert_fires" if alert.is_firing else "alert_ended",
                alert.labels.get("pool", ""),
                alert.labels.get("replica", ""),
                reason=alert.summary,
                outcome=alert.name,
            )
        self._journal.wake.set()

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(self._journal.on_task_ended)


def _describe_pending(
    name: str, report: PhaseReport, previous: ReplicaRecord | None, now: float
) -> ReplicaRecord:
    """Return the record of a replica of which nothing exists yet, for `argosy status`."""
    pool, generation, ordinal = parse_replica_name(name) or (name, 0, 0)
    return ReplicaRecord(
        name=name,
        pool=pool,
        generation=generation,
        ordinal=ordinal,
        launcher="",
        phase=report.phase,
        reason=report.reason,
        problem=report.problem,
        phase_since=now if previous is None else previous.phase_since,
    )


def _find_startups(declared: DeclaredFleet, records: FleetRecords) -> dict[str, ModelStartup]:
    """Return the models without a replica in the rotation that requests start, by name.

    A pool that an operator scaled to zero is not among them, because requests do not start it.
    """
    startups: dict[str, ModelStartup] = {}
    for pool in declared.config.pools:
        if not pool.scales_to_zero or pool.replicas == 0:
            continue
        replicas = [each for each in records.replicas.values() if each.pool == pool.name]
        if not any(each.in_rotation and each.url for each in replicas):
            present = [each for each in replicas if each.phase not in _LEAVING]
            scaling = records.scaling.get(pool.name)
            startups[pool.model] = _describe(
                present,
                records.expected_start_s(declared.source(pool.name)),
                is_wanted=scaling is not None and scaling.target > 0,
            )
    return startups


def _describe(
    replicas: Sequence[ReplicaRecord], expected_s: float | None, *, is_wanted: bool
) -> ModelStartup:
    starting = [each for each in replicas if each.phase is not ReplicaPhase.FAILED]
    if starting:
        started_at = min((each.started_at for each in starting if each.started_at), default=None)
        return ModelStartup(state="starting", expected_s=expected_s, started_at=started_at)
    if replicas:
        return ModelStartup(state="failing")
    return ModelStartup(state="starting" if is_wanted else "stopped", expected_s=expected_s)
