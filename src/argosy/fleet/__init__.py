"""Fleets: replicas as they are declared, on one machine or many.

With `launchers` replicas run, and `control` has the controller that keeps a fleet as `argosy.deployment` declares it.
The command `argosy serve` runs the smallest fleet, which ends with it. Its replicas are distributed over the GPUs by
`group_replicas`, and their state is in the folder of `runtime_folder`. This package itself imports little.
"""

from argosy.fleet.device_assignment import (
    VISIBLE_DEVICES_VARIABLE,
    GpuSharing,
    ReplicaGroup,
    group_replicas,
    usable_gpus,
)
from argosy.fleet.runtime_folder import runtime_folder
