"""Interface of launchers, which run replicas in some environment."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from argosy.fleet.launch_messages import ReplicaSpec
from argosy.policy import ProcessRun


class Launcher(Protocol):
    """Starts and stops replicas and lists their processes. All methods are idempotent."""

    @property
    def changed(self) -> asyncio.Event:
        """Event that is set whenever a process starts, becomes ready or exits. The waiting task clears it."""
        ...

    def list_runs(self) -> Mapping[str, ProcessRun]:
        """Return the latest process run of each replica that was started, by name."""
        ...

    async def start(self, spec: ReplicaSpec) -> None:
        """Start a process unless the replica has a running one.

        Raises:
            OSError: The process cannot be created.
        """
        ...

    async def drain(self, name: str) -> None:
        """Let the replica finish running requests and exit. Returns after the exit or the drain deadline."""
        ...

    async def stop(self, name: str) -> None:
        """Kill the replica. Returns after its exit."""
        ...
