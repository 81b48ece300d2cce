"""Controllers of a fleet of real processes: what is declared runs, whatever ends meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from pathlib import Path

import msgspec
import pytest
from tests.support.controlled_fleet import FLEET, Fleet, run_fleet
from tests.support.fake_clock import FakeClock
from tests.support.gateway_client import BODIES, COMPLETION, run_gateway_server
from tests.support.migrated_store import open_migrated_store
from tests.support.waiting import until

from argosy.deployment import (
    FleetConfig,
    GatewayConfig,
    RolloutDocuments,
    append_command,
    parse_fleet,
    read_rollout_documents,
    read_rollouts,
    set_replicas,
    stop_everything,
)
from argosy.fleet.control import process_holder
from argosy.fleet.control.leadership import Leadership, is_gone
from argosy.policy.rollout import (
    CommandKind,
    RolloutCommand,
    RolloutRecord,
    RolloutState,
)
from argosy.store import (
    DeposedError,
    FleetStore,
    GatewayRecord,
    StoreConfig,
    StoreUnavailableError,
)

REPLICA = Path(__file__).parents[2] / "support" / "scripted_replica.py"
LEASE_S = 0.04


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
                | {
                    "files": {
                        "command": [sys.executable, "-m", "http.server", "{port}"],
                        "kind": "openai",
                        "ready_path": pool.pop("ready_path", "/"),
                    }
                }
                | {"broken": {"command": [sys.executable, str(REPLICA), "{port}", "crash=3"]}}
                | {
                    "complete": {
                        "command": [sys.executable, str(REPLICA), "{port}", "complete"],
                        "kind": "openai",
                    }
                },
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
        )
    )


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argosy.fleet.control.replica_monitor.CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr("argosy.fleet.control.leader_term.OBSERVATION_INTERVAL_S", 0.05)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with run_fleet(tmp_path) as fleet:
        yield fleet


async def test_fleet_becomes_what_is_declared(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_slowly(store: FleetStore, fleet: str) -> dict[str, RolloutDocuments]:
        time.sleep(0.05)  # actions end between the observation and the decision
        return read_rollout_documents(store, fleet)

    monkeypatch.setattr("argosy.fleet.control.fleet_rollouts.read_rollout_documents", read_slowly)
    fleet.append_old_event("replica_lost")
    fleet.apply(declare())
    controller = fleet.start_controller("first")
    first = await fleet.as_declared("chat-1-0", "chat-1-1")

    os.kill(first["chat-1-0"], signal.SIGKILL)
    await until(lambda: len(fleet.events("replica_start")) == 3)
    second = await fleet.as_declared("chat-1-0", "chat-1-1")
    assert second["chat-1-0"] != first["chat-1-0"]
    assert second["chat-1-1"] == first["chat-1-1"], "only the one that was killed"
    (killed,) = fleet.store.replica_logs.list_runs(FLEET, "chat-1-0")
    assert (killed.attempt, killed.exit_status) == (1, -signal.SIGKILL)
    assert "SIGKILL" in killed.reason

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
    ends = {
        name: [run.attempt for run in fleet.store.replica_logs.list_runs(FLEET, name)]
        for name in ("chat-1-0", "chat-1-1", "chat-2-0")
    }
    assert ends == {"chat-1-0": [2, 1], "chat-1-1": [1], "chat-2-0": [1]}


async def test_next_controller_adopts_what_runs(fleet: Fleet) -> None:
    fleet.apply(declare())
    first = fleet.start_controller("first")
    pids = await fleet.as_declared("chat-1-0", "chat-1-1")
    standby = fleet.start_controller("standby")
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    await until(lambda: fleet.status.leader == "standby")
    num_starts = len(fleet.events("replica_start"))
    os.kill(pids["chat-1-1"], signal.SIGKILL)
    await until(lambda: len(fleet.events("replica_start")) > num_starts)
    adopted = await fleet.as_declared("chat-1-0", "chat-1-1")
    assert adopted["chat-1-0"] == pids["chat-1-0"]
    starts = fleet.events("replica_start")[num_starts:]
    assert [(event.epoch, event.replica) for event in starts] == [(2, "chat-1-1")]
    assert not standby.done()


async def test_records_of_an_earlier_leader_are_not_as_declared(fleet: Fleet) -> None:
    """The replicas may be gone, as after a restart of the machine."""
    fleet.apply(declare())
    controller = fleet.start_controller("first")
    await fleet.as_declared("chat-1-0", "chat-1-1")
    controller.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await controller
    assert fleet.status.is_as_declared
    fleets = fleet.store.fleets
    assert fleets.acquire_lease("second", fleets.read_lease(FLEET)) is not None
    assert not fleet.status.is_as_declared


async def test_status_says_why_replicas_do_not_run(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/none")
    fleet.apply(declare(engine="broken", replicas=1))
    fleet.start_controller("first")
    await fleet.wait_for_reason(
        lambda reason: "crashed 2 times" in reason and "cannot open the model" in reason
    )
    latest = fleet.store.replica_logs.list_runs(FLEET, "chat-1-0")[0]
    log = fleet.store.replica_logs.read_log(FLEET, "chat-1-0", latest.started_at)
    assert b"cannot open the model" in log
    assert "cannot open the model" in latest.reason
    fleet.apply(declare(replicas=1, environment={"KEY": {"env": "NO_SUCH_VARIABLE"}}))
    await fleet.wait_for_reason(lambda reason: "NO_SUCH_VARIABLE" in reason)
    fleet.apply(declare(replicas=1, launcher="kubernetes", image="none"))
    await fleet.wait_for_reason(lambda reason: "no Kubernetes cluster is configured" in reason)
    fleet.apply(declare(engine="files", replicas=1, warm_up=False, ready_path="/none"))
    await fleet.wait_for_reason(lambda reason: "/none answers 404, see `ready_path`" in reason)
    fleet.apply(declare(engine="files", replicas=1))
    await fleet.wait_for_reason(
        lambda reason: "the warm-up request to /v1/chat/completions has the answer 501: <" in reason
    )
    assert not any("\n" in replica.reason for replica in fleet.status.replicas)
    fleet.apply(declare(engine="files", replicas=1, warm_up=False))
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


async def test_gateway_follows_rollouts_under_load(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("gateway_publisher", "rollout_evidence"):
        monkeypatch.setattr(f"argosy.fleet.control.{module}.POLL_INTERVAL_S", 0.05)
    rollout = {"steps": [0.5], "shadow": 0, "min_candidate_replicas": 1, "prompts": []}
    rollout |= {"min_step_s": 0, "soak_s": 0}

    def declare_version(mode: str) -> FleetConfig:
        version = {"engine": "complete", "environment": {"MODE": mode}}
        return declare(replicas=1, warm_up=False, rollout=rollout, **version)

    def record() -> RolloutRecord | None:
        reports = read_rollouts(fleet.store.fleets, FLEET)
        return reports[0].rollouts.current if reports else None

    def has_left(state: RolloutState) -> Callable[[], bool]:
        return lambda: (current := record()) is not None and current.state is not state

    gateway = GatewayConfig(
        port=0,
        fleet=FLEET,
        store=StoreConfig(url=fleet.url),
        pools_file=str(fleet.folder / "pools.json"),
    )
    statuses, versions = list[int](), list[str]()
    fleet.apply(declare_version("old"))
    async with run_gateway_server(gateway) as (_, client):
        fleet.start_controller("first")
        await fleet.as_declared("chat-1-0")

        async def send_requests() -> None:
            for number in count():
                body = BODIES[COMPLETION] | {"model": "chat", "user": f"user-{number % 50}"}
                response = await client.post(COMPLETION, json=body)
                statuses.append(response.status_code)
                versions.append(response.headers.get("x-argosy-version", ""))

        body = BODIES[COMPLETION] | {"model": "chat"}
        while (await client.post(COMPLETION, json=body)).status_code != 200:
            pass  # the controller may not have found the gateway yet
        load = asyncio.create_task(send_requests())
        try:
            await until(lambda: len(versions) > 20)
            (first,) = set(versions)
            fleet.apply(declare_version("new"))
            await until(lambda: len({*versions}) > 1)
            for state in (RolloutState.STEP, RolloutState.SOAKING):
                await until(lambda: (current := record()) is not None and current.settled_at)
                command = RolloutCommand(
                    kind=CommandKind.PROMOTE, by="ann", reason="hotfix", force=True
                )
                append_command(fleet.store.fleets, FLEET, "chat", command)
                await until(has_left(state))
            await until(has_left(RolloutState.RETIRING))
            num_before = len(versions)
            await until(lambda: len(versions) > num_before + 20)
            (second,) = set(versions[num_before + 1 :])
            assert second != first
        finally:
            load.cancel()
    assert set(statuses) == {200}


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
        await until(lambda: fleet.status.pools[0].decision is not None)
        metrics = (await client.get("/metrics")).text
        assert 'argosy_desired_replicas{pool="chat"} 2' in metrics

        dead = GatewayRecord(id="dead", url="http://127.0.0.1:9", secret="x")
        fleet.store.gateways.record_heartbeat(dead)
        await until(lambda: reasons()[-1] == "Hold 2: metrics are missing.")
        fleet.store.gateways.remove("dead")

        fleet.apply(set_replicas(fleet.declaration(), "chat", 1))
        await fleet.as_declared("chat-1-0")
        paused = "Paused, because an operator scaled to 1 by hand"
        await until(lambda: paused in reasons()[-1])  # events are stored after the records
        fleet.apply(set_replicas(fleet.declaration(), "chat", None))
        await fleet.as_declared("chat-1-0", "chat-1-1")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FleetStore]:
    opened = open_migrated_store(f"sqlite:///{tmp_path / 'argosy.db'}")
    yield opened.fleets
    opened.close()


async def test_standby_takes_over_when_renewals_end(store: FleetStore) -> None:
    clock = FakeClock(100.0)
    first, second = (Leadership(store, FLEET, name, LEASE_S, clock) for name in ("a", "b"))
    with pytest.raises(DeposedError):
        _ = first.lease
    assert (await first.acquire()).epoch == 1
    standby, keeping = asyncio.create_task(second.acquire()), asyncio.create_task(first.keep())
    await until(lambda: store.read_lease(FLEET).renewals >= 4)
    assert first.lease.holder == "a"
    assert not standby.done()
    keeping.cancel()
    clock.now += 10 * LEASE_S
    with pytest.raises(DeposedError):
        _ = first.lease  # by its own clock, before anybody else leads
    while not standby.done():  # it may have seen the last renewal after the clock was set
        clock.now += LEASE_S
        await asyncio.sleep(LEASE_S / 4)
    lease = await standby
    assert (lease.epoch, lease.holder) == (2, "b")
    with pytest.raises(DeposedError):
        await first.keep()


async def test_released_lease_is_taken_over_at_once(store: FleetStore) -> None:
    clock = FakeClock(100.0)  # stands still, so that no lease ends
    first, second = (Leadership(store, FLEET, name, LEASE_S, clock) for name in ("a", "b"))
    await first.acquire()
    standby = asyncio.create_task(second.acquire())
    await first.release()
    assert (await standby).epoch == 2
    await first.release()
    assert second.lease.epoch == 2


async def test_lease_of_a_process_that_is_gone_is_taken_over_at_once(store: FleetStore) -> None:
    host, _, scope = process_holder().split("/")
    process = await asyncio.create_subprocess_exec("true")
    await process.wait()
    gone = f"{host}/{process.pid}/{scope}"
    assert is_gone(gone)
    for holder in (process_holder(), f"{host}/{process.pid}/other-boot", "a", ""):
        assert not is_gone(holder)
    clock = FakeClock(100.0)  # stands still, so that no lease ends
    await Leadership(store, FLEET, gone, LEASE_S, clock).acquire()
    assert (await Leadership(store, FLEET, "b", LEASE_S, clock).acquire()).epoch == 2
