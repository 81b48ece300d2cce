"""A GPU as a value: Triton's kernels over a runtime that has the memory, the stream and the graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from argosy.engine.execution.gpu import memory_profile
from argosy.engine.execution.gpu.attention import TritonAttention
from argosy.engine.execution.gpu.elementwise import TritonElementwiseOps
from argosy.engine.execution.gpu.linear import create_gpu_linear
from argosy.engine.execution.pack_cache import pack_in_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from argosy.engine.engine_config import WeightFormat
    from argosy.engine.execution.batch import Attention, KvCacheShape
    from argosy.engine.execution.device import CapturedGraph, DeviceEvent, GraphCapturer
    from argosy.engine.execution.elementwise_cpu import ElementwiseOps
    from argosy.engine.execution.pack_cache import PackedWeightProvider

KV_SHARE = 0.95
"""Of what weights and the largest step leave free; the rest is for fragments and what cannot be foreseen."""
MEMORY_MARGIN_BYTES = 512 << 20
"""Kept beside the largest step: recorded decode steps have a pool of their own."""
WARMUP_SIZES = (1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 1024)
"""Every tile of the kernels, with token counts that are and are not multiples of 16, which they are compiled for."""
RIDGE_TOKENS = 256
"""Hopper computes 206 (H200) to 295 (H100) multiplications in bfloat16 while it reads one weight."""
MIN_CAPABILITY = (8, 0)
"""Ampere: the first with bfloat16 in its matrix unit."""
MIN_FLOAT8_CAPABILITY = (8, 9)
"""Ada: the first with e4m3 in its matrix unit."""


class GpuRuntime(Protocol):
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
    def compute_capability(self) -> tuple[int, int]:
        """CUDA's compute capability."""
        ...

    @property
    def num_multiprocessors(self) -> int:
        """Multiprocessors."""
        ...

    def free_bytes(self) -> int:
        """Bytes that may still be allocated."""
        ...

    def measure_peak_bytes(self, work: Callable[[], object]) -> int:
        """Do `work` and wait for it: the most bytes that it had allocated at once."""
        ...

    def empty_pinned_like(self, tensor: Tensor) -> Tensor:
        """An empty tensor of the same shape and dtype in host memory that the GPU copies from and to."""
        ...

    def record_event(self) -> DeviceEvent:
        """Mark the work launched so far."""
        ...

    def capture(self, work: Callable[[], object]) -> CapturedGraph:
        """See `Recorder`."""
        ...


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """See `Device`."""

    runtime: GpuRuntime

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
    def max_steps_in_flight(self) -> int:
        """See `Device`."""
        return 1

    @property
    def ridge_tokens(self) -> int:
        """See `Device`."""
        return RIDGE_TOKENS

    @property
    def graph_capturer(self) -> GraphCapturer | None:
        """See `Device`."""
        return self.runtime

    @property
    def warmup_sizes(self) -> tuple[int, ...]:
        """See `Device`."""
        return WARMUP_SIZES

    @property
    def kv_memory_fraction(self) -> float:
        """See `Device`."""
        return KV_SHARE

    @property
    def elementwise_ops(self) -> ElementwiseOps:
        """See `Device`."""
        return TritonElementwiseOps()

    def free_bytes(self) -> int:
        """See `Device`."""
        return self.runtime.free_bytes()

    def working_bytes(self, key: str, run_largest_step: Callable[[], object]) -> int:
        """See `Device`. Measured once for each key; later boots read it from disk."""
        full_key = f"{key} {self.name} torch {torch.__version__}"
        peak = memory_profile.read_memory_profile(full_key)
        if peak is None:
            peak = self.runtime.measure_peak_bytes(run_largest_step)
            memory_profile.write_memory_profile(full_key, peak)
        return peak + MEMORY_MARGIN_BYTES

    def weight_layout_id(self, dtype: torch.dtype) -> str:
        """See `Device`. Weights are copied to the GPU as they are."""
        del dtype
        return ""

    def create_linear(
        self,
        weight: Tensor,
        bias: Tensor | None,
        weight_format: WeightFormat | None = None,
        get_packed: PackedWeightProvider = pack_in_memory,
    ) -> Callable[[Tensor], Tensor]:
        """See `Device`."""
        del get_packed
        if weight_format is None:
            return create_gpu_linear(weight, bias)
        if weight_format == "fp8":
            self._require_float8("quantize fp8")
            return create_gpu_linear(weight, bias, "float8")
        raise ValueError(
            f"a GPU has no {weight_format} weights; set quantize to fp8, or leave it out"
        )

    def create_attention(self, shape: KvCacheShape) -> Attention:
        """See `Device`."""
        if shape.dtype.itemsize == 1:
            self._require_float8("kv_dtype fp8")
        return TritonAttention(
            shape, device=self.torch_device, num_multiprocessors=self.runtime.num_multiprocessors
        )

    def to_device(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Device`. Through pinned memory, which the allocator keeps until the copy is done."""
        staged = self.runtime.empty_pinned_like(tensor).copy_(tensor)
        if out is not None:
            return out.copy_(staged, non_blocking=True)
        return staged.to(self.torch_device, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        """See `Device`."""
        return self.runtime.empty_pinned_like(tensor).copy_(tensor, non_blocking=True)

    def record_event(self) -> DeviceEvent:
        """See `Device`."""
        return self.runtime.record_event()

    def _require_float8(self, setting: str) -> None:
        if self.runtime.compute_capability < MIN_FLOAT8_CAPABILITY:
            raise ValueError(
                f"{self.name} cannot compute with float8; leave {setting} out, "
                "or take a GPU of the Ada or Hopper generation or later"
            )
