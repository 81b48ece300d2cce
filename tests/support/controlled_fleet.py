"""A fleet of scripted replicas with its store, and the controllers that a test starts in its process."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from argosy.deployment import (
    FleetConfig,
    FleetStatus,
    GatewayConfig,
    dump_fleet,
    parse_fleet,
    pool_digests,
    read_fleet_status,
)
from argosy.fleet.control import Controller, FleetContext, open_launcher
from argosy.fleet.launchers import LocalProcessLauncher
from argosy.store import CONTROLLER_LOG, FleetEvent, FleetRevision, StoreConfig, open_store
from tests.support.gateway_client import run_gateway_server
from tests.support.migrated_store import open_migrated_store
from tests.support.waiting import until

FLEET = "demo"
LEASE_S = 4.0
"""Long enough for a busy machine to renew it, and short enough for a standby to look at it often."""
REPLICA = Path(__file__).with_name("scripted_replica.py")


def declare(
    *behaviours: str,
    address: str = "{port}",
    lease_s: float = LEASE_S,
    **pool: Any,  # noqa: ANN401 - its settings
) -> FleetConfig:
    """Return a fleet with a pool of two scripted replicas, which answer every request with their process id."""
    scripted = [sys.executable, "-I", "-S", str(REPLICA), address, *(behaviours or ["print=1"])]
    settings = {"name": "chat", "model": "chat", "engine": "scripted", "drain_deadline_s": 0}
    return build_fleet(scripted, settings | {"replicas": 2} | pool, lease_s)


def build_fleet(
    command: list[str], pool: dict[str, object], lease_s: float = LEASE_S, **engine: object
) -> FleetConfig:
    """Return a fleet with a pool whose engine `scripted` has this command."""
    declaration = {
        "fleet": FLEET,
        "gateways": 0,
        "controller": {"lease_s": lease_s},
        "models": [{"name": "chat", "source": "argosy-mini"}],
        "engines": {"scripted": {"command": command, "kind": "openai"} | engine},
        "pools": [pool],
    }
    return parse_fleet(msgspec.json.encode(declaration))


@dataclass
class Fleet:
    """A fleet with its store, and the controllers that a test starts."""

    folder: Path
    url: str = ""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.url = self.url or f"sqlite:///{self.folder / 'argosy.db'}"
        self.store = open_migrated_store(self.url)

    def apply(self, config: FleetConfig, renewed: Collection[str] = ()) -> FleetRevision:
        declaration, digests = dump_fleet(config, "json").encode(), pool_digests(config)
        return self.store.fleets.apply(FLEET, declaration, digests, author="test", renewed=renewed)

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
            list_watched_logs=lambda: [CONTROLLER_LOG],
        )
        task = asyncio.create_task(Controller(context, name, LEASE_S).run(until_empty=True))
        self.tasks.append(task)
        return task

    @contextlib.asynccontextmanager
    async def run_gateway(
        self,
        client_timeout_s: float | None = 30.0,
        **settings: Any,  # noqa: ANN401 - of the gateway
    ) -> AsyncIterator[httpx2.AsyncClient]:
        """Run a gateway of the fleet in this process, with a client."""
        config = GatewayConfig(
            port=0,
            fleet=FLEET,
            store=StoreConfig(url=self.url),
            pools_file=str(self.folder / "pools.json"),
            **settings,
        )
        async with run_gateway_server(config, client_timeout_s=client_timeout_s) as (_, client):
            yield client

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

    async def close(self) -> None:
        """End the controllers and the processes of this machine."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        launcher = LocalProcessLauncher(self.folder / "replicas")
        for name in await launcher.list_replicas():
            await launcher.stop(name, 1_000_000)
        await launcher.close()
        self.store.close()
