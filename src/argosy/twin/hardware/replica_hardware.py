"""Hardware of a replica, as the file of a scenario declares it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from argosy.twin.hardware.accelerators import Precision, load_hardware
from argosy.twin.hardware.model_shape import find_shape
from argosy.twin.hardware.roofline import RooflineCost, build_replica

Count = Annotated[int, Meta(ge=1, le=1024)]


class ReplicaHardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A well-known model on accelerators of a kind."""

    model: str
    """Name such as `llama-3.1-70b`."""
    accelerator: str
    """Name such as `h100_sxm`."""
    weights: Precision = "bf16"
    """Type of the weights."""
    kv: str | None = None
    """Type of the KV cache. By default it follows the weights."""
    engine: str = "vllm"
    """Engine whose kernels and host times are used."""
    tensor_parallel: Count = 1
    """Accelerators of a replica."""
    pipeline_parallel: Count = 1
    """Stages of a replica, each of `tensor_parallel` accelerators."""

    def build_cost(self) -> RooflineCost:
        """Return the price of the steps. Raises CapacityError if a name is unknown, or the model cannot be divided."""
        return RooflineCost(
            build_replica(
                load_hardware(),
                find_shape(self.model),
                self.accelerator,
                engine=self.engine,
                weights=self.weights,
                kv=self.kv,
                tensor_parallel=self.tensor_parallel,
                pipeline_parallel=self.pipeline_parallel,
            )
        )
