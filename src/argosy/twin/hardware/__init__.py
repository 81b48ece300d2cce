"""Model of the hardware: what a replica costs in time and memory on an accelerator.

The data files have accelerators, engines and efficiencies of kernels (`load_hardware`), and shapes of models
(`load_shape`). They are joined to a `ReplicaSpec` by `build_replica`. Its steps are priced by `RooflineCost`, its
memory is computed by `fit_memory`, and requests are served on it by `simulate_replica`. A question that cannot be
answered raises `CapacityError`, which names the bound.
"""

from argosy.twin.hardware.accelerators import (
    KV_BYTES,
    WEIGHT_BYTES,
    Accelerator,
    EngineProfile,
    Hardware,
    KernelEfficiencies,
    Precision,
    load_hardware,
)
from argosy.twin.hardware.errors import CapacityError
from argosy.twin.hardware.memory import MemoryFit, fit_memory
from argosy.twin.hardware.model_shape import (
    ModelShape,
    find_shape,
    load_shape,
    model_source,
    parse_shape,
)
from argosy.twin.hardware.replica_hardware import ReplicaHardware
from argosy.twin.hardware.roofline import ReplicaSpec, RooflineCost, build_replica
from argosy.twin.hardware.serving import (
    OfferedRequest,
    RequestTimes,
    ServingLimits,
    simulate_replica,
)
