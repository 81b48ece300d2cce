"""The control plane: what runs where, and keeping it so."""

from argosy.fleet.device_assignment import Place, Sharing, places, usable_gpus
from argosy.fleet.launch_messages import ReplicaSpec
from argosy.fleet.launcher import Launcher
from argosy.fleet.local_launcher import LocalLauncher
from argosy.fleet.runtime_folder import runtime_folder
from argosy.fleet.supervisor import FleetFailedError, Supervisor

__all__ = [
    "FleetFailedError",
    "Launcher",
    "LocalLauncher",
    "Place",
    "ReplicaSpec",
    "Sharing",
    "Supervisor",
    "places",
    "runtime_folder",
    "usable_gpus",
]
