"""Supervisor of local replicas: performs what `FleetSupervision` decides about their processes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

import structlog

from argosy.fleet.launch_messages import ReplicaSpec
from argosy.fleet.launcher import Launcher
from argosy.policy import (
    FailFleet,
    FleetSupervision,
    GiveUpReplica,
    KillReplica,
    RestartLimits,
    StartReplica,
    SupervisionEffect,
    WakeAt,
)

KILL_TIMEOUT_S = 5.0
"""Time to wait for a killed process. A process that is blocked in the kernel may never exit."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.fleet")


class FleetFailedError(RuntimeError):
    """Raised if no replica is left that can be started. The message contains the reason."""


class Supervisor:
    """Keeps replicas running by their specs. Not thread-safe: use it from one event loop."""

    def __init__(
        self, launcher: Launcher, specs: Sequence[ReplicaSpec], limits: RestartLimits | None = None
    ) -> None:
        self._launcher = launcher
        self._specs = {spec.name: spec for spec in specs}
        self._supervision = FleetSupervision(self._specs, limits)
        self._pending_actions: dict[str, asyncio.Task[None]] = {}
        """Running start or kill of each replica, by name."""
        self._wake_at = 0.0
        self.any_ready = asyncio.Event()
        """Event that is set once a replica has been ready."""

    async def run(self) -> None:
        """Reconcile whenever a process changes, until cancelled.

        Raises:
            FleetFailedError: No replica is left that can be started.
        """
        changed = self._launcher.changed
        while True:
            changed.clear()
            self.reconcile()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._wake_at - time.monotonic()):
                    await changed.wait()

    def reconcile(self) -> list[asyncio.Task[None]]:
        """Start the actions that are due now, and return all running actions. Repeated calls start nothing twice.

        Raises:
            FleetFailedError: No replica is left that can be started.
            OSError: An earlier action of the launcher failed.
        """
        self._collect_ended_actions()
        runs = self._launcher.list_runs()
        for effect in self._supervision.on_tick(runs, time.monotonic()):
            self._perform(effect)
        if any(run.ready_at is not None for run in runs.values()):
            self.any_ready.set()
        return list(self._pending_actions.values())

    async def drain(self) -> None:
        """Drain all replicas, each within its drain deadline. `run` must have ended."""
        await self._cancel_pending()
        async with asyncio.TaskGroup() as group:
            for name in self._specs:
                group.create_task(self._launcher.drain(name))

    async def stop(self) -> None:
        """Kill all replicas and wait at most 5 seconds for their exit. `run` must have ended."""
        await self._cancel_pending()
        stop_tasks = {asyncio.create_task(self._launcher.stop(name)): name for name in self._specs}
        ended, stuck = await asyncio.wait(stop_tasks, timeout=KILL_TIMEOUT_S)
        for task in stuck:
            task.cancel()
            log.error("replica_kill_timeout", replica=stop_tasks[task])
        for task in ended:
            task.result()

    def _collect_ended_actions(self) -> None:
        """Report the ended actions to the supervision. Raises the error of a failed action."""
        for name, task in list(self._pending_actions.items()):
            if task.done():
                del self._pending_actions[name]
                self._supervision.on_action_ended(name)
                task.result()

    def _perform(self, effect: SupervisionEffect) -> None:
        match effect:
            case StartReplica(name, reason):
                if reason:
                    log.warning("replica_restarting", replica=name, reason=reason)
                self._pending_actions[name] = asyncio.create_task(self._start(self._specs[name]))
            case KillReplica(name, timeout_s):
                log.error("replica_unresponsive", replica=name, timeout_s=timeout_s)
                self._pending_actions[name] = asyncio.create_task(self._launcher.stop(name))
            case GiveUpReplica(name, reason):
                log.error("replica_restarts_exhausted", replica=name, reason=reason)
            case FailFleet(reason):
                raise FleetFailedError(reason)
            case WakeAt(at):
                self._wake_at = at

    async def _start(self, spec: ReplicaSpec) -> None:
        try:
            await self._launcher.start(spec)
        except OSError as error:  # e.g. out of memory or processes; the next reconciliation retries
            log.error("replica_start_failed", replica=spec.name, reason=str(error))  # noqa: TRY400 - the reason suffices

    async def _cancel_pending(self) -> None:
        """Cancel all running actions."""
        tasks = list(self._pending_actions.values())
        self._pending_actions.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
