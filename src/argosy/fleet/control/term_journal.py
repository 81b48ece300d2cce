"""The fleet that a controller works for, and the memory and event log of a leader's term in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from argosy.deployment import FleetRecords
from argosy.fleet.control.leadership import Leadership
from argosy.fleet.launchers import Launcher
from argosy.policy.reconciliation import ObservedFleet, Reconciliation
from argosy.process import run_in_daemon_thread
from argosy.store import FleetEvent, Store

LauncherFactory = Callable[[str], Launcher]
"""Returns the launcher of a name. Raises LaunchError if it cannot be used on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetContext:
    """The fleet that a controller works for, and its means."""

    store: Store
    """The store of the fleet."""
    store_url: str
    """URL of the store, for the gateways."""
    fleet: str
    """Name of the fleet."""
    create_launcher: LauncherFactory
    folder: Path
    """Private folder for the settings of the gateways."""
    clock: Callable[[], float] = time.time
    """Returns seconds since the epoch."""
    list_watched_logs: Callable[[], Collection[str]] = tuple
    """Returns the replicas whose logs a gateway in this process shows."""
    on_reconciled: Callable[[ObservedFleet, Reconciliation], None] = lambda *_: None
    """Called after each decision. An exception that it raises ends the controller."""


class TermJournal:
    """Records and events of a term, and the event that lets the leader decide again. Not thread-safe."""

    def __init__(self, context: FleetContext, leadership: Leadership) -> None:
        self.fleet = context.fleet
        self.store = context.store
        self.clock = context.clock
        self.leadership = leadership
        self.records = FleetRecords()
        """Memory of the controllers. The store gets its changes with `save`."""
        self.wake = asyncio.Event()
        """Set when another observation or decision may give another result."""
        self.error: BaseException | None = None
        """Error that ends the term."""
        self._events: list[FleetEvent] = []
        self._save_lock = asyncio.Lock()

    async def load(self) -> None:
        """Continue with the records of the last leader."""
        read = partial(self.store.fleets.read_records, self.fleet)
        self.records.load(await run_in_daemon_thread(read))

    def record_event(
        self, kind: str, pool: str = "", replica: str = "", *, reason: str = "", outcome: str = ""
    ) -> None:
        """Append to the event log of the fleet, which is saved later."""
        self._events.append(
            FleetEvent(kind=kind, pool=pool, replica=replica, reason=reason, outcome=outcome)
        )

    async def save(self) -> None:
        """Write records and events.

        Raises:
            DeposedError: Another controller leads by now.
            StoreError: The store cannot be used. They are written by a later call.
        """
        async with self._save_lock:
            lease, changes, events = (
                self.leadership.lease,
                self.records.changes(),
                list(self._events),
            )
            await run_in_daemon_thread(self.store.fleets.save_records, lease, changes)
            self.records.on_saved(changes)
            await run_in_daemon_thread(self.store.fleets.append_events, lease, events)
            del self._events[: len(events)]

    def on_task_ended(self, task: asyncio.Task[None]) -> None:
        """Let the leader decide again after a task of the term, or end the term with the error of the task."""
        if not task.cancelled():
            self.error = self.error or task.exception()
        self.wake.set()
