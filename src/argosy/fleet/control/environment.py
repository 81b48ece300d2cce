"""Environment of a fleet on this machine: its folder, and the launchers that its declaration names."""

from __future__ import annotations

from pathlib import Path

from argosy.fleet.launchers import Launcher, LaunchError, LocalProcessLauncher
from argosy.folders import state_folder


def fleet_folder(fleet: str) -> Path:
    """Return the folder of a fleet's state on this machine.

    Raises:
        FileNotFoundError: The user has no home folder.
    """
    return state_folder() / "fleets" / fleet


def check_launcher(name: str) -> None:
    """Check that this installation can use a launcher.

    Args:
        name: Name of the launcher in declarations.

    Raises:
        LaunchError: It cannot. The message contains the remedy.
    """
    if name != "local":
        raise LaunchError(f"this version has no launcher {name!r}; use `launcher: local`")


def open_launcher(name: str, folder: Path) -> Launcher:
    """Return a launcher by the name that declarations use.

    Args:
        name: `local`.
        folder: Folder of the fleet.

    Raises:
        LaunchError: It cannot be used on this machine.
    """
    check_launcher(name)
    return LocalProcessLauncher(folder / "replicas")
