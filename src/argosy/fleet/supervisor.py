"""Keeps replicas as they are wanted: starts what is not there, again what died, and ends what hangs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

import structlog

from argosy.fleet.launcher import Launcher
from argosy.fleet.wire import ReplicaSpec
from argosy.policy import Action, Custody, CustodyLimits

LOOK_EACH_S = 0.5

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.fleet")


class FleetFailedError(RuntimeError):
    """No replica is left that could be started; the message says why."""


class Supervisor:
    """Holds replicas to their specs. Belongs to one event loop."""

    def __init__(
        self, launcher: Launcher, specs: Sequence[ReplicaSpec], limits: CustodyLimits | None = None
    ) -> None:
        self._launcher = launcher
        self._specs = specs
        self._custody = {spec.name: Custody(limits) for spec in specs}
        self.serving = asyncio.Event()
        """Set once a replica has taken requests."""

    async def run(self) -> None:
        """Reconcile whenever something changes, for ever. Raises FleetFailedError when all were given up."""
        changed = self._launcher.changed
        while True:
            changed.clear()
            await self.reconcile()
            if all(custody.given_up for custody in self._custody.values()):
                raise FleetFailedError(self._why())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EACH_S):
                    await changed.wait()

    async def reconcile(self) -> None:
        """Do what has to be done now; a second time there is nothing to do."""
        now, lives = time.monotonic(), self._launcher.list()
        for spec in self._specs:
            life = lives.get(spec.name)
            action = self._custody[spec.name].decide(life, now)
            if action is Action.START:
                await self._start(spec)
            elif action is Action.KILL:
                log.error("replica_hangs", replica=spec.name)
                await self._launcher.stop(spec.name)
            elif action is Action.GIVE_UP:
                reason = (life.refusal if life else "") or "it ends before it is ready"
                log.error("replica_given_up", replica=spec.name, reason=reason)
        if any(life.ready_at is not None for life in lives.values()):
            self.serving.set()

    async def drain(self) -> None:
        """End all replicas, each within its drain deadline. `run` must have been ended."""
        async with asyncio.TaskGroup() as group:
            for spec in self._specs:
                group.create_task(self._launcher.drain(spec.name))

    async def stop(self) -> None:
        """End all replicas at once."""
        for spec in self._specs:
            await self._launcher.stop(spec.name)

    async def _start(self, spec: ReplicaSpec) -> None:
        if spec.name in self._launcher.list():
            log.warning("replica_restarts", replica=spec.name)
        try:
            await self._launcher.start(spec)
        except OSError as error:  # no memory or no process left; it is tried again at the next look
            log.error("replica_cannot_start", replica=spec.name, reason=str(error))  # noqa: TRY400 - said in a line

    def _why(self) -> str:
        refusals = [life.refusal for life in self._launcher.list().values() if life.refusal]
        return refusals[0] if refusals else "every replica ended before it was ready; see the log"
