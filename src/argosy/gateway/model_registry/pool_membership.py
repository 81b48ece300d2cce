"""Membership of a replica pool: adding and removing replicas, and the background tasks of each replica."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from functools import partial

import structlog

from argosy.deployment import DiscoveryMode
from argosy.gateway.event_loop import CoroutineFactory, run_with_restarts
from argosy.gateway.kv_events import TextBlockMaps, subscribe
from argosy.gateway.model_registry.model_entries import ReplicaEntry
from argosy.gateway.pool import (
    DnsDiscovery,
    Pool,
    Prober,
    ReplicaEndpoint,
    Resolver,
)

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

Tasks = tuple[asyncio.Task[None], ...]


class PoolMembership:
    """Membership of one replica pool. Not thread-safe: use it from one event loop.

    Args:
        pool: Pool that already contains the replicas of `entries`, except those found by DNS discovery.
        entries: Configured replicas of the pool.
        resolve: Resolves host names to addresses.
    """

    def __init__(self, pool: Pool, entries: Sequence[ReplicaEntry], resolve: Resolver) -> None:
        self.pool = pool
        pool.has_pending_replicas = self._has_pending_replicas
        self._entries = {entry.name: entry for entry in entries}
        self._resolve = resolve
        self._text_block_maps = TextBlockMaps()
        self._discoveries: dict[str, tuple[DnsDiscovery, Tasks]] = {}
        """Discovery tasks by entry name."""
        self._probers: dict[str, tuple[Prober, Tasks]] = {}
        """Probers by replica name."""
        self._cancelled_tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start the probes and KV event subscriptions of all replicas, and DNS discovery."""
        for replica in self.pool.replicas.values():
            self._start_monitoring(replica)
        for entry in self._entries.values():
            if entry.config.discover is not None:
                self._start_discovery(entry, entry.config.discover)

    def apply_entries(self, entries: Sequence[ReplicaEntry]) -> None:
        """Replace the entries. Replicas whose entries have not changed stay in the pool."""
        previous, self._entries = self._entries, {entry.name: entry for entry in entries}
        removed_addresses: dict[str, Collection[str]] = {}
        for name, entry in previous.items():
            if name in self._entries and self._entries[name].is_equivalent(entry):
                self._entries[name] = entry
            else:
                removed_addresses[name] = self._remove_entry(entry)
        for name, entry in self._entries.items():
            if previous.get(name) is not entry:
                self._add_entry(
                    entry,
                    removed_addresses.get(name, ())
                    if entry.has_same_hostname(previous.get(name))
                    else (),
                )

    async def wait_first_probes(self) -> None:
        """Wait until each host name has been looked up once and each replica has been probed once."""
        for discovery, _ in tuple(self._discoveries.values()):
            await discovery.first_lookup_done.wait()
        for prober, _ in tuple(self._probers.values()):
            await prober.first_probe_done.wait()

    def add_replica(self, replica: ReplicaEndpoint) -> None:
        """Add a replica and start its tasks. The replica gets requests once it is ready."""
        self.pool.add(replica)
        self._start_monitoring(replica)
        log.info("replica_added", model=self.pool.model, replica=replica.name)

    def remove_replica(self, name: str) -> None:
        """Remove a replica. Its running requests continue, and its connections close when they end."""
        self._stop_monitoring(self.pool.remove(name, time.monotonic()))
        log.info("replica_removed", model=self.pool.model, replica=name)

    async def close(self) -> None:
        """Stop all background tasks and close all connections to the replicas."""
        for _, tasks in self._discoveries.values():
            self._cancel(tasks)
        for replica in self.pool.replicas.values():
            self._stop_monitoring(replica)
        await asyncio.gather(*self._cancelled_tasks, return_exceptions=True)

    # --- Internal --------------------------------------------------------------------------------

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
        """Add an entry's replicas. For an entry with discovery these are its known addresses."""
        discover = entry.config.discover
        if discover is None:
            self.add_replica(entry.build_replica())
            return
        for address in addresses:
            self.add_replica(entry.build_replica(address))
        self._start_discovery(entry, discover, addresses)

    def _remove_entry(self, entry: ReplicaEntry) -> Collection[str]:
        """Remove an entry's replicas and return the addresses that were discovered for it."""
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
        return any(not discovery.first_lookup_done.is_set() for discovery, _ in discoveries) or any(
            not prober.first_probe_done.is_set() for prober, _ in probers
        )

    def _cancel(self, tasks: Tasks) -> None:
        for task in tasks:
            self._cancelled_tasks.add(task)
            task.add_done_callback(self._cancelled_tasks.discard)
            task.cancel()


def _start_tasks(*factories: CoroutineFactory) -> Tasks:
    return tuple(asyncio.create_task(run_with_restarts(factory)) for factory in factories)


async def _run_prober(prober: Prober) -> None:
    await prober.probe()
    await prober.run()
