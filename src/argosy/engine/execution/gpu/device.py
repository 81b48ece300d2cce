"""A GPU as a value: Triton's kernels over a runtime that has the memory, the stream and the graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from argosy.engine.execution.gpu import memory_profile
from argosy.engine.execution.gpu.attention import TritonAttention
from argosy.engine.execution.gpu.elementwise import TritonRows
from argosy.engine.execution.gpu.linear import pack
from argosy.engine.execution.pack_cache import in_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from argosy.engine.engine_config import WeightFormat
    from argosy.engine.execution.batch import Attention, CacheShape
    from argosy.engine.execution.device import Event, Graph, Recorder
    from argosy.engine.execution.elementwise_cpu import RowOps
    from argosy.engine.execution.pack_cache import Keep

KV_SHARE = 0.95
"""Of what weights and the largest step leave free; the rest is for fragments and what cannot be foreseen."""
MARGIN_BYTES = 512 << 20
"""Kept beside the largest step: recorded decode steps have a pool of their own."""
WARM_SIZES = (1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 1024)
"""Every tile of the kernels, with token counts that are and are not multiples of 16, which they are compiled for."""
RIDGE_TOKENS = 256
"""Hopper computes 206 (H200) to 295 (H100) multiplications in bfloat16 while it reads one weight."""
LEAST_CAPABILITY = (8, 0)
"""Ampere: the first with bfloat16 in its matrix unit."""
FLOAT8_CAPABILITY = (8, 9)
"""Ada: the first with e4m3 in its matrix unit."""


class Runtime(Protocol):
    """What the engine needs of a GPU besides kernels. One stream: work is done in the order of its launch."""

    @property
    def name(self) -> str:
        """The processor's name."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where its tensors live."""
        ...

    @property
    def capability(self) -> tuple[int, int]:
        """CUDA's compute capability."""
        ...

    @property
    def processors(self) -> int:
        """Multiprocessors."""
        ...

    def free_bytes(self) -> int:
        """Bytes that may still be allocated."""
        ...

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Do `work` and wait for it: the most bytes that it had allocated at once."""
        ...

    def pinned(self, tensor: Tensor) -> Tensor:
        """An empty tensor of the same shape and dtype in host memory that the GPU copies from and to."""
        ...

    def event(self) -> Event:
        """Mark the work launched so far."""
        ...

    def record(self, work: Callable[[], object]) -> Graph:
        """See `Recorder`."""
        ...


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """See `Device`."""

    runtime: Runtime

    @property
    def name(self) -> str:
        """See `Device`."""
        return self.runtime.name

    @property
    def torch_device(self) -> torch.device:
        """See `Device`."""
        return self.runtime.torch_device

    @property
    def default_dtype(self) -> torch.dtype:
        """See `Device`."""
        return torch.bfloat16

    @property
    def inflight(self) -> int:
        """See `Device`."""
        return 1

    @property
    def ridge_tokens(self) -> int:
        """See `Device`."""
        return RIDGE_TOKENS

    @property
    def recorder(self) -> Recorder | None:
        """See `Device`."""
        return self.runtime

    @property
    def warm_sizes(self) -> tuple[int, ...]:
        """See `Device`."""
        return WARM_SIZES

    @property
    def kv_share(self) -> float:
        """See `Device`."""
        return KV_SHARE

    @property
    def rows(self) -> RowOps:
        """See `Device`."""
        return TritonRows()

    def free_bytes(self) -> int:
        """See `Device`."""
        return self.runtime.free_bytes()

    def working_bytes(self, key: str, largest_step: Callable[[], object]) -> int:
        """See `Device`. Measured once for each key; later boots read it from disk."""
        full_key = f"{key} {self.name} torch {torch.__version__}"
        peak = memory_profile.read(full_key)
        if peak is None:
            peak = self.runtime.peak_bytes(largest_step)
            memory_profile.write(full_key, peak)
        return peak + MARGIN_BYTES

    def packing(self, dtype: torch.dtype) -> str:
        """See `Device`. Weights are copied to the GPU as they are."""
        del dtype
        return ""

    def linear(
        self,
        weight: Tensor,
        bias: Tensor | None,
        form: WeightFormat | None = None,
        keep: Keep = in_memory,
    ) -> Callable[[Tensor], Tensor]:
        """See `Device`."""
        del keep
        if form is None:
            return pack(weight, bias)
        if form == "fp8":
            self._require_float8("quantize fp8")
            return pack(weight, bias, "float8")
        raise ValueError(f"a GPU has no {form} weights; set quantize to fp8, or leave it out")

    def attention(self, shape: CacheShape) -> Attention:
        """See `Device`."""
        if shape.dtype.itemsize == 1:
            self._require_float8("kv_dtype fp8")
        return TritonAttention(shape, device=self.torch_device, processors=self.runtime.processors)

    def to_device(self, tensor: Tensor, into: Tensor | None = None) -> Tensor:
        """See `Device`. Through pinned memory, which the allocator keeps until the copy is done."""
        staged = self.runtime.pinned(tensor).copy_(tensor)
        if into is not None:
            return into.copy_(staged, non_blocking=True)
        return staged.to(self.torch_device, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        """See `Device`."""
        return self.runtime.pinned(tensor).copy_(tensor, non_blocking=True)

    def event(self) -> Event:
        """See `Device`."""
        return self.runtime.event()

    def _require_float8(self, setting: str) -> None:
        if self.runtime.capability < FLOAT8_CAPABILITY:
            raise ValueError(
                f"{self.name} cannot compute with float8; leave {setting} out, "
                "or take a GPU of the Ada or Hopper generation or later"
            )
