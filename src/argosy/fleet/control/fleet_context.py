"""The fleet that a controller works for, and its means."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from argosy.fleet.launchers import Launcher
from argosy.store import Store

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
