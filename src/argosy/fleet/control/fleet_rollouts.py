"""Rollouts of the pools of a fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

import structlog

from argosy.deployment import (
    ObjectiveReader,
    ReplicaRecord,
    RolloutDocuments,
    read_rollout_documents,
)
from argosy.fleet.control.declared_fleet import DeclaredFleet, VersionTarget
from argosy.fleet.control.fleet_observer import FleetObserver
from argosy.fleet.control.gateway_publisher import GatewayPublisher
from argosy.fleet.control.pool_rollout import PoolRollout, PoolSnapshot, RolloutMeans
from argosy.fleet.control.rollout_evidence import ErrorBudgetReader, OutcomePoller
from argosy.fleet.control.rollout_writer import RolloutWriter
from argosy.fleet.control.term_journal import TermJournal
from argosy.gateway import PublishedVersions
from argosy.policy.reconciliation import ObservedReplica
from argosy.policy.rollout import PoolRollouts
from argosy.process import run_in_daemon_thread

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.fleet")


class FleetRollouts:
    """Rollouts of the pools that declare them. Not thread-safe: use it from one event loop."""

    def __init__(
        self, journal: TermJournal, observer: FleetObserver, publisher: GatewayPublisher
    ) -> None:
        self._store = journal.store.fleets
        self._fleet = journal.fleet
        self._records = journal.records
        self._means = RolloutMeans(
            journal=journal,
            observer=observer,
            publisher=publisher,
            writer=RolloutWriter(journal),
            poller=OutcomePoller(publisher, journal.wake),
            budgets=ErrorBudgetReader(
                journal.store.ledger,
                ObjectiveReader(journal.store.objective_hours, journal.fleet),
            ),
        )
        self._pools: dict[str, PoolRollout] = {}
        self._invalid_documents = ""
        """Why the documents cannot be read; empty if they can."""

    @property
    def targets(self) -> Mapping[str, Sequence[VersionTarget]]:
        """Desired replicas of each version of the pools that have rollouts."""
        return {name: pool.targets for name, pool in self._pools.items() if pool.targets}

    @property
    def undecided(self) -> Collection[str]:
        """Pools about which nothing is known yet. Their replicas stay as they are, and nothing is published."""
        return {name for name, pool in self._pools.items() if not pool.targets}

    @property
    def running(self) -> Mapping[str, bool]:
        """Whether a rollout runs, for each pool that has rollouts."""
        return {name: pool.is_running for name, pool in self._pools.items()}

    async def run(self) -> None:
        """Read the measurements of the gateways until cancelled."""
        await self._means.poller.run()

    async def close(self) -> None:
        """End all checks."""
        checks = [pool.check.cancel() for pool in self._pools.values()]
        await asyncio.gather(*filter(None, checks), return_exceptions=True)

    def on_saved(self) -> None:
        """Record that the store has the evidence that the last decisions rest on."""
        for pool in self._pools.values():
            pool.evidence.on_saved()

    async def decide(
        self,
        declared: DeclaredFleet,
        replicas: Sequence[ObservedReplica],
        counts: Mapping[str, int],
        now: float,
    ) -> None:
        """Decide about all pools, and store the decisions.

        `counts` are the numbers of replicas of the pools for which an autoscaler decides.

        Raises:
            StoreError: The store cannot be used. The next call continues.
        """
        pools = {pool.name: pool for pool in declared.config.pools if pool.rollout is not None}
        for name in self._pools.keys() - pools.keys():
            self._forget(name)
        for name in pools.keys() - self._pools.keys():
            self._pools[name] = PoolRollout(name, self._means)
        try:
            documents = await run_in_daemon_thread(read_rollout_documents, self._store, self._fleet)
        except ValueError as error:
            if self._invalid_documents != str(error):
                log.error("rollout_documents_invalid", reason=str(error))  # noqa: TRY400 - the reason suffices
            self._invalid_documents = str(error)
            return
        self._invalid_documents = ""
        for name, stored in documents.items():
            if name not in pools and stored.rollouts.version:
                await self._release(stored, now)
        for name, pool in pools.items():
            stored = documents.get(name) or RolloutDocuments(
                pool=name, rollouts=PoolRollouts(pool=name)
            )
            snapshot = PoolSnapshot(
                declared=declared,
                pool=pool,
                stored=stored,
                replicas=[each for each in replicas if each.pool == name],
                needed=counts.get(name, pool.initial_replicas),
                now=now,
            )
            await self._pools[name].decide(snapshot)

    def publish(
        self, declared: DeclaredFleet, members: Sequence[ReplicaRecord]
    ) -> tuple[list[ReplicaRecord], list[PublishedVersions]]:
        """Return the members of the rotation that serve by default, and the versions of all pools with rollouts.

        The replicas of a version that a rollout adds or removes are part of its version only. All others serve by
        default, also those that are replaced without a rollout.
        """
        published = []
        in_versions: set[str] = set()
        for name, rollout in sorted(self._pools.items()):
            pool, route, record = declared.config.find_pool(name), rollout.route, rollout.record
            if pool is None or route is None:
                continue
            digests = {variant.digest for variant in route.variants}
            if record is not None:
                digests |= {record.stable, record.candidate}
            versions = {}
            for digest in sorted(digests - {route.stable}):
                generation = declared.find_generation(name, digest)
                own = [
                    each for each in members if each.pool == name and each.generation == generation
                ]
                if own:
                    versions[digest] = [declared.published_replica(each) for each in own]
                    in_versions |= {each.name for each in own}
            published.append(
                PublishedVersions(
                    model=pool.model,
                    route=route,
                    replicas=versions,
                    comparison=rollout.comparison,
                )
            )
        return [each for each in members if each.name not in in_versions], published

    async def _release(self, stored: RolloutDocuments, now: float) -> None:
        """End the rollouts of a pool that declares none any more."""
        if await self._means.writer.release(stored, now):
            self._forget(stored.pool)
        else:
            self._means.journal.wake.set()

    def _forget(self, pool: str) -> None:
        rollout, sources = self._pools.pop(pool, None), self._means.poller.sources
        if rollout is not None:
            rollout.check.cancel()
            for model, (_, evidence) in list(sources.items()):
                if evidence is rollout.evidence:
                    del sources[model]
        for name in [each for each in self._records.rollouts if each.partition("/")[2] == pool]:
            del self._records.rollouts[name]
