"""Keeps replicas as they are wanted: starts what is not there, again what died, and ends what hangs."""

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
"""How long a process that was killed may take to end: one that waits in the kernel may take for ever."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.fleet")


class FleetFailedError(RuntimeError):
    """No replica is left that could be started; the message says why."""


class Supervisor:
    """Holds replicas to their specs. Belongs to one event loop."""

    def __init__(
        self, launcher: Launcher, specs: Sequence[ReplicaSpec], limits: RestartLimits | None = None
    ) -> None:
        self._launcher = launcher
        self._specs = specs
        self._policies = {spec.name: SupervisionPolicy(limits) for spec in specs}
        self._pending_actions: dict[str, asyncio.Task[None]] = {}
        """What is being done about a replica: nobody else waits for it."""
        self.any_ready = asyncio.Event()
        """Set once a replica has taken requests."""

    async def run(self) -> None:
        """Reconcile whenever something changes, for ever. Raises FleetFailedError when all were given up."""
        changed = self._launcher.changed
        while True:
            changed.clear()
            self.reconcile()
            if all(custody.has_given_up for custody in self._policies.values()):
                raise FleetFailedError(self._failure_reason())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECONCILE_INTERVAL_S):
                    await changed.wait()

    def reconcile(self) -> list[asyncio.Task[None]]:
        """Begin what has to be done now; all that is under way. A second time there is nothing more to do.

        Raises what the launcher raised at something that it was to do.
        """
        now, lives = time.monotonic(), self._launcher.list_runs()
        for spec in self._specs:
            if self._is_idle(spec.name):
                self._apply_decision(spec, lives.get(spec.name), now)
        if any(life.ready_at is not None for life in lives.values()):
            self.any_ready.set()
        return list(self._pending_actions.values())

    async def drain(self) -> None:
        """Let all replicas finish and leave, each within its drain deadline. `run` must have been ended."""
        await self._cancel_pending()
        async with asyncio.TaskGroup() as group:
            for spec in self._specs:
                group.create_task(self._launcher.drain(spec.name))

    async def stop(self) -> None:
        """End all replicas at once. `run` must have been ended. What cannot be ended soon is left to the kernel."""
        await self._cancel_pending()
        ending = {asyncio.create_task(self._launcher.stop(one.name)): one for one in self._specs}
        ended, stuck = await asyncio.wait(ending, timeout=KILL_TIMEOUT_S)
        for task in stuck:
            task.cancel()
            log.error("replica_kill_timeout", replica=ending[task].name)
        for task in ended:
            task.result()

    def _is_idle(self, name: str) -> bool:
        """Whether nothing is being done about it. Raises what went wrong with what was done."""
        task = self._pending_actions.get(name)
        if task is not None and task.done():
            del self._pending_actions[name]
            task.result()
        return name not in self._pending_actions

    def _apply_decision(self, spec: ReplicaSpec, life: ProcessRun | None, now: float) -> None:
        action = self._policies[spec.name].decide(life, now)
        if action is SupervisionAction.START:
            if life is not None:
                log.warning("replica_restarting", replica=spec.name)
            self._pending_actions[spec.name] = asyncio.create_task(self._start(spec))
        elif action is SupervisionAction.KILL:
            log.error("replica_unresponsive", replica=spec.name)
            self._pending_actions[spec.name] = asyncio.create_task(self._launcher.stop(spec.name))
        elif action is SupervisionAction.GIVE_UP:
            reason = (life.start_error if life else "") or "it ends before it is ready"
            log.error("replica_restarts_exhausted", replica=spec.name, reason=reason)

    async def _start(self, spec: ReplicaSpec) -> None:
        try:
            await self._launcher.start(spec)
        except OSError as error:  # no memory or no process left; it is tried again at the next look
            log.error("replica_start_failed", replica=spec.name, reason=str(error))  # noqa: TRY400 - said in a line

    async def _cancel_pending(self) -> None:
        """Let go of what is under way."""
        tasks = list(self._pending_actions.values())
        self._pending_actions.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _failure_reason(self) -> str:
        refusals = [
            life.start_error for life in self._launcher.list_runs().values() if life.start_error
        ]
        return refusals[0] if refusals else "every replica ended before it was ready; see the log"
