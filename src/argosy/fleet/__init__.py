"""The control plane: what runs where, and keeping it so."""

from argosy.fleet.device_assignment import DeviceAssignment, GpuSharing, assign_devices, usable_gpus
from argosy.fleet.launch_messages import ReplicaSpec
from argosy.fleet.launcher import Launcher
from argosy.fleet.local_launcher import LocalLauncher
from argosy.fleet.runtime_folder import runtime_folder
from argosy.fleet.supervisor import FleetFailedError, Supervisor

__all__ = [
    "DeviceAssignment",
    "FleetFailedError",
    "GpuSharing",
    "Launcher",
    "LocalLauncher",
    "ReplicaSpec",
    "Supervisor",
    "assign_devices",
    "runtime_folder",
    "usable_gpus",
]
