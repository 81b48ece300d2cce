"""`RayLauncher` on a real cluster of three nodes: the contract of launchers, and what concerns nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from tests.integration.fleet.launcher_suite import (
    LauncherSuite,
    end,
    has_exited,
    read_pid,
    spec,
    start,
    wait_for,
)
from tests.support.ray_nodes import RayNodes, network_namespace
from tests.support.waiting import until

from argosy.deployment import LaunchResources
from argosy.fleet.launchers import (
    LaunchedReplica,
    LaunchError,
    LaunchState,
    RayLauncher,
    StaleEpochError,
)

ADDRESS = "{port}"

pytestmark = [pytest.mark.ray, pytest.mark.exhaustive]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    try:
        namespace = network_namespace()
        namespace.__enter__()
    except PermissionError as error:
        pytest.skip(f"{error}; run as root, or under `unshare --net --map-root-user`")
    nodes = RayNodes(tmp_path_factory.mktemp("ray"))
    yield nodes
    nodes.close()
    namespace.__exit__(None, None, None)


class RayEnvironment:
    def __init__(self, address: str, namespace: str) -> None:
        self._address = address
        self._namespace = namespace

    def create_launcher(self) -> RayLauncher:
        return RayLauncher(self._namespace, self._address)


@pytest.fixture
def environment(nodes: RayNodes, tmp_path: Path) -> RayEnvironment:
    return RayEnvironment(nodes.address, tmp_path.name)


class TestContract(LauncherSuite):
    """The shared contract."""

    address = ADDRESS


@pytest.fixture
async def launcher(environment: RayEnvironment) -> AsyncIterator[RayLauncher]:
    launcher = environment.create_launcher()
    yield launcher
    await end(launcher)


async def test_spreads_over_zones_and_waits_for_a_gpu(launcher: RayLauncher) -> None:
    anywhere = LaunchResources(zones=("c", "a", "b"), labels={"disk": "nvme"})
    for number in range(4):
        await launcher.start(spec(name=f"a-1-{number}", address=ADDRESS, resources=anywhere), 1)
    replicas = await launcher.list_replicas()
    assert [replicas[f"a-1-{number}"].zone for number in range(4)] == ["c", "a", "b", "c"]
    await asyncio.gather(*map(read_pid, replicas.values()))
    assert not any(await asyncio.gather(*(stop(launcher, name) for name in replicas)))

    show_gpu, one = "printenv=CUDA_VISIBLE_DEVICES", LaunchResources(accelerators=1, zones=("b",))
    await launcher.start(spec(show_gpu, name="b-1-0", address=ADDRESS, resources=one), 1)
    await launcher.start(spec(name="b-1-1", address=ADDRESS, resources=one), 1)
    impossible = LaunchResources(custom={"board": 2.0})
    await launcher.start(spec(name="b-1-2", address=ADDRESS, resources=impossible), 1)
    replicas = await launcher.list_replicas()
    assert replicas["b-1-1"].state == LaunchState.PROVISIONING
    assert replicas["b-1-1"].reason == "waiting for a GPU on any node of zone b"
    assert replicas["b-1-2"].reason == "waiting for a larger node: none has 2 board in all"
    await read_pid(replicas["b-1-0"])
    assert await launcher.read_log("b-1-0", 100) == b"CUDA_VISIBLE_DEVICES=0\nlistening\n"
    await stop(launcher, "b-1-0")
    started = await wait_for(launcher, lambda each: each.state == LaunchState.RUNNING, "b-1-1")
    await read_pid(started)
    await launcher.stop("b-1-2", 1)  # while it waits
    assert (await launcher.list_replicas()).keys() == {"b-1-1"}


async def stop(launcher: RayLauncher, name: str) -> None:
    """Kill a replica, and give back what it has reserved."""
    await launcher.stop(name, 1)
    await launcher.remove(name, 1)


async def test_continues_after_the_end_of_its_processes(launcher: RayLauncher) -> None:
    pid = await start(launcher, spec(address=ADDRESS), 7)
    before = await launcher.list_replicas()

    find_process("argosy.fleet.launchers.ray_driver").kill()
    assert await list_when_connected(launcher) == before

    find_process("ray::ReplicaRegistry").kill()
    assert await list_when_connected(launcher) == before
    with pytest.raises(StaleEpochError):
        await launcher.stop("a-1-0", 6)
    assert await read_pid(before["a-1-0"]) == pid

    find_process("ray::ReplicaSupervisor").kill()
    lost = await wait_for(launcher, has_exited)
    assert lost.reason.startswith("its supervisor ended: ")
    await until(lambda: not psutil.pid_exists(pid))
    await launcher.start(spec(address=ADDRESS), 7)
    assert (await launcher.list_replicas())["a-1-0"].attempt == 2


def find_process(text: str) -> psutil.Process:
    """Return the newest process with this text in its command line."""
    found = [
        process
        for process in psutil.process_iter(["cmdline", "create_time"])
        if text in " ".join(process.info["cmdline"] or ())
    ]
    return max(found, key=lambda process: float(process.info["create_time"]))


async def list_when_connected(launcher: RayLauncher) -> Mapping[str, LaunchedReplica]:
    """List the replicas as a controller does, again and again until the cluster answers."""
    while True:
        try:
            return await launcher.list_replicas()
        except LaunchError:
            await asyncio.sleep(0.1)


async def test_replica_of_a_lost_node_starts_on_another(
    nodes: RayNodes, launcher: RayLauncher
) -> None:
    lost = spec(address=ADDRESS, resources=LaunchResources(zones=("c",)))
    await start(launcher, lost, 7)
    await asyncio.to_thread(nodes.remove_node, 2)
    try:
        exited = await wait_for(launcher, has_exited)
        assert exited.reason.endswith(" left the cluster")
        await start(launcher, spec(address=ADDRESS, resources=LaunchResources(zones=("b",))), 7)
        replica = (await launcher.list_replicas())["a-1-0"]
        assert (replica.zone, replica.attempt) == ("b", 2)
    finally:
        await asyncio.to_thread(nodes.add_node, 2)
