"""Launcher of simulated replicas, for simulations and for tests of the controller under a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from argosy.fleet.launchers.launcher import LaunchedReplica, LaunchError, LaunchSpec
from argosy.fleet.launchers.simulated_cluster import SimulatedCluster


class SimulatedLauncher:
    """Launches replicas in a `SimulatedCluster`, which outlives the launcher. Several controllers may share it."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._changed = asyncio.Event()
        cluster.listeners.append(self._changed)

    @property
    def changed(self) -> asyncio.Event:
        """Event that is set whenever the state of a replica changes. The waiting task clears it."""
        return self._changed

    async def list_replicas(self) -> Mapping[str, LaunchedReplica]:
        """Return all replicas that were started and not removed, by name.

        Raises:
            LaunchError: The cluster cannot be reached.
        """
        self._check_reachable()
        return self._cluster.list_replicas()

    async def start(self, spec: LaunchSpec, epoch: int) -> None:
        """Start the replica unless it runs."""
        self._check(epoch)
        self._cluster.start(spec)

    async def drain(self, name: str, epoch: int) -> None:
        """Ask the replica to exit once its requests have ended."""
        self._check(epoch)
        self._cluster.drain(name)

    async def stop(self, name: str, epoch: int) -> None:
        """Kill the replica."""
        self._check(epoch)
        self._cluster.kill(name, "it was stopped")

    async def remove(self, name: str, epoch: int) -> None:
        """Forget a replica that has exited."""
        self._check(epoch)
        self._cluster.remove(name)

    async def read_log(self, name: str, max_bytes: int) -> bytes:
        """Return the end of the replica's log: what happened to it, and when."""
        return self._cluster.read_log(name).encode()[-max_bytes:] if max_bytes > 0 else b""

    async def close(self) -> None:
        """Stop following the changes of the cluster."""
        self._cluster.listeners.remove(self._changed)

    def _check(self, epoch: int) -> None:
        self._check_reachable()
        self._cluster.check_epoch(epoch)

    def _check_reachable(self) -> None:
        if self._cluster.unreachable_reason:
            raise LaunchError(self._cluster.unreachable_reason)
