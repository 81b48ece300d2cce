"""Environment of a fleet on this machine: its folder, and the launchers that its declaration names."""

from __future__ import annotations

from pathlib import Path

from argosy.deployment import FleetConfig
from argosy.fleet.launchers import (
    KubernetesLauncher,
    Launcher,
    LaunchError,
    LocalProcessLauncher,
    RayLauncher,
)
from argosy.folders import state_folder


def fleet_folder(fleet: str) -> Path:
    """Return the folder of a fleet's state on this machine.

    Raises:
        FileNotFoundError: The user has no home folder.
    """
    return state_folder() / "fleets" / fleet


def open_launcher(name: str, folder: Path, config: FleetConfig | None = None) -> Launcher:
    """Return a launcher by the name that declarations use.

    `config` is the fleet's declaration, with the settings of the launcher. `local` needs none.

    Raises:
        LaunchError: It cannot be used on this machine.
    """
    if name == "local":
        return LocalProcessLauncher(folder / "replicas")
    if config is None:
        raise LaunchError("the fleet has no declaration that says where its cluster is; apply one")
    if name == "ray":
        ray = config.ray
        return RayLauncher(ray.namespace or f"argosy-{folder.name}", ray.address)
    return KubernetesLauncher(config.fleet or "", config.kubernetes)


async def check_launchers(config: FleetConfig, folder: Path) -> None:
    """Check that the launchers of a declaration can be used from this machine. Nothing is changed.

    Raises:
        LaunchError: One cannot be used. The message says why.
    """
    for name in sorted({pool.launcher for pool in config.pools} - {"local"}):
        launcher = open_launcher(name, folder, config)
        try:
            if isinstance(launcher, RayLauncher):
                await launcher.connect()  # listing would create the registry
            else:
                await launcher.list_replicas()
        finally:
            await launcher.close()
