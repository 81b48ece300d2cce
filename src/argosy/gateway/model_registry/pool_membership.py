"""The replicas of a pool, which may come and go: each is probed, and what it caches is followed, while it is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from functools import partial

import structlog

from argosy.gateway.kv_events import TextsOf, follow
from argosy.gateway.model_registry.model_entries import Entry
from argosy.gateway.pool import (
    Care,
    Discover,
    Discovery,
    LookUp,
    Pool,
    Prober,
    Replica,
    look_after,
)

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

Tasks = tuple[asyncio.Task[None], ...]


class Members:
    """One pool's. Belongs to one event loop."""

    def __init__(self, pool: Pool, entries: Sequence[Entry], look_up: LookUp) -> None:
        """The pool has the replicas of its entries already, but for those whose names are to be looked up."""
        self.pool = pool
        pool.awaits = self._awaits
        self._entries = {entry.name: entry for entry in entries}
        self._look_up = look_up
        self._texts = TextsOf()
        self._discoveries: dict[str, tuple[Discovery, Tasks]] = {}
        """By the entry's name."""
        self._probers: dict[str, tuple[Prober, Tasks]] = {}
        """By the replica's name."""
        self._ending: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Look after those that are there, and for those that are to be found."""
        for replica in self.pool.replicas.values():
            self._look_after(replica)
        for entry in self._entries.values():
            if entry.config.discover is not None:
                self._discover(entry, entry.config.discover)

    def take(self, entries: Sequence[Entry]) -> None:
        """Have the replicas of these entries, and no others. Those whose entries have not changed stay."""
        before, self._entries = self._entries, {entry.name: entry for entry in entries}
        there: dict[str, Collection[str]] = {}
        for name, entry in before.items():
            if name in self._entries and self._entries[name].same(entry):
                self._entries[name] = entry
            else:
                there[name] = self._drop(entry)
        for name, entry in self._entries.items():
            if before.get(name) is not entry:
                self._have(entry, there.get(name, ()) if entry.same_names(before.get(name)) else ())

    async def asked(self) -> None:
        """Wait until names have been looked up, and each replica has been probed, once."""
        for discovery, _ in tuple(self._discoveries.values()):
            await discovery.answered.wait()
        for prober, _ in tuple(self._probers.values()):
            await prober.asked.wait()

    def add(self, replica: Replica) -> None:
        """There is one more: it gets requests once it is well."""
        self.pool.add(replica)
        self._look_after(replica)
        log.info("replica_added", model=self.pool.model, replica=replica.name)

    def remove(self, name: str) -> None:
        """It gets no request any more. What runs there goes on, and its connections are closed as that ends."""
        self._leave(self.pool.remove(name, time.monotonic()))
        log.info("replica_removed", model=self.pool.model, replica=name)

    async def close(self) -> None:
        """Look after none of them any more, and keep no connection to any."""
        for _, tasks in self._discoveries.values():
            self._end(tasks)
        for replica in self.pool.replicas.values():
            self._leave(replica)
        await asyncio.gather(*self._ending, return_exceptions=True)

    # --- in parts --------------------------------------------------------------------------------

    def _look_after(self, replica: Replica) -> None:
        prober = Prober(replica)
        tasks = _begin(partial(_probe, prober), partial(follow, replica, self._texts))
        self._probers[replica.name] = prober, tasks

    def _leave(self, replica: Replica) -> None:
        if replica.name in self._probers:
            self._end(self._probers.pop(replica.name)[1])
        replica.upstream.close()

    def _have(self, entry: Entry, there: Collection[str]) -> None:
        """An entry is new; its name is known to have the addresses that are `there`."""
        discover = entry.config.discover
        if discover is None:
            self.add(entry.replica())
            return
        for address in there:
            self.add(entry.replica(address))
        self._discover(entry, discover, there)

    def _drop(self, entry: Entry) -> Collection[str]:
        """An entry is no longer there; the addresses that its name had."""
        if entry.config.discover is None:
            self.remove(entry.name)
            return ()
        discovery, tasks = self._discoveries.pop(entry.name)
        self._end(tasks)
        for address in discovery.there:
            self.remove(entry.name_at(address))
        return discovery.there

    def _discover(self, entry: Entry, discover: Discover, there: Collection[str] = ()) -> None:
        discovery = Discovery(
            entry.endpoint.host,
            discover,
            self._look_up,
            come=lambda address: self.add(entry.replica(address)),
            go=lambda address: self.remove(entry.name_at(address)),
            there=there,
        )
        self._discoveries[entry.name] = discovery, _begin(discovery.run)

    def _awaits(self) -> bool:
        discoveries, probers = self._discoveries.values(), self._probers.values()
        return any(not one.answered.is_set() for one, _ in discoveries) or any(
            not one.asked.is_set() for one, _ in probers
        )

    def _end(self, tasks: Tasks) -> None:
        for task in tasks:
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            task.cancel()


def _begin(*cares: Care) -> Tasks:
    return tuple(asyncio.create_task(look_after(care)) for care in cares)


async def _probe(prober: Prober) -> None:
    await prober.probe()
    await prober.run()
