"""Device of a GPU, with Triton kernels. Its subclass has what belongs to CUDA: memory, stream and graphs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
import triton
from torch import Tensor

from argosy.engine.engine_config import WeightFormat
from argosy.engine.execution.architectures.decoder import DeltaNetArchitecture
from argosy.engine.execution.checkpoint_formats.grouped_weight import GroupedSource
from argosy.engine.execution.kernels.attention import Attention
from argosy.engine.execution.kernels.batch import KvCacheShape
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.kernels.gpu import memory_profile
from argosy.engine.execution.kernels.gpu.attention import TritonAttention
from argosy.engine.execution.kernels.gpu.elementwise import TritonElementwiseOps
from argosy.engine.execution.kernels.gpu.linear import create_gpu_linear
from argosy.engine.execution.kernels.operations import DeltaRule, DeltaRuleWeights
from argosy.engine.execution.kernels.pack_cache import PackedWeightProvider, pack_in_memory

MEMORY_MARGIN_BYTES = 512 << 20
"""Memory kept free beside the largest step, because captured decode steps have their own pool."""
MIN_CAPABILITY = (8, 0)
"""Compute capability of Ampere, the first generation with bfloat16 in its matrix unit."""
MIN_FLOAT8_CAPABILITY = (8, 9)
"""Compute capability of Ada, the first generation with e4m3 in its matrix unit."""


class GpuDevice(Device):
    """Device of one GPU. All work runs in one stream, in the order of its launch."""

    default_dtype = torch.bfloat16
    elementwise_ops = TritonElementwiseOps()
    max_steps_in_flight = 1
    ridge_tokens = 256
    """Hopper computes 206 (H200) to 295 (H100) bfloat16 multiplications while it reads one weight."""
    warmup_sizes = (1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 1024)
    """Sizes for every tile of the kernels. Multiples of 16 and other sizes are compiled separately."""
    mask_threads = 4
    """The GPU leaves most CPUs idle."""
    kv_memory_fraction = 0.95
    """Fraction of the memory left by weights and the largest step. The rest covers fragmentation and unforeseen use."""
    has_group_linear = False
    compute_capability: tuple[int, int]
    """CUDA compute capability."""
    num_multiprocessors: int

    @abstractmethod
    def measure_peak_bytes(self, work: Callable[[], object]) -> int:
        """Run `work`, wait for it, and return the largest number of bytes that it had allocated at once."""

    @abstractmethod
    def empty_pinned_like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialised tensor of the same shape and dtype in pinned host memory."""

    @property
    def kernel_compiler(self) -> str:
        return f"triton {triton.__version__}"

    def instruction_set(self, dtype: torch.dtype, weight_format: WeightFormat | None) -> str:
        """Return the compute capability, since the order of all sums depends on nothing else of the GPU."""
        del dtype, weight_format
        major, minor = self.compute_capability
        return f"sm_{major}{minor}"

    def working_bytes(self, key: str, run_largest_step: Callable[[], object]) -> int:
        """Return the bytes for activations. They are measured once per key, and later starts read them from disk."""
        full_key = f"{key} {self.name} torch {torch.__version__}"
        peak = memory_profile.read_memory_profile(full_key)
        if peak is None:
            peak = self.measure_peak_bytes(run_largest_step)
            memory_profile.write_memory_profile(full_key, peak)
        return peak + MEMORY_MARGIN_BYTES

    def weight_layout_id(self, dtype: torch.dtype) -> str:
        """Return "", because weights are copied to the GPU unchanged."""
        del dtype
        return ""

    def create_linear(
        self,
        weight: Tensor,
        bias: Tensor | None,
        weight_format: WeightFormat | None = None,
        get_packed: PackedWeightProvider = pack_in_memory,
    ) -> Callable[[Tensor], Tensor]:
        del get_packed
        if weight_format is None:
            return create_gpu_linear(weight, bias)
        if weight_format == "fp8":
            self._require_float8("quantize fp8")
            return create_gpu_linear(weight, bias, "float8")
        raise ValueError(
            f"GPUs do not support {weight_format} weights; set quantize to fp8, or remove it"
        )

    def create_group_linear(
        self, source: GroupedSource, bias: Tensor | None, get_packed: PackedWeightProvider
    ) -> Callable[[Tensor], Tensor]:
        del bias, get_packed
        raise ValueError(
            f"GPUs do not support {source.format.describe()} weights; set quantize to none"
        )

    def create_attention(self, shape: KvCacheShape) -> Attention:
        if shape.dtype.itemsize == 1:
            self._require_float8("kv_dtype fp8")
        return TritonAttention(
            shape, device=self.torch_device, num_multiprocessors=self.num_multiprocessors
        )

    def create_delta_rule(
        self, architecture: DeltaNetArchitecture, weights: DeltaRuleWeights
    ) -> DeltaRule:
        del architecture, weights
        raise ValueError(
            "there are no GPU kernels for gated delta nets (Qwen3-Next, Qwen3.5); set device to cpu"
        )

    def to_device(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """Copy through pinned memory, which the allocator keeps until the copy is done."""
        pinned = self.empty_pinned_like(tensor).copy_(tensor)
        if out is not None:
            return out.copy_(pinned, non_blocking=True)
        return pinned.to(self.torch_device, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        return self.empty_pinned_like(tensor).copy_(tensor, non_blocking=True)

    def _require_float8(self, setting: str) -> None:
        if self.compute_capability < MIN_FLOAT8_CAPABILITY:
            raise ValueError(
                f"{self.name} does not support float8; remove {setting}, "
                "or use a GPU of the Ada or Hopper generation or later"
            )
