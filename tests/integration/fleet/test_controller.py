"""Controllers of a fleet of real processes: what is declared runs, whatever ends meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from tests.support.controlled_fleet import FLEET, Fleet, build_fleet, declare
from tests.support.fake_clock import FakeClock
from tests.support.gateway_client import BODIES, COMPLETION
from tests.support.migrated_store import open_migrated_store
from tests.support.waiting import until

from argosy.controller_keeper import LOG_NAME
from argosy.deployment import (
    FleetConfig,
    RolloutDocuments,
    append_command,
    read_rollout_documents,
    read_rollouts,
    set_replicas,
    stop_everything,
)
from argosy.fleet.control import open_launcher, process_holder
from argosy.fleet.control.leadership import Leadership, is_gone
from argosy.policy.rollout import CommandKind, RolloutCommand, RolloutRecord, RolloutState
from argosy.store import (
    CONTROLLER_LOG,
    DeposedError,
    FleetLease,
    FleetStore,
    GatewayRecord,
    StoreUnavailableError,
)

LEASE_S = 0.04


async def test_fleet_becomes_what_is_declared(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_slowly(store: FleetStore, fleet: str) -> dict[str, RolloutDocuments]:
        time.sleep(0.05)  # actions end between the observation and the decision
        return read_rollout_documents(store, fleet)

    monkeypatch.setattr("argosy.fleet.control.fleet_rollouts.read_rollout_documents", read_slowly)
    fleet.append_old_event("replica_lost")
    fleet.apply(declare(dollars_per_hour=3.6))
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

    fleet.apply(declare(environment={"MODE": "new"}))
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
    uses = fleet.store.hardware_costs.list_days(0.0, time.time())
    assert {(use.pool, use.model, use.busy_ms) for use in uses} == {("chat", "chat", 0)}
    for use in uses:
        assert use.nano_dollars == use.replica_ms * 1000 > 0


async def test_next_controller_adopts_what_runs(fleet: Fleet) -> None:
    fleet.apply(declare())
    first = fleet.start_controller("first")
    pids = await fleet.as_declared("chat-1-0", "chat-1-1")
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    fleets = fleet.store.fleets
    lease = fleets.acquire_lease("second", fleets.read_lease(FLEET))
    assert lease is not None
    assert not fleet.status.is_as_declared, "records of an earlier leader say nothing"
    fleets.release_lease(lease)
    num_starts, num_warm = len(fleet.events("replica_start")), len(fleet.events("replica_warm"))
    os.kill(pids["chat-1-1"], signal.SIGKILL)
    launcher = open_launcher("local", fleet.folder, declare())
    await launcher.drain("", 40)  # an epoch that the store, restored from a backup, does not know
    await launcher.stop("chat-1-1", 40)
    await launcher.remove("chat-1-1", 40)  # so that its attempts begin with 1 again
    await launcher.close()
    fleet.start_controller("third")
    await until(lambda: len(fleet.events("replica_start")) > num_starts)
    adopted = await fleet.as_declared("chat-1-0", "chat-1-1")
    assert adopted["chat-1-0"] == pids["chat-1-0"]
    starts = fleet.events("replica_start")[num_starts:]
    assert [(event.epoch, event.replica) for event in starts] == [(41, "chat-1-1")]
    warmed = [event.replica for event in fleet.events("replica_warm")[num_warm:]]
    assert warmed == ["chat-1-1"]
    assert "it has stopped serving" not in {event.reason for event in fleet.events("replica_phase")}


async def test_status_says_why_replicas_do_not_run(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/none")
    fleet.apply(declare("crash=3", replicas=1))
    fleet.start_controller("first")
    await fleet.wait_for_reason(
        lambda reason: "crashed 2 times" in reason and "cannot open the model" in reason
    )
    latest = fleet.store.replica_logs.list_runs(FLEET, "chat-1-0")[0]
    log = fleet.store.replica_logs.read_log(FLEET, "chat-1-0", latest.started_at)
    assert b"cannot open the model" in log
    assert "cannot open the model" in latest.reason
    (fleet.folder / LOG_NAME).write_text(
        f"{'x' * 2**16}\nleads a@example.com\n"
    )  # as its keeper writes it
    await until(lambda: fleet.store.replica_logs.list_runs(FLEET, CONTROLLER_LOG))
    (term,) = fleet.store.replica_logs.list_runs(FLEET, CONTROLLER_LOG)
    assert fleet.store.replica_logs.read_log(FLEET, CONTROLLER_LOG, term.started_at) == (
        b"leads [email]\n"
    )
    fleet.apply(declare(replicas=1, environment={"KEY": {"env": "NO_SUCH_VARIABLE"}}))
    await fleet.wait_for_reason(lambda reason: "NO_SUCH_VARIABLE" in reason)
    fleet.apply(declare(replicas=1, launcher="kubernetes", image="none"))
    await fleet.wait_for_reason(lambda reason: "no Kubernetes cluster is configured" in reason)
    for settings, ready_path, expected in (
        ({"warm_up": False}, "/none", "/none answers 404, see `ready_path`"),
        ({}, "/", "the warm-up request to /v1/chat/completions has the answer 501: <"),
    ):
        fleet.apply(serve_files(ready_path, **settings))
        await fleet.wait_for_reason(lambda reason, expected=expected: expected in reason)  # type: ignore[misc]
    assert not any("\n" in replica.reason for replica in fleet.status.replicas)
    fleet.apply(serve_files("/", warm_up=False))
    await until(lambda: fleet.status.is_as_declared)


def serve_files(ready_path: str, **pool: object) -> FleetConfig:
    """Return a fleet whose replica serves files and no model."""
    command = [sys.executable, "-m", "http.server", "{port}"]
    pool |= {"name": "chat", "model": "chat", "engine": "scripted", "drain_deadline_s": 0}
    return build_fleet(command, pool, ready_path=ready_path)


async def test_replica_that_hangs_is_replaced(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.fleet.control.replica_monitor.CHECK_TIMEOUT_S", 0.3)
    fleet.apply(declare(replicas=1, hang_timeout_s=1.0))
    fleet.start_controller("first")
    hung = await fleet.as_declared("chat-1-0")
    num_starts = len(fleet.events("replica_start"))
    os.kill(hung["chat-1-0"], signal.SIGSTOP)
    await until(lambda: len(fleet.events("replica_start")) > num_starts)
    assert await fleet.as_declared("chat-1-0") != hung
    (ended,) = fleet.store.replica_logs.list_runs(FLEET, "chat-1-0")
    (replica,) = fleet.status.replicas
    assert ended.reason == replica.past_runs[-1].reason == "it has not answered for 1 s"


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


async def test_gateway_follows_rollouts_under_load(fleet: Fleet) -> None:
    rollout = {"steps": [0.5], "shadow": 0, "min_candidate_replicas": 1, "prompts": []}
    rollout |= {"min_step_s": 0, "soak_s": 0}

    def declare_version(mode: str) -> FleetConfig:
        environment = {"MODE": mode}
        return declare(
            "complete", replicas=1, warm_up=False, rollout=rollout, environment=environment
        )

    def record() -> RolloutRecord | None:
        reports = read_rollouts(fleet.store.fleets, FLEET)
        return reports[0].rollouts.current if reports else None

    def has_left(state: RolloutState) -> Callable[[], bool]:
        return lambda: (current := record()) is not None and current.state is not state

    statuses, versions = list[int](), list[str]()
    fleet.apply(declare_version("old"))
    async with fleet.run_gateway() as client:
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


async def test_autoscaler_follows_demand_unless_it_knows_none(fleet: Fleet) -> None:
    autoscaling = {"mode": "on", "tokens_per_s": 0.01}
    scaled = declare(
        "complete", replicas=None, min_replicas=1, max_replicas=2, autoscaling=autoscaling
    )
    fleet.apply(scaled)

    def reasons() -> list[str]:
        return [event.reason for event in fleet.events("scaling_decision")]

    async with fleet.run_gateway() as client:
        fleet.start_controller("first")
        await fleet.as_declared("chat-1-0")
        await client.post(COMPLETION, json=BODIES[COMPLETION] | {"model": "chat"})
        await fleet.as_declared("chat-1-0", "chat-1-1")
        (decision,) = [reason for reason in reasons() if reason.startswith("Scale from 1 to 2")]
        assert "the maximum is 2 ((1.15 x " in decision
        await until(lambda: fleet.status.pools[0].decision is not None)
        metrics = (await client.get("/metrics")).text
        assert 'argosy_desired_replicas{pool="chat"} 2' in metrics
        dead = GatewayRecord(id="dead", url="http://127.0.0.1:9", secret="x")
        fleet.store.gateways.record_heartbeat(dead)
        await until(lambda: reasons()[-1] == "Hold 2: metrics are missing.")


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


async def test_standby_forgets_an_outage_that_the_leader_survived(
    store: FleetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock(100.0)  # stands still, so that no lease ends
    first, second = (Leadership(store, FLEET, name, LEASE_S, clock) for name in ("a", "b"))
    await first.acquire()
    read_lease, seen = store.read_lease, list[int]()

    def read_after_an_outage(fleet: str) -> FleetLease:
        seen.append(read_lease(fleet).renewals)
        if len(seen) == 1:
            raise StoreUnavailableError("The disk is full.")
        return read_lease(fleet)

    monkeypatch.setattr(store, "read_lease", read_after_an_outage)
    standby, keeping = asyncio.create_task(second.acquire()), asyncio.create_task(first.keep())
    await until(lambda: len(set(seen[1:])) >= 4)
    keeping.cancel()
    await first.release()
    assert (await standby).epoch == 2
    assert not second.take_outage()


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
