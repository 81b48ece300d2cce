"""Environment of a fleet on this machine: its folder, and the launchers that its declaration names."""

from __future__ import annotations

import os
from pathlib import Path

from argosy.deployment import (
    BUILT_IN_ENGINES,
    FleetConfig,
    MachineCapacity,
    list_growing_pools,
)
from argosy.fleet.device_assignment import count_installed_gpus, visible_gpus
from argosy.fleet.launchers import (
    KubernetesLauncher,
    Launcher,
    LaunchError,
    LocalProcessLauncher,
    RayLauncher,
)
from argosy.folders import state_folder
from argosy.machine_resources import total_bytes, usable_cpus


def fleet_folder(fleet: str) -> Path:
    """Return the folder of a fleet's state on this machine.

    Raises:
        FileNotFoundError: The user has no home folder.
    """
    return state_folder() / "fleets" / fleet


def read_capacity() -> MachineCapacity:
    """Return what this machine has for replicas."""
    return MachineCapacity(
        cores=usable_cpus(),
        memory_bytes=total_bytes(),
        gpus=len(visible_gpus(os.environ, count_installed_gpus)),
    )


def check_sources(old: FleetConfig | None, new: FleetConfig) -> None:
    """Check that this machine has the models of pools that start replicas on it, as far as they are paths.

    Raises:
        LaunchError: It does not have one.
    """
    for pool in list_growing_pools(old, new):
        source = new.model_of(pool).source or ""
        if source.startswith("/") and pool.engine in BUILT_IN_ENGINES and not Path(source).exists():
            raise LaunchError(
                f"models[{pool.model}].source: {source} does not exist on the controller's machine;"
                " correct the path, or put the model there"
            )


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
