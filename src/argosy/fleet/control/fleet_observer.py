"""Observation of a fleet by listings of launchers, health checks, answers of gateways, and records."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from argosy.deployment import GATEWAY_POOL, ReplicaRecord
from argosy.fleet.control.declared_fleet import DeclaredFleet
from argosy.fleet.control.gateway_publisher import GatewayPublisher
from argosy.fleet.control.replica_monitor import (
    CheckPaths,
    ReplicaHealthReading,
    ReplicaMonitor,
)
from argosy.fleet.control.term_journal import LauncherFactory, TermJournal
from argosy.fleet.launchers import LaunchedReplica, Launcher, LaunchError
from argosy.policy.reconciliation import ObservedReplica, ReplicaMemory
from argosy.protocol import LoadResponse

LOAD_UPDATE_INTERVAL_S = 5.0
"""Interval at which the load of replicas is written to the store."""


class FleetObserver:
    """Observes all replicas of a fleet. Not thread-safe: use it from one event loop.

    Args:
        journal: The term, whose records it updates, and which is woken when an observation may give another result.
    """

    def __init__(
        self,
        journal: TermJournal,
        publisher: GatewayPublisher,
        create_launcher: LauncherFactory,
    ) -> None:
        self._create_launcher = create_launcher
        self._records = journal.records
        self._publisher = publisher
        self._wake = journal.wake
        self._monitor = ReplicaMonitor(journal.clock, journal.wake)
        self._launchers: dict[str, Launcher] = {}
        self._listings: dict[str, Mapping[str, LaunchedReplica]] = {}
        """Latest listing of each launcher."""
        self._tasks: list[asyncio.Task[None]] = []
        self._loads_updated_at = float("-inf")

    @property
    def is_empty(self) -> bool:
        """Whether no launcher lists a replica."""
        return not any(self._listings.values())

    @property
    def listed(self) -> Iterator[tuple[str, LaunchedReplica]]:
        """Replicas by the latest listings, each after the name of its launcher."""
        for launcher, listing in self._listings.items():
            for replica in listing.values():
                yield launcher, replica

    def forget(self, launcher: str, replica: str) -> None:
        """Leave out a replica that was removed since the last listing."""
        listing = self._listings.get(launcher, {})
        self._listings[launcher] = {
            name: listed for name, listed in listing.items() if name != replica
        }

    def reading(self, replica: str) -> ReplicaHealthReading | None:
        """Return the results of the latest checks of a replica; None if no launcher lists it."""
        found = next((each[replica] for each in self._listings.values() if replica in each), None)
        return None if found is None else self._monitor.reading(found)

    async def close(self) -> None:
        """End all checks. Replicas run on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._monitor.close()
        for launcher in self._launchers.values():
            await launcher.close()

    async def list_replicas(self, declared: DeclaredFleet, epoch: int) -> dict[str, str]:
        """Update listings and checks. Returns the launchers that cannot list their replicas, with the reason."""
        names = {
            *declared.launchers,
            *(record.launcher for record in self._records.replicas.values()),
        }
        unavailable: dict[str, str] = {}
        for name in sorted(names):
            try:
                launcher = self.launcher(name)
                if name not in self._listings:
                    # From now on the environment refuses what the last leader may still do.
                    await launcher.drain("", epoch)
                self._listings[name] = await launcher.list_replicas()
            except (LaunchError, OSError) as error:
                unavailable[name] = str(error)
        launched = [replica for _, replica in self.listed]

        def check_paths(replica: LaunchedReplica) -> CheckPaths:
            return declared.check_paths(replica.pool, replica.generation)

        self._monitor.watch(launched, check_paths)
        await self._monitor.wait_first_checks()
        return unavailable

    def launcher(self, name: str) -> Launcher:
        """Return the launcher of a name. Raises LaunchError if it cannot be used on this machine."""
        launcher = self._launchers.get(name)
        if launcher is None:
            launcher = self._launchers[name] = self._create_launcher(name)
            self._tasks.append(asyncio.create_task(self._forward_changes(launcher)))
        return launcher

    async def _forward_changes(self, launcher: Launcher) -> None:
        while True:
            await launcher.changed.wait()
            launcher.changed.clear()
            self._wake.set()

    def observe(self, declared: DeclaredFleet, now: float) -> list[ObservedReplica]:
        """Join listings, checks, records and gateways. Updates the records with what is seen."""
        updates_loads = now - self._loads_updated_at >= LOAD_UPDATE_INTERVAL_S
        if updates_loads:
            self._loads_updated_at = now
        observed = []
        own_urls: dict[str, str] = {}
        listed = {replica.name: (launcher, replica) for launcher, replica in self.listed}
        for name, (launcher, replica) in listed.items():
            reading = self._monitor.reading(replica)
            record = self._update_record(declared, launcher, replica, reading, now)
            if updates_loads and reading.load is not None:
                load = reading.load
                record = msgspec.structs.replace(
                    record,
                    running=load.running + load.waiting,
                    cached_tokens=load.kv_blocks_cached * load.block_size,
                )
            self._records.replicas[name] = record
            if record.pool == GATEWAY_POOL and reading.gateway and replica.own_url is not None:
                own_urls[reading.gateway] = replica.own_url
            observed.append(
                ObservedReplica(
                    state=replica.state,
                    reason=replica.reason,
                    exited_at=replica.exited_at,
                    start_error=replica.start_error,
                    activity=_describe_activity(replica, reading.load),
                    last_response_at=reading.last_response_at,
                    last_step_at=reading.last_step_at,
                    is_serving=reading.is_serving,
                    serving_problem=reading.ready_problem,
                    reported_state="" if reading.load is None else reading.load.state,
                    core_exit="" if reading.load is None else reading.load.last_core_exit,
                    core_exited_at=reading.core_exited_at,
                    **self._remembered(record),
                )
            )
        self._publisher.use_own_urls(own_urls)
        observed += [
            ObservedReplica(**self._remembered(record))
            for name, record in self._records.replicas.items()
            if name not in listed
        ]
        return observed

    def _update_record(
        self,
        declared: DeclaredFleet,
        launcher: str,
        replica: LaunchedReplica,
        reading: ReplicaHealthReading,
        now: float,
    ) -> ReplicaRecord:
        """Return the record of a listed replica with what is seen of it."""
        record = self._records.replicas.get(replica.name) or ReplicaRecord(
            **replica.identity, launcher=launcher
        )
        record = record.for_attempt(replica.attempt, replica.started_at)
        ready_at = record.ready_at
        if ready_at is None and (reading.is_serving or replica.has_reported_ready):
            ready_at = now
            source = declared.source(record.pool)
            if source:
                self._records.add_start_time(source, max(0.0, now - replica.started_at))
        return msgspec.structs.replace(
            record,
            launcher=launcher,
            ready_at=ready_at,
            url=replica.url or "",
            node=replica.node,
            zone=replica.zone,
            started_at=replica.started_at,
            version=reading.version or record.version,
        )

    def _remembered(self, record: ReplicaRecord) -> dict[str, Any]:
        """Return the fields of an observation that do not come from a launcher or a health check."""
        is_gateway = record.pool == GATEWAY_POOL
        view = self._publisher.worst_view(record.name)
        return {name: getattr(record, name) for name in ReplicaMemory.__struct_fields__} | {
            "gateway_status": None if view is None else view.status,
            "gateway_reason": "" if view is None else view.reason,
            "is_routed": is_gateway or self._publisher.is_routed(record.name),
            "is_routed_by_any": not is_gateway and self._publisher.is_routed_by_any(record.name),
        }


def _describe_activity(replica: LaunchedReplica, load: LoadResponse | None) -> str:
    """Return what a starting replica does, such as `loading weights, 40 %`; empty if it reports nothing.

    The launcher knows the last activity before the replica served, which is of no meaning afterwards.
    """
    activity, fraction = replica.activity, replica.progress
    if load is not None and load.startup is not None:
        activity, fraction = load.startup.activity, load.startup.fraction
    return f"{activity}, {fraction:.0%}" if activity and fraction else activity
