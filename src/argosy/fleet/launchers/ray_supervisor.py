"""Actor that runs the process of one replica on its node of a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from pathlib import Path

import msgspec

from argosy.deployment import LaunchResources
from argosy.fleet.device_assignment import VISIBLE_DEVICES_VARIABLE, count_installed_gpus
from argosy.fleet.launchers.launcher import LaunchedReplica, LaunchSpec
from argosy.fleet.launchers.local import LocalProcessLauncher
from argosy.folders import state_folder

STATUS_INTERVAL_S = 10.0
"""Longest time after which the status is looked at again even if nothing announced a change."""


class ReplicaSupervisor:
    """Runs one replica by a `LocalProcessLauncher`. The replica ends with this actor.

    Ray gives the actor the replica's resources and the variable `CUDA_VISIBLE_DEVICES`, which the replica inherits.

    Args:
        namespace: Ray namespace of the fleet.
        replica: Name of the replica.
        node_id: Ray's id of this node.
        host: Address of this node.
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


def decode_status(status: bytes) -> LaunchedReplica | None:
    """Return the replica of `wait_for_status`, or None if it was never started."""
    return msgspec.json.decode(status, type=LaunchedReplica | None)
