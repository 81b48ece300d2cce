"""Calls of Ray by the registry of a fleet, and the actor that runs the process of one replica on its node.

All functions block until Ray's global control service has answered. Call them in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import ray
from ray.actor import ActorHandle
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from argosy.deployment import LaunchResources
from argosy.fleet.device_assignment import VISIBLE_DEVICES_VARIABLE, count_installed_gpus
from argosy.fleet.launchers.launcher import LaunchSpec
from argosy.fleet.launchers.local import LocalProcessLauncher
from argosy.fleet.launchers.ray_placement import RayNode, required_resources
from argosy.folders import state_folder

NAME_TIMEOUT_S = 10.0
"""Time in which Ray frees the name of a killed actor."""
NAME_POLL_INTERVAL_S = 0.05
STATUS_INTERVAL_S = 10.0
"""Longest time after which the status is looked at again even if nothing announced a change."""


def list_nodes() -> dict[str, RayNode]:
    """Return the nodes that are alive, by id."""
    available = ray._private.state.available_resources_per_node()  # noqa: SLF001 - has no public name
    return {
        node["NodeID"]: RayNode(
            node_id=node["NodeID"],
            hostname=node["NodeManagerHostname"],
            address=node["NodeManagerAddress"],
            labels=node["Labels"],
            total=node["Resources"],
            available=available.get(node["NodeID"], {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    }


def create_group(
    replica: str, resources: LaunchResources, selector: Mapping[str, str]
) -> PlacementGroup:
    """Create the placement group of a replica on a node that a label selector selects."""
    return placement_group(
        [required_resources(resources)],
        name=replica,
        lifetime="detached",
        bundle_label_selector=[dict(selector)] if selector else None,
    )


def find_group(replica: str) -> PlacementGroup | None:
    """Return the placement group of a replica, or None if it has none."""
    try:
        return get_placement_group(replica)
    except ValueError:
        return None


def node_of_group(group: PlacementGroup) -> str:
    """Return the id of the node on which a placement group is."""
    node_id: str = placement_group_table(group)["bundles_to_node_id"][0]
    return node_id


def create_supervisor(
    namespace: str, replica: str, resources: LaunchResources, group: PlacementGroup, node: RayNode
) -> ActorHandle:
    """Create the supervisor actor of a replica in its placement group."""
    required = required_resources(resources)
    actor = ray.remote(ReplicaSupervisor).options(
        name=replica,
        lifetime="detached",
        num_cpus=required.pop("CPU", 0),
        num_gpus=required.pop("GPU", 0),
        memory=required.pop("memory", None),
        resources=required,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
    )
    deadline = time.monotonic() + NAME_TIMEOUT_S
    while True:
        try:
            return actor.remote(namespace, replica, node.node_id, node.address)
        except ValueError:  # the earlier actor of this name was killed a moment ago
            if time.monotonic() > deadline:
                raise
            time.sleep(NAME_POLL_INTERVAL_S)


def find_supervisor(replica: str) -> ActorHandle | None:
    """Return the supervisor actor of a replica, or None if there is none that is alive."""
    try:
        return ray.get_actor(replica)
    except ValueError:
        return None


class ReplicaSupervisor:
    """Runs one replica by a `LocalProcessLauncher`. The replica ends with this actor.

    Ray gives the actor the replica's resources and the variable `CUDA_VISIBLE_DEVICES`, which the replica inherits.
    """

    def __init__(self, namespace: str, replica: str, node_id: str, host: str) -> None:
        self._replica = replica
        # What is installed beside Ray is found even if Ray was started by its path.
        programs = str(Path(sys.executable).parent)
        os.environ["PATH"] = os.pathsep.join((programs, os.environ.get("PATH", os.defpath)))
        self._folder = state_folder() / "ray" / node_id / namespace / replica
        self._launcher = LocalProcessLauncher(
            self._folder,
            host=host,
            die_with_launcher=True,
            count_gpus=_count_gpus,
        )

    async def start(self, spec: bytes, epoch: int) -> None:
        """Start the process, as the next attempt if it has exited.

        Raises:
            LaunchError: It cannot be started on this node.
            StaleEpochError: The epoch is outdated.
        """
        decoded = msgspec.json.decode(spec, type=LaunchSpec)
        # Ray has reserved the resources. It assigns GPUs but no CPUs, and does not limit memory.
        resources = LaunchResources(
            accelerators=decoded.resources.accelerators,
            memory_bytes=decoded.resources.memory_bytes,
        )
        await self._launcher.start(msgspec.structs.replace(decoded, resources=resources), epoch)

    async def drain(self, epoch: int) -> None:
        """Ask the process to exit."""
        await self._launcher.drain(self._replica, epoch)

    async def stop(self, epoch: int) -> None:
        """Kill the process. Returns after its exit."""
        await self._launcher.stop(self._replica, epoch)

    async def wait_for_status(self, known: bytes) -> bytes:
        """Return the status as a `LaunchedReplica` in JSON, once it is not the known one."""
        while True:
            self._launcher.changed.clear()
            replica = (await self._launcher.list_replicas()).get(self._replica)
            status = msgspec.json.encode(replica)
            if status != known:
                return status
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STATUS_INTERVAL_S):
                    await self._launcher.changed.wait()

    async def read_log(self, max_bytes: int) -> bytes:
        """Return the end of the replica's log."""
        return await self._launcher.read_log(self._replica, max_bytes)

    async def close(self) -> None:
        """End the process if it runs, and delete its files."""
        await self._launcher.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _count_gpus() -> int:
    """Return the number of GPUs on this node, of which Ray may know some that the driver does not report."""
    selected = os.environ.get(VISIBLE_DEVICES_VARIABLE, "").split(",")
    highest = max((int(gpu) for gpu in selected if gpu.isdigit()), default=-1)
    return max(count_installed_gpus(), highest + 1)
