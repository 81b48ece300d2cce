"""Environment of a fleet on this machine: its folder, and the launchers that its declaration names."""

from __future__ import annotations

from pathlib import Path

from argosy.fleet.declaration import FleetConfig, RayConfig
from argosy.fleet.launchers import Launcher, LaunchError, LocalProcessLauncher, RayLauncher
from argosy.folders import state_folder


def fleet_folder(fleet: str) -> Path:
    """Return the folder of a fleet's state on this machine.

    Raises:
        FileNotFoundError: The user has no home folder.
    """
    return state_folder() / "fleets" / fleet


def open_launcher(name: str, folder: Path, config: FleetConfig | None = None) -> Launcher:
    """Return a launcher by the name that declarations use.

    Args:
        name: `local` or `ray`.
        folder: Folder of the fleet.
        config: The declaration in force.

    Raises:
        LaunchError: It cannot be used on this machine.
    """
    if name == "local":
        return LocalProcessLauncher(folder / "replicas")
    if name == "ray":
        return _open_ray(RayConfig() if config is None else config.ray, folder)
    raise LaunchError(f"this version has no launcher {name!r}; use `launcher: local` or `ray`")


async def check_launchers(config: FleetConfig, folder: Path) -> None:
    """Check that this machine can use the launchers of a declaration. Changes nothing.

    Raises:
        LaunchError: One cannot be used.
    """
    if any(pool.launcher == "ray" for pool in config.pools):
        launcher = _open_ray(config.ray, folder)
        try:
            await launcher.connect()
        finally:
            await launcher.close()


def _open_ray(config: RayConfig, folder: Path) -> RayLauncher:
    return RayLauncher(config.namespace or f"argosy-{folder.name}", config.address)
