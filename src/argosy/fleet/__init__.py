"""Fleet controller: starts, watches and restarts the replicas of one machine.

The function `assign_devices` distributes the replicas over the GPUs. A `Supervisor` compares the wanted replicas with
the running processes. By the decisions of `policy.FleetSupervision` it calls a `Launcher` to start or kill processes.
The `LocalLauncher` runs each replica as a process (`replica_process`) behind a Unix socket in the folder of
`runtime_folder`. Launcher and process exchange the JSON lines of `launch_messages` over standard input and output.
"""

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
