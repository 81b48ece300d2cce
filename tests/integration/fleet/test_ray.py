"""`RayLauncher` on a real cluster of three nodes: the contract of launchers, and what concerns nodes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import httpx2
import msgspec
import psutil
import pytest
from tests.e2e.test_fleet import Commands
from tests.integration.fleet.launcher_suite import (
    LauncherSuite,
    has_exited,
    read_pid,
    spec,
    start,
    wait_for,
)
from tests.support.ray_nodes import RayNodes, network_namespace
from tests.support.state_processes import kill_processes
from tests.support.waiting import until

from argosy.deployment import LaunchResources
from argosy.fleet.launchers import (
    LaunchedReplica,
    LaunchError,
    LaunchState,
    RayLauncher,
    StaleEpochError,
)

NUM_STREAMS = 32
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
    for name in await launcher.list_replicas():
        await launcher.stop(name, 1_000)
        await launcher.remove(name, 1_000)
    await launcher.close()


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


@pytest.fixture
def fleet(nodes: RayNodes, tmp_path: Path) -> Iterator[Commands]:
    fleet = Commands(tmp_path, "ray-three-nodes.yaml")
    fleet.declare(ray={"address": nodes.address})
    yield fleet
    kill_processes(tmp_path)


@pytest.mark.timeout(600)
async def test_streams_survive_the_loss_of_a_node(nodes: RayNodes, fleet: Commands) -> None:
    fleet.run("up")
    zones = Counter(replica["zone"] for replica in list_replicas(fleet))
    assert zones == {"a": 2, "b": 1, "c": 1}
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{fleet.port}", timeout=300) as client:
        started = [asyncio.Event() for _ in range(NUM_STREAMS)]
        undisturbed = await asyncio.gather(
            *(stream(client, n, started[n]) for n in range(NUM_STREAMS))
        )
        for event in started:
            event.clear()
        streams = [asyncio.create_task(stream(client, n, started[n])) for n in range(NUM_STREAMS)]
        await asyncio.gather(*(event.wait() for event in started))
        assert not any(task.done() for task in streams)
        await asyncio.to_thread(nodes.remove_node, 2)
        try:
            assert await asyncio.gather(*streams) == undisturbed
            await until(lambda: is_complete_without(fleet, "c"))
        finally:
            await asyncio.to_thread(nodes.add_node, 2)
    fleet.run("down")


def list_replicas(fleet: Commands) -> list[dict[str, str]]:
    """Return the replicas that have a node of the cluster."""
    return [replica for replica in fleet.status()["replicas"] if replica.get("zone")]


def is_complete_without(fleet: Commands, zone: str) -> bool:
    running = list_replicas(fleet)
    return (
        all(replica["phase"] == "ready" and replica["zone"] != zone for replica in running)
        and len(running) == 4
    )


async def stream(client: httpx2.AsyncClient, number: int, started: asyncio.Event) -> str:
    """Return the text of a stream that has ended properly."""
    body = {
        "model": "chat",
        "messages": [{"role": "user", "content": f"Tell story number {number}."}],
        "max_tokens": 256,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": number,
        "stream": True,
    }
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return text
            if line.startswith("data: "):
                started.set()
                text += delta(line.removeprefix("data: "))
    raise AssertionError(f"the stream ended early: {text!r}")


def delta(event: str) -> str:
    choices = msgspec.json.decode(event)["choices"]
    return choices[0]["delta"].get("content") or "" if choices else ""
