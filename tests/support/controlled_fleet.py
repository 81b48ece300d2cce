"""A fleet with its store, and the controllers that a test starts in its process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from argosy.deployment import (
    FleetConfig,
    FleetStatus,
    dump_fleet,
    parse_fleet,
    pool_digests,
    read_fleet_status,
)
from argosy.fleet.control import Controller, FleetContext, open_launcher
from argosy.fleet.launchers import LocalProcessLauncher
from argosy.store import FleetEvent, open_store
from tests.support.migrated_store import open_migrated_store
from tests.support.waiting import until

FLEET = "demo"
LEASE_S = 4.0
"""Long enough for a busy machine to renew it, and short enough for a standby to look at it often."""


@dataclass
class Fleet:
    """A fleet with its store, and the controllers that a test starts."""

    folder: Path
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.url = f"sqlite:///{self.folder / 'argosy.db'}"
        self.store = open_migrated_store(self.url)

    def apply(self, config: FleetConfig) -> None:
        self.store.fleets.apply(
            FLEET, dump_fleet(config, "json").encode(), pool_digests(config), author="test"
        )

    def append_old_event(self, kind: str) -> None:
        """Append an event of a controller that led the fleet in 1970."""
        with contextlib.closing(open_store(self.url, clock=lambda: 0.0)) as past:
            lease = past.fleets.acquire_lease("past", past.fleets.read_lease(FLEET))
            assert lease is not None
            past.fleets.append_events(lease, [FleetEvent(kind=kind)])
            past.fleets.release_lease(lease)

    def declaration(self) -> FleetConfig:
        revision = self.store.fleets.latest_revision(FLEET)
        assert revision is not None
        return parse_fleet(revision.declaration)

    def start_controller(self, name: str) -> asyncio.Task[None]:
        context = FleetContext(
            store=self.store,
            store_url=self.url,
            fleet=FLEET,
            create_launcher=lambda name: open_launcher(name, self.folder, self.declaration()),
            folder=self.folder,
        )
        task = asyncio.create_task(Controller(context, name, LEASE_S).run(until_empty=True))
        self.tasks.append(task)
        return task

    @property
    def status(self) -> FleetStatus:
        return read_fleet_status(self.store.fleets, FLEET)

    async def as_declared(self, *names: str) -> dict[str, int]:
        """Wait until exactly these replicas are ready, and return their process ids."""
        status = self.status

        def is_as_declared() -> bool:
            nonlocal status
            status = self.status
            return status.is_as_declared and {each.name for each in status.replicas} == {*names}

        await until(is_as_declared)
        pids = {}
        async with httpx2.AsyncClient() as client:
            for replica in status.replicas:
                pids[replica.name] = int((await client.get(replica.url)).text)
        return pids

    def events(self, kind: str) -> list[FleetEvent]:
        events = self.store.fleets.list_events(FLEET, limit=10_000)
        return [event for event in events if event.kind == kind]

    async def wait_for_reason(self, has_reason: Callable[[str], bool]) -> None:
        await until(lambda: any(has_reason(replica.reason) for replica in self.status.replicas))


@contextlib.asynccontextmanager
async def run_fleet(folder: Path) -> AsyncIterator[Fleet]:
    """Provide a fleet whose controllers and replicas end with the context."""
    fleet = Fleet(folder)
    yield fleet
    for task in fleet.tasks:
        task.cancel()
    await asyncio.gather(*fleet.tasks, return_exceptions=True)
    launcher = LocalProcessLauncher(folder / "replicas")
    for name in await launcher.list_replicas():
        await launcher.stop(name, 1_000_000)
    await launcher.close()
    fleet.store.close()
