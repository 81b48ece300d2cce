"""The simulated launcher: lives of replicas under a virtual clock, which follow from a seed."""

from __future__ import annotations

import math

import pytest
from tests.support.fake_clock import FakeClock

from argosy.deployment import LaunchResources
from argosy.fleet.launchers import (
    LaunchedReplica,
    LaunchError,
    LaunchSpec,
    LaunchState,
    SimulatedBehaviour,
    SimulatedCluster,
    SimulatedLauncher,
    SimulatedNode,
    StaleEpochError,
)

CALM = SimulatedBehaviour(provisioning_s=(1.0, 1.0), loading_s=(10.0, 10.0), drain_s=(5.0, 5.0))


def spec(ordinal: int = 0, resources: LaunchResources | None = None) -> LaunchSpec:
    return LaunchSpec(
        name=f"a-1-{ordinal}",
        pool="a",
        generation=1,
        ordinal=ordinal,
        command=("server",),
        resources=resources or LaunchResources(),
    )


def simulate(
    behaviour: SimulatedBehaviour = CALM,
    nodes: dict[str, SimulatedNode] | None = None,
    seed: int = 1,
) -> tuple[FakeClock, SimulatedCluster, SimulatedLauncher]:
    clock = FakeClock(0.0)
    cluster = SimulatedCluster(clock, seed, nodes, behaviour)
    return clock, cluster, SimulatedLauncher(cluster)


async def only(launcher: SimulatedLauncher) -> LaunchedReplica:
    (replica,) = (await launcher.list_replicas()).values()
    return replica


async def test_replica_starts_serves_drains_and_is_removed() -> None:
    clock, cluster, launcher = simulate()
    await launcher.start(spec(), 1)
    await launcher.start(spec(), 1)
    assert (await only(launcher)).state is LaunchState.PROVISIONING
    assert cluster.next_change_at == 1.0
    clock.now = 5.0
    assert (await only(launcher)).started_at == 1.0
    assert not cluster.check_health("a-1-0").is_serving
    clock.now = 11.0
    assert cluster.check_health("a-1-0").is_serving
    with pytest.raises(LaunchError, match="stop it first"):
        await launcher.remove("a-1-0", 1)
    await launcher.drain("a-1-0", 1)
    assert (await only(launcher)).state is LaunchState.DRAINING
    launcher.changed.clear()
    clock.now = 16.0
    assert ((await only(launcher)).reason, (await only(launcher)).exited_at) == (
        "it was drained",
        16.0,
    )
    assert launcher.changed.is_set()
    await launcher.start(spec(), 1)
    assert (await only(launcher)).attempt == 2
    await launcher.stop("a-1-0", 1)
    await launcher.remove("a-1-0", 1)
    assert not await launcher.list_replicas()
    assert (await launcher.read_log("a-1-0", 100)).endswith(b"it is removed")
    await launcher.close()


async def test_hung_replica_is_killed_at_its_drain_deadline() -> None:
    clock, cluster, launcher = simulate()
    await launcher.start(spec(), 1)
    clock.now = 20.0
    cluster.hang("a-1-0")
    clock.now = 30.0
    health = cluster.check_health("a-1-0")
    assert (health.last_response_at, health.is_serving) == (20.0, False)
    await launcher.drain("a-1-0", 1)
    clock.now = 60.0
    assert (await only(launcher)).exit_status == -9


async def test_gpus_zones_and_lost_nodes_decide_placement() -> None:
    nodes = {
        "n1": SimulatedNode(accelerators=1, zone="a"),
        "n2": SimulatedNode(accelerators=1, zone="b", labels={"gpu": "h100"}),
    }
    clock, cluster, launcher = simulate(nodes=nodes)
    for ordinal in range(3):
        wanted = LaunchResources(accelerators=1, zones=("b", "a"))
        await launcher.start(spec(ordinal, wanted), 1)
    labelled = LaunchResources(accelerators=2, labels={"gpu": "h100"})
    await launcher.start(spec(3, labelled), 1)
    clock.now = 2.0
    listed = await launcher.list_replicas()
    assert [listed[f"a-1-{ordinal}"].node for ordinal in range(4)] == ["n2", "n1", "", ""]
    assert listed["a-1-2"].reason == "waiting for a GPU on any node of zone b or a"
    assert listed["a-1-3"].reason == "waiting for 2 GPUs on any node with gpu=h100"
    cluster.lose_node("n2")
    assert (await launcher.list_replicas())["a-1-0"].reason == "its node n2 was lost"
    cluster.restore_node("n2")
    assert (await launcher.list_replicas())["a-1-2"].node == "n2"


async def test_refuses_outdated_epoch_and_unreachable_cluster() -> None:
    _, cluster, launcher = simulate()
    await SimulatedLauncher(cluster).start(spec(), 7)
    for action in (launcher.drain, launcher.stop, launcher.remove):
        with pytest.raises(StaleEpochError):
            await action("a-1-0", 6)
    with pytest.raises(StaleEpochError):
        await launcher.start(spec(1), 6)
    assert (await only(launcher)).state is LaunchState.PROVISIONING
    cluster.unreachable_reason = "connection refused"
    with pytest.raises(LaunchError, match="connection refused"):
        await launcher.list_replicas()


async def test_life_follows_from_seed_name_and_attempt() -> None:
    """The order of starts and other replicas change nothing."""
    behaviour = SimulatedBehaviour(
        slow_start_share=0.3, failed_start_share=0.3, lifetime_s=50.0, hang_share=0.5
    )

    async def live(ordinals: list[int], seed: int) -> list[bytes]:
        clock, _, launcher = simulate(behaviour, seed=seed)
        for ordinal in ordinals:
            await launcher.start(spec(ordinal), 1)
        clock.now = 1000.0
        await launcher.list_replicas()
        return [await launcher.read_log(f"a-1-{ordinal}", 10_000) for ordinal in range(9)]

    lives = await live([*range(9)], 1)
    assert await live([*reversed(range(9))], 1) == lives
    assert await live([*range(9)], 2) != lives
    log = b"\n".join(lives)
    assert all(kind in log for kind in (b"hangs", b"status 1", b"SIGSEGV"))
    assert math.isinf(simulate()[1].next_change_at)
