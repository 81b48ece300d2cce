"""Environment of a fleet on this machine: its folder, and the launchers that its declaration names."""

from __future__ import annotations

from pathlib import Path

from argosy.fleet.declaration import FleetConfig
from argosy.fleet.launchers import Launcher, LaunchError, LocalProcessLauncher
from argosy.folders import state_folder


def fleet_folder(fleet: str) -> Path:
    """Return the folder of a fleet's state on this machine.

    Raises:
        FileNotFoundError: The user has no home folder.
    """
    return state_folder() / "fleets" / fleet


def open_launcher(name: str, folder: Path) -> Launcher:
    """Return a launcher by the name that declarations use.

    Args:
        name: `local`.
        folder: Folder of the fleet.

    Raises:
        LaunchError: It cannot be used on this machine.
    """
    if name == "local":
        return LocalProcessLauncher(folder / "replicas")
    raise LaunchError(f"this version has no launcher {name!r}; use `launcher: local`")


async def check_launchers(config: FleetConfig, folder: Path) -> None:
    """Check that the launchers of a declaration can be used from this machine. Nothing is changed.

    Raises:
        LaunchError: One cannot be used. The message contains the remedy.
    """
    for name in sorted({pool.launcher for pool in config.pools} - {"local"}):
        launcher = open_launcher(name, folder)
        try:
            await launcher.list_replicas()
        finally:
            await launcher.close()
