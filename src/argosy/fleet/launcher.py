"""The face of every launcher: what makes replicas run somewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from argosy.fleet.launch_messages import ReplicaSpec
from argosy.policy import ProcessRun


class Launcher(Protocol):
    """Starts and ends replicas, and knows which there are. Doing anything twice does nothing the second time."""

    @property
    def changed(self) -> asyncio.Event:
        """Set whenever a life begins, becomes ready or ends; whoever waits for it clears it."""
        ...

    def list_runs(self) -> Mapping[str, ProcessRun]:
        """The latest life of each replica that was started, by name."""
        ...

    async def start(self, spec: ReplicaSpec) -> None:
        """Begin a life, unless the replica of that name lives. Raises OSError when no process can be made."""
        ...

    async def drain(self, name: str) -> None:
        """Let it finish what runs, within its drain deadline, and end; returns when it has, or is late."""
        ...

    async def stop(self, name: str) -> None:
        """End it at once; returns when it has ended."""
        ...
