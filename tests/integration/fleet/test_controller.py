"""Controllers of a fleet of real processes: what is declared runs, whatever ends meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import msgspec
import pytest
from tests.support.gateway_client import BODIES, COMPLETION, run_gateway_server
from tests.support.waiting import until

from argosy.fleet.control import (
    Controller,
    FleetContext,
    FleetStatus,
    open_launcher,
    pool_digests,
    read_fleet_status,
    set_replicas,
    stop_everything,
)
from argosy.fleet.declaration import FleetConfig, dump_fleet, parse_fleet
from argosy.fleet.launchers import LocalProcessLauncher
from argosy.gateway import GatewayConfig
from argosy.store import (
    FleetEvent,
    GatewayRecord,
    StoreConfig,
    StoreUnavailableError,
    open_store,
)

FLEET = "demo"
LEASE_S = 1.0
REPLICA = Path(__file__).parents[2] / "support" / "scripted_replica.py"


def declare(**pool: object) -> FleetConfig:
    """Return a fleet of two processes that answer every request with their process id."""
    return parse_fleet(
        msgspec.json.encode(
            {
                "fleet": FLEET,
                "gateways": 0,
                "models": [{"name": "chat", "source": "owner/chat"}],
                "engines": {
                    "scripted": {
                        "command": [sys.executable, str(REPLICA), "{port}", "print=1"],
                        "kind": "openai",
                    }
                }
                | {"broken": {"command": [sys.executable, str(REPLICA), "{port}", "crash=3"]}},
                "pools": [
                    {
                        "name": "chat",
                        "model": "chat",
                        "engine": "scripted",
                        "replicas": 2,
                        "drain_deadline_s": 0,
                    }
                    | pool
                ],
            }
        ).replace(b"print=1", b"print=1")
    )


@dataclass
class Fleet:
    """A fleet with its store, and the controllers that a test starts."""

    folder: Path
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.url = f"sqlite:///{self.folder / 'argosy.db'}"
        self.store = open_store(self.url)
        self.store.migrate()

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

        def is_as_declared() -> bool:
            status = self.status
            return status.is_as_declared and {each.name for each in status.replicas} == {*names}

        await until(is_as_declared)
        pids = {}
        async with httpx2.AsyncClient() as client:
            for replica in self.status.replicas:
                pids[replica.name] = int((await client.get(replica.url)).text)
        return pids

    def events(self, kind: str) -> list[FleetEvent]:
        events = self.store.fleets.list_events(FLEET, limit=10_000)
        return [event for event in events if event.kind == kind]

    async def wait_for_reason(self, has_reason: Callable[[str], bool]) -> None:
        await until(lambda: any(has_reason(replica.reason) for replica in self.status.replicas))


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argosy.fleet.control.replica_monitor.CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr("argosy.fleet.control.leader_term.OBSERVATION_INTERVAL_S", 0.05)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    for task in fleet.tasks:
        task.cancel()
    await asyncio.gather(*fleet.tasks, return_exceptions=True)
    launcher = LocalProcessLauncher(tmp_path / "replicas")
    for name in await launcher.list_replicas():
        await launcher.stop(name, 1_000_000)
    await launcher.close()
    fleet.store.close()


async def test_fleet_becomes_what_is_declared(fleet: Fleet) -> None:
    fleet.append_old_event("replica_lost")
    fleet.apply(declare())
    controller = fleet.start_controller("first")
    first = await fleet.as_declared("chat-1-0", "chat-1-1")

    os.kill(first["chat-1-0"], signal.SIGKILL)
    await until(lambda: len(fleet.events("replica_start")) == 3)
    second = await fleet.as_declared("chat-1-0", "chat-1-1")
    assert second["chat-1-0"] != first["chat-1-0"]
    assert second["chat-1-1"] == first["chat-1-1"], "only the one that was killed"

    fleet.apply(set_replicas(declare(), "chat", 1))
    third = await fleet.as_declared("chat-1-0")
    assert third["chat-1-0"] == second["chat-1-0"]

    fleet.apply(declare(replicas=2, environment={"MODE": "new"}))
    await fleet.as_declared("chat-2-0", "chat-2-1")
    fleet.apply(stop_everything(declare()))
    await controller
    assert fleet.status.replicas == []
    assert [event.outcome for event in fleet.events("replica_remove")] == ["ok"] * 4
    assert not fleet.events("replica_lost"), "events are kept for 30 days"


async def test_next_controller_adopts_what_runs(fleet: Fleet) -> None:
    fleet.apply(declare())
    first = fleet.start_controller("first")
    pids = await fleet.as_declared("chat-1-0", "chat-1-1")
    standby = fleet.start_controller("standby")
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    await until(lambda: fleet.status.leader == "standby")
    os.kill(pids["chat-1-1"], signal.SIGKILL)
    await until(lambda: len(fleet.events("replica_start")) == 3)
    adopted = await fleet.as_declared("chat-1-0", "chat-1-1")
    assert adopted["chat-1-0"] == pids["chat-1-0"]
    assert [event.epoch for event in fleet.events("replica_start")] == [1, 1, 2]
    assert not standby.done()


async def test_status_says_why_replicas_do_not_run(fleet: Fleet) -> None:
    fleet.apply(declare(engine="broken", replicas=1))
    fleet.start_controller("first")
    await fleet.wait_for_reason(
        lambda reason: "crashed 2 times" in reason and "cannot open the model" in reason
    )
    fleet.apply(declare(replicas=1, environment={"KEY": {"env": "NO_SUCH_VARIABLE"}}))
    await fleet.wait_for_reason(lambda reason: "NO_SUCH_VARIABLE" in reason)
    fleet.apply(declare(replicas=1, launcher="simulated"))
    await fleet.wait_for_reason(lambda reason: "no launcher 'simulated'" in reason)
    fleet.apply(declare(replicas=1))
    await until(lambda: fleet.status.is_as_declared)


async def test_controller_outlives_failures_of_the_store(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.apply(declare())
    controller = fleet.start_controller("first")
    before = await fleet.as_declared("chat-1-0", "chat-1-1")
    num_failures = 0

    def fail(*_: object) -> None:
        nonlocal num_failures
        num_failures += 1
        raise StoreUnavailableError("The database cannot be used: it is gone.")

    with monkeypatch.context() as patched:
        for name in ("save_records", "append_events", "renew_lease"):
            patched.setattr(fleet.store.fleets, name, fail)
        os.kill(before["chat-1-0"], signal.SIGKILL)
        await until(lambda: num_failures > 10)
    await until(lambda: [e.outcome for e in fleet.events("replica_start")].count("ok") == 3)
    after = await fleet.as_declared("chat-1-0", "chat-1-1")
    assert after["chat-1-1"] == before["chat-1-1"]
    assert not controller.done()


async def test_autoscaler_follows_demand_unless_it_knows_none_or_is_paused(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.fleet.control.fleet_autoscaler.DECISION_INTERVAL_S", 0.05)
    monkeypatch.setattr("argosy.fleet.control.gateway_publisher.POLL_INTERVAL_S", 0.05)
    fleet.apply(
        declare(
            replicas=None,
            min_replicas=1,
            max_replicas=2,
            warm_up=False,
            autoscaling={"mode": "on", "tokens_per_s": 0.01},
        )
    )

    def reasons() -> list[str]:
        return [event.reason for event in fleet.events("scaling_decision")]

    gateway = GatewayConfig(
        port=0,
        fleet=FLEET,
        store=StoreConfig(url=fleet.url),
        pools_file=str(fleet.folder / "pools.json"),
    )
    async with run_gateway_server(gateway) as (_, client):
        fleet.start_controller("first")
        await fleet.as_declared("chat-1-0")
        await client.post(COMPLETION, json=BODIES[COMPLETION] | {"model": "chat"})
        await fleet.as_declared("chat-1-0", "chat-1-1")
        (scaled,) = [reason for reason in reasons() if reason.startswith("Scale from 1 to 2")]
        assert "the maximum is 2 ((1.15 x " in scaled
        await until(lambda: fleet.status.pools[0].scaling is not None)
        metrics = (await client.get("/metrics")).text
        assert 'argosy_desired_replicas{pool="chat"} 2' in metrics

        dead = GatewayRecord(id="dead", url="http://127.0.0.1:9", secret="x")
        fleet.store.gateways.record_heartbeat(dead)
        await until(lambda: reasons()[-1] == "Hold 2: metrics are missing.")
        fleet.store.gateways.remove("dead")

        fleet.apply(set_replicas(fleet.declaration(), "chat", 1))
        await fleet.as_declared("chat-1-0")
        assert "Paused, because an operator scaled to 1 by hand" in reasons()[-1]
        fleet.apply(set_replicas(fleet.declaration(), "chat", None))
        await fleet.as_declared("chat-1-0", "chat-1-1")
