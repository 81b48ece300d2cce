"""The control plane: what runs where, and keeping it so."""

from argosy.fleet.gpus import Place, Sharing, places, usable_gpus
from argosy.fleet.launcher import Launcher
from argosy.fleet.local import LocalLauncher
from argosy.fleet.runtime import runtime_folder
from argosy.fleet.supervisor import FleetFailedError, Supervisor
from argosy.fleet.wire import ReplicaSpec

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
