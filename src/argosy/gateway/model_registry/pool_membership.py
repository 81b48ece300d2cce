"""The replicas of a pool, which may come and go: each is probed, and what it caches is followed, while it is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from functools import partial

import structlog

from argosy.gateway.kv_events import TextBlockMaps, subscribe
from argosy.gateway.model_registry.model_entries import ReplicaEntry
from argosy.gateway.pool import (
    CoroutineFactory,
    DiscoveryMode,
    DnsDiscovery,
    Pool,
    Prober,
    ReplicaEndpoint,
    Resolver,
    run_with_restarts,
)

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

Tasks = tuple[asyncio.Task[None], ...]


class PoolMembership:
    """One pool's. Belongs to one event loop."""

    def __init__(self, pool: Pool, entries: Sequence[ReplicaEntry], resolve: Resolver) -> None:
        """The pool has the replicas of its entries already, but for those whose names are to be looked up."""
        self.pool = pool
        pool.has_pending_replicas = self._has_pending_replicas
        self._entries = {entry.name: entry for entry in entries}
        self._resolve = resolve
        self._text_block_maps = TextBlockMaps()
        self._discoveries: dict[str, tuple[DnsDiscovery, Tasks]] = {}
        """By the entry's name."""
        self._probers: dict[str, tuple[Prober, Tasks]] = {}
        """By the replica's name."""
        self._cancelled_tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Look after those that are there, and for those that are to be found."""
        for replica in self.pool.replicas.values():
            self._start_monitoring(replica)
        for entry in self._entries.values():
            if entry.config.discover is not None:
                self._start_discovery(entry, entry.config.discover)

    def apply_entries(self, entries: Sequence[ReplicaEntry]) -> None:
        """Have the replicas of these entries, and no others. Those whose entries have not changed stay."""
        before, self._entries = self._entries, {entry.name: entry for entry in entries}
        there: dict[str, Collection[str]] = {}
        for name, entry in before.items():
            if name in self._entries and self._entries[name].is_equivalent(entry):
                self._entries[name] = entry
            else:
                there[name] = self._remove_entry(entry)
        for name, entry in self._entries.items():
            if before.get(name) is not entry:
                self._add_entry(
                    entry, there.get(name, ()) if entry.has_same_hostname(before.get(name)) else ()
                )

    async def wait_first_probes(self) -> None:
        """Wait until names have been looked up, and each replica has been probed, once."""
        for discovery, _ in tuple(self._discoveries.values()):
            await discovery.first_lookup_done.wait()
        for prober, _ in tuple(self._probers.values()):
            await prober.first_probe_done.wait()

    def add_replica(self, replica: ReplicaEndpoint) -> None:
        """There is one more: it gets requests once it is well."""
        self.pool.add(replica)
        self._start_monitoring(replica)
        log.info("replica_added", model=self.pool.model, replica=replica.name)

    def remove_replica(self, name: str) -> None:
        """It gets no request any more. What runs there goes on, and its connections are closed as that ends."""
        self._stop_monitoring(self.pool.remove(name, time.monotonic()))
        log.info("replica_removed", model=self.pool.model, replica=name)

    async def close(self) -> None:
        """Look after none of them any more, and keep no connection to any."""
        for _, tasks in self._discoveries.values():
            self._cancel(tasks)
        for replica in self.pool.replicas.values():
            self._stop_monitoring(replica)
        await asyncio.gather(*self._cancelled_tasks, return_exceptions=True)

    # --- in parts --------------------------------------------------------------------------------

    def _start_monitoring(self, replica: ReplicaEndpoint) -> None:
        prober = Prober(replica)
        tasks = _start_tasks(
            partial(_run_prober, prober), partial(subscribe, replica, self._text_block_maps)
        )
        self._probers[replica.name] = prober, tasks

    def _stop_monitoring(self, replica: ReplicaEndpoint) -> None:
        if replica.name in self._probers:
            self._cancel(self._probers.pop(replica.name)[1])
        replica.upstream.close()

    def _add_entry(self, entry: ReplicaEntry, addresses: Collection[str]) -> None:
        """An entry is new; its name is known to have the addresses that are `there`."""
        discover = entry.config.discover
        if discover is None:
            self.add_replica(entry.build_replica())
            return
        for address in addresses:
            self.add_replica(entry.build_replica(address))
        self._start_discovery(entry, discover, addresses)

    def _remove_entry(self, entry: ReplicaEntry) -> Collection[str]:
        """An entry is no longer there; the addresses that its name had."""
        if entry.config.discover is None:
            self.remove_replica(entry.name)
            return ()
        discovery, tasks = self._discoveries.pop(entry.name)
        self._cancel(tasks)
        for address in discovery.addresses:
            self.remove_replica(entry.replica_name(address))
        return discovery.addresses

    def _start_discovery(
        self, entry: ReplicaEntry, mode: DiscoveryMode, addresses: Collection[str] = ()
    ) -> None:
        discovery = DnsDiscovery(
            entry.endpoint.host,
            mode,
            self._resolve,
            on_added=lambda address: self.add_replica(entry.build_replica(address)),
            on_removed=lambda address: self.remove_replica(entry.replica_name(address)),
            known=addresses,
        )
        self._discoveries[entry.name] = discovery, _start_tasks(discovery.run)

    def _has_pending_replicas(self) -> bool:
        discoveries, probers = self._discoveries.values(), self._probers.values()
        return any(not one.first_lookup_done.is_set() for one, _ in discoveries) or any(
            not one.first_probe_done.is_set() for one, _ in probers
        )

    def _cancel(self, tasks: Tasks) -> None:
        for task in tasks:
            self._cancelled_tasks.add(task)
            task.add_done_callback(self._cancelled_tasks.discard)
            task.cancel()


def _start_tasks(*factories: CoroutineFactory) -> Tasks:
    return tuple(asyncio.create_task(run_with_restarts(care)) for care in factories)


async def _run_prober(prober: Prober) -> None:
    await prober.probe()
    await prober.run()
