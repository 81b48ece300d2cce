"""Interface to the hardware (`Device`), and its implementation for the CPU."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import torch

from argosy.engine.engine_config import DEFAULT_KV_MEMORY_FRACTION
from argosy.engine.execution.kernels.cpu import cgroup
from argosy.engine.execution.kernels.cpu.attention import create_cpu_attention
from argosy.engine.execution.kernels.cpu.compute_threads import (
    ComputeThreads,
    create_compute_threads,
)
from argosy.engine.execution.kernels.cpu.delta_rule import create_cpu_delta_rule
from argosy.engine.execution.kernels.cpu.elementwise import (
    ElementwiseOps,
    create_cpu_elementwise_ops,
)
from argosy.engine.execution.kernels.cpu.isa import TORCH_ISA_NAME, available_isas, cpu_features
from argosy.engine.execution.kernels.cpu.linear import create_cpu_linear
from argosy.engine.execution.kernels.cpu.linear_group import create_group_linear
from argosy.engine.execution.kernels.cpu.linear_int import create_int_linear
from argosy.engine.execution.kernels.cpu.native_kernels import active_kernels_name, load_kernels
from argosy.engine.execution.kernels.pack_cache import pack_in_memory
from argosy.native import NativeUnavailableError, compiler_version

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from argosy.engine.engine_config import WeightFormat
    from argosy.engine.execution.architectures.model_architecture import DeltaNetArchitecture
    from argosy.engine.execution.checkpoint_formats.grouped_weight import GroupedSource
    from argosy.engine.execution.kernels.batch import Attention, KvCacheShape
    from argosy.engine.execution.kernels.cpu.delta_rule import DeltaRule, DeltaRuleWeights
    from argosy.engine.execution.kernels.pack_cache import PackedWeightProvider

WARMUP_SIZES = (1, 16)
"""Token numbers of the warm-up prefills. One row and several rows take different code paths."""
RIDGE_TOKENS = 24
"""Ridge of the CPU. A step of the bundled model on one core (AMX) takes 1.35 ms plus 0.053 ms per prompt token."""

ONEDNN_ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
"""Environment variable that limits the instruction set of oneDNN, which torch uses for float32 linears."""


class DeviceEvent(Protocol):
    """Event in the device's stream of work."""

    def synchronize(self) -> None:
        """Wait until all work launched before the event is done."""
        ...

    def seconds_since(self, earlier: Self) -> float:
        """Return the seconds of device time between two completed events."""
        ...


class CapturedGraph(Protocol):
    """Captured device work, which can be launched again with the current content of its inputs."""

    def replay(self) -> None:
        """Launch the captured work."""
        ...


class GraphCapturer(Protocol):
    """Captures graphs, which share one memory pool. The largest graph must be captured first."""

    def capture(self, work: Callable[[], object]) -> CapturedGraph:
        """Capture what `work` launches.

        `work` must have run once before. Its inputs and outputs must stay at their addresses.
        """
        ...


class Device(Protocol):
    """Hardware interface of the engine. Immutable, with methods that have no hidden state."""

    @property
    def name(self) -> str:
        """Description of the hardware in use, for the log and for `CoreReady`."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Torch device of the model's tensors."""
        ...

    @property
    def default_dtype(self) -> torch.dtype:
        """Dtype of weights and activations if the settings say "auto"."""
        ...

    @property
    def compute_threads(self) -> ComputeThreads | None:
        """CPU threads that compute, or None if the device is not a CPU."""
        ...

    @property
    def max_steps_in_flight(self) -> int:
        """Best number of steps in flight while the next one is planned."""
        ...

    @property
    def ridge_tokens(self) -> int:
        """Number of tokens above which computing a step takes longer than reading the weights (roofline ridge)."""
        ...

    @property
    def graph_capturer(self) -> GraphCapturer | None:
        """Graph capturer, or None if the device's launch cost does not require graphs."""
        ...

    @property
    def warmup_sizes(self) -> tuple[int, ...]:
        """Step sizes in tokens with separate code paths, each of which runs once before serving."""
        ...

    @property
    def mask_threads(self) -> int:
        """Host threads that compute the masks of constrained rows while the device computes."""
        ...

    @property
    def kv_memory_fraction(self) -> float:
        """Default fraction of the free memory for the KV cache."""
        ...

    def free_bytes(self) -> int:
        """Return the bytes that may still be allocated on this device."""
        ...

    def weight_layout_id(self, dtype: torch.dtype) -> str:
        """Return an id of the packed layout that `create_linear` makes, or "" if packed weights are not cached.

        The packed bytes depend only on this id and the weight.
        """
        ...

    @property
    def kernel_compiler(self) -> str:
        """Name and version of the compiler of the engine's own kernels, or "" if none are in use."""
        ...

    def instruction_set(self, dtype: torch.dtype, weight_format: WeightFormat | None) -> str:
        """Return the instruction sets that operations in this dtype and weight format use.

        Devices with equal instruction sets compute the same bytes with the same kernels.
        """
        ...

    def working_bytes(self, key: str, run_largest_step: Callable[[], object]) -> int:
        """Return the bytes to keep free for activations. May call `run_largest_step` to measure them.

        `key` names model, format and limits, on which the result depends besides the device.
        """
        ...

    def create_linear(
        self,
        weight: Tensor,
        bias: Tensor | None,
        weight_format: WeightFormat | None = None,
        get_packed: PackedWeightProvider = pack_in_memory,
    ) -> Callable[[Tensor], Tensor]:
        """Pack weight [N, K] and bias [N] once, and return a function that maps [T, K] to [T, N] in their dtype.

        The weight is rounded to `weight_format` first. A weight on `meta` has only shape and dtype, and requires that
        `get_packed` has its packed form already.

        Raises:
            ValueError: The device does not support `weight_format`.
        """
        ...

    @property
    def has_group_linear(self) -> bool:
        """Whether the device computes with grouped weights."""
        ...

    def create_group_linear(
        self, source: GroupedSource, bias: Tensor | None, get_packed: PackedWeightProvider
    ) -> Callable[[Tensor], Tensor]:
        """Pack a grouped weight [N, K] with a bias [N], and return a function that maps [T, K] to [T, N].

        Raises:
            ValueError: The device does not compute with grouped weights.
        """
        ...

    @property
    def elementwise_ops(self) -> ElementwiseOps:
        """Norms and gated activations."""
        ...

    def create_attention(self, shape: KvCacheShape) -> Attention:
        """Allocate a paged KV cache and create the attention over it.

        Raises:
            ValueError: The device does not support `shape`.
        """
        ...

    def create_delta_rule(
        self, architecture: DeltaNetArchitecture, weights: DeltaRuleWeights
    ) -> DeltaRule:
        """Create the gated delta rule of a layer.

        Raises:
            ValueError: The device has no kernel for it.
        """
        ...

    def to_device(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """Launch a copy of a host tensor to the device, into `out` if given. May return the tensor itself."""
        ...

    def to_host(self, tensor: Tensor) -> Tensor:
        """Launch a copy to the host. The copy is complete when an event recorded after it is done."""
        ...

    def record_event(self) -> DeviceEvent:
        """Record an event after the work launched so far, which is already done on a CPU."""
        ...


class HostEvent:
    """Event of a device whose launches return only when their work is done."""

    def __init__(self) -> None:
        self._time_s = time.perf_counter()

    def synchronize(self) -> None:
        """Return at once."""

    def seconds_since(self, earlier: Self) -> float:
        return self._time_s - earlier._time_s


@dataclass(frozen=True, slots=True)
class _CpuDevice:
    """CPU of this machine."""

    compute_threads: ComputeThreads
    default_dtype: torch.dtype
    elementwise_ops: ElementwiseOps

    @property
    def name(self) -> str:
        return f"cpu ({active_kernels_name()}, {self._max_threads} threads)"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def max_steps_in_flight(self) -> int:
        return 0

    @property
    def ridge_tokens(self) -> int:
        return RIDGE_TOKENS

    @property
    def graph_capturer(self) -> GraphCapturer | None:
        return None

    @property
    def warmup_sizes(self) -> tuple[int, ...]:
        return WARMUP_SIZES

    @property
    def mask_threads(self) -> int:
        return 1  # the other CPUs run the model

    @property
    def kv_memory_fraction(self) -> float:
        return DEFAULT_KV_MEMORY_FRACTION

    @property
    def kernel_compiler(self) -> str:
        try:
            return compiler_version(load_kernels().path)
        except NativeUnavailableError:
            return ""

    def instruction_set(self, dtype: torch.dtype, weight_format: WeightFormat | None) -> str:
        kernels = active_kernels_name()
        names = [kernels, f"torch {torch.backends.cpu.get_cpu_capability()}"]
        has_native_linears = dtype == torch.bfloat16 or weight_format is not None
        if kernels == TORCH_ISA_NAME or not has_native_linears:
            names.append(
                f"oneDNN {os.environ.get(ONEDNN_ISA_VARIABLE) or available_isas()[0].name}"
            )
        return ", ".join(names)

    def working_bytes(self, key: str, run_largest_step: Callable[[], object]) -> int:
        del key, run_largest_step
        return 0  # `kv_memory_fraction` leaves enough

    def free_bytes(self) -> int:
        return cgroup.free_bytes()

    def weight_layout_id(self, dtype: torch.dtype) -> str:
        try:
            return load_kernels().path.parent.name if dtype == torch.bfloat16 else ""
        except NativeUnavailableError:
            return ""

    def create_linear(
        self,
        weight: Tensor,
        bias: Tensor | None,
        weight_format: WeightFormat | None = None,
        get_packed: PackedWeightProvider = pack_in_memory,
    ) -> Callable[[Tensor], Tensor]:
        if weight_format is None:
            return create_cpu_linear(weight, bias, self._max_threads, get_packed)
        if weight_format == "fp8":
            raise ValueError(
                "the CPU has no fp8 weights; set quantize to int8 or int4, or use a CUDA device"
            )
        return create_int_linear(weight, bias, weight_format, self._max_threads, get_packed)

    @property
    def has_group_linear(self) -> bool:
        return True

    def create_group_linear(
        self, source: GroupedSource, bias: Tensor | None, get_packed: PackedWeightProvider
    ) -> Callable[[Tensor], Tensor]:
        return create_group_linear(source, bias, self._max_threads, get_packed)

    def create_attention(self, shape: KvCacheShape) -> Attention:
        if shape.dtype.itemsize == 1:
            raise ValueError(
                "the CPU has no fp8 KV cache; leave kv_dtype at auto, or use a CUDA device"
            )
        return create_cpu_attention(shape, threads=self._max_threads)

    def create_delta_rule(
        self, architecture: DeltaNetArchitecture, weights: DeltaRuleWeights
    ) -> DeltaRule:
        return create_cpu_delta_rule(architecture, weights, self._max_threads)

    @property
    def _max_threads(self) -> int:
        return self.compute_threads.max_threads

    def to_device(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        return tensor if out is None else out.copy_(tensor)

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor

    def record_event(self) -> DeviceEvent:
        return HostEvent()


def create_cpu_device(threads: int | None, colocated_replicas: int = 0) -> Device:
    """Create the CPU device, and set torch's intra-op threads for the calling thread.

    Call it from the thread that computes. If `threads` is None, OMP_NUM_THREADS or the free CPUs determine the number.

    Raises:
        ValueError: The number of threads is less than 1.
    """
    compute_threads = create_compute_threads(threads, colocated_replicas)
    torch.set_num_threads(compute_threads.count)
    return _CpuDevice(
        compute_threads=compute_threads,
        default_dtype=_native_dtype(),
        elementwise_ops=create_cpu_elementwise_ops(compute_threads.max_threads),
    )


def _native_dtype() -> torch.dtype:
    """Return bfloat16 if the CPU multiplies it natively, else float32, which is faster than emulated bfloat16."""
    native = cpu_features() & {"avx512_bf16", "amx_bf16", "bf16"}
    return torch.bfloat16 if native else torch.float32
