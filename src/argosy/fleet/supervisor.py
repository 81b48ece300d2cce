"""Supervision of replicas: starts missing replicas, restarts exited ones and kills those that hang."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

import structlog

from argosy.fleet.launch_messages import ReplicaSpec
from argosy.fleet.launcher import Launcher
from argosy.policy import ProcessRun, RestartLimits, SupervisionAction, SupervisionPolicy

RECONCILE_INTERVAL_S = 0.5
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
        self._specs = specs
        self._policies = {spec.name: SupervisionPolicy(limits) for spec in specs}
        self._kill_reasons: dict[str, str] = {}
        """Why a replica was killed, by name, until it is restarted."""
        self._pending_actions: dict[str, asyncio.Task[None]] = {}
        """Running start or kill of each replica, by name. A replica with one gets no other action."""
        self.any_ready = asyncio.Event()
        """Event that is set once a replica has been ready."""

    async def run(self) -> None:
        """Reconcile whenever a process changes, until cancelled.

        Raises:
            FleetFailedError: The policies have given up all replicas.
        """
        changed = self._launcher.changed
        while True:
            changed.clear()
            self.reconcile()
            if all(policy.has_given_up for policy in self._policies.values()):
                raise FleetFailedError(self._failure_reason())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECONCILE_INTERVAL_S):
                    await changed.wait()

    def reconcile(self) -> list[asyncio.Task[None]]:
        """Start the actions that are due now, and return all running actions. Repeated calls start nothing twice.

        Raises:
            OSError: An earlier action of the launcher failed.
        """
        now, runs = time.monotonic(), self._launcher.list_runs()
        for spec in self._specs:
            if self._is_idle(spec.name):
                self._apply_decision(spec, runs.get(spec.name), now)
        if any(run.ready_at is not None for run in runs.values()):
            self.any_ready.set()
        return list(self._pending_actions.values())

    async def drain(self) -> None:
        """Drain all replicas, each within its drain deadline. `run` must have ended."""
        await self._cancel_pending()
        async with asyncio.TaskGroup() as group:
            for spec in self._specs:
                group.create_task(self._launcher.drain(spec.name))

    async def stop(self) -> None:
        """Kill all replicas and wait at most 5 seconds for their exit. `run` must have ended."""
        await self._cancel_pending()
        stop_tasks = {
            asyncio.create_task(self._launcher.stop(spec.name)): spec for spec in self._specs
        }
        ended, stuck = await asyncio.wait(stop_tasks, timeout=KILL_TIMEOUT_S)
        for task in stuck:
            task.cancel()
            log.error("replica_kill_timeout", replica=stop_tasks[task].name)
        for task in ended:
            task.result()

    def _is_idle(self, name: str) -> bool:
        """Return whether the replica has no running action. Raises the error of a failed action."""
        task = self._pending_actions.get(name)
        if task is not None and task.done():
            del self._pending_actions[name]
            task.result()
        return name not in self._pending_actions

    def _apply_decision(self, spec: ReplicaSpec, run: ProcessRun | None, now: float) -> None:
        action = self._policies[spec.name].decide(run, now)
        if run is None:
            if action is SupervisionAction.START:
                self._pending_actions[spec.name] = asyncio.create_task(self._start(spec))
        elif action is SupervisionAction.START:
            reason = self._kill_reasons.pop(spec.name, run.exit_reason)
            log.warning("replica_restarting", replica=spec.name, reason=reason)
            self._pending_actions[spec.name] = asyncio.create_task(self._start(spec))
        elif action is SupervisionAction.KILL:
            timeout_s = self._policies[spec.name].hang_timeout_s(run)
            self._kill_reasons[spec.name] = f"it did not respond for {timeout_s:g} s and was killed"
            log.error("replica_unresponsive", replica=spec.name, timeout_s=timeout_s)
            self._pending_actions[spec.name] = asyncio.create_task(self._launcher.stop(spec.name))
        elif action is SupervisionAction.GIVE_UP:
            reason = run.start_error or f"the process exits before it is ready: {run.exit_reason}"
            log.error("replica_restarts_exhausted", replica=spec.name, reason=reason)

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

    def _failure_reason(self) -> str:
        errors = [run.start_error for run in self._launcher.list_runs().values() if run.start_error]
        return errors[0] if errors else "every replica exited before it was ready; see the log"
