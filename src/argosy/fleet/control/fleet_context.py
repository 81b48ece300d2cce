"""The fleet that a controller works for, and its means."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from argosy.fleet.launchers import Launcher
from argosy.policy.reconciliation import ObservedFleet, Reconciliation
from argosy.store import Store

LauncherFactory = Callable[[str], Launcher]
"""Returns the launcher of a name. Raises LaunchError if it cannot be used on this machine."""

ReconciliationCallback = Callable[[ObservedFleet, Reconciliation], None]


def _ignore(_observed: ObservedFleet, _result: Reconciliation) -> None:
    pass


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
    on_reconciled: ReconciliationCallback = _ignore
    """Called after each decision. An exception that it raises ends the controller."""
