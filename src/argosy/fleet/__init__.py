"""Fleets: replicas as they are declared, on one machine or many.

`declaration` reads what a fleet shall consist of, `launchers` run replicas, and `control` has the controller that keeps
a fleet as it is declared.

`argosy serve` runs its replicas by a `Supervisor`. The function `assign_devices` distributes them over the GPUs. The
`Supervisor` compares the wanted replicas with the running processes. By the decisions of `policy.FleetSupervision` it
calls a `Launcher` to start or kill processes. The `LocalLauncher` runs each replica as a process (`replica_process`)
behind a Unix socket in the folder of `runtime_folder`. Launcher and process exchange the JSON lines of
`launch_messages` over standard input and output.
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
