"""The device as a value: where tensors live, how linears are packed, which attention runs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import torch

from argosy.engine.engine_config import DEFAULT_KV_MEMORY_FRACTION
from argosy.engine.execution import cgroup
from argosy.engine.execution.attention_cpu import create_cpu_attention
from argosy.engine.execution.elementwise_cpu import ElementwiseOps, create_cpu_elementwise_ops
from argosy.engine.execution.isa import cpu_features
from argosy.engine.execution.linear_cpu import create_cpu_linear
from argosy.engine.execution.linear_int_cpu import create_int_linear
from argosy.engine.execution.native_kernels import active_kernels_name, load_kernels
from argosy.engine.execution.pack_cache import pack_in_memory
from argosy.native import NativeUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from argosy.engine.engine_config import WeightFormat
    from argosy.engine.execution.batch import Attention, KvCacheShape
    from argosy.engine.execution.pack_cache import PackedWeightProvider

WARMUP_SIZES = (1, 16)
"""Prefills at start: a step of one row and one of several go through all code that has a first time."""
RIDGE_TOKENS = 24
"""A step on one core takes 1.35 ms and 0.053 ms for each prompt token (the bundled model, AMX)."""


class DeviceEvent(Protocol):
    """A point in the device's stream of work."""

    def synchronize(self) -> None:
        """Return once all work launched before the event is done."""
        ...

    def seconds_since(self, earlier: Self) -> float:
        """Seconds of the device's time between two events that are done."""
        ...


class CapturedGraph(Protocol):
    """Work of the device, recorded once: launched again, it computes from what its inputs hold then."""

    def replay(self) -> None:
        """Launch it."""
        ...


class GraphCapturer(Protocol):
    """Makes graphs. All graphs of a recorder share one pool of memory: the largest comes first."""

    def capture(self, work: Callable[[], object]) -> CapturedGraph:
        """Record what `work` launches, which was done before; what it reads and writes must stay in place."""
        ...


class Device(Protocol):
    """What the engine needs of the hardware. Immutable; its methods have no hidden state."""

    @property
    def name(self) -> str:
        """What is in use, for the log and for `Ready`."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where model tensors live."""
        ...

    @property
    def default_dtype(self) -> torch.dtype:
        """The dtype to compute in when the settings say "auto"."""
        ...

    @property
    def max_steps_in_flight(self) -> int:
        """How many steps are best under way while the next one is planned."""
        ...

    @property
    def ridge_tokens(self) -> int:
        """In a step of more tokens, computing takes longer than reading the weights (the roofline's ridge)."""
        ...

    @property
    def graph_capturer(self) -> GraphCapturer | None:
        """Makes graphs, where launching costs enough to need them."""
        ...

    @property
    def warmup_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens whose steps take code paths of their own: run once before serving."""
        ...

    @property
    def kv_share(self) -> float:
        """Part of the free memory that the KV cache takes unless told otherwise."""
        ...

    def free_bytes(self) -> int:
        """Bytes that may still be allocated here, now."""
        ...

    def weight_layout_id(self, dtype: torch.dtype) -> str:
        """What `linear` packs a weight to depends on this and the weight alone; "" where it keeps nothing."""
        ...

    def working_bytes(self, key: str, run_largest_step: Callable[[], object]) -> int:
        """Bytes to keep free for computing. `largest_step` may be run to find out.

        key: what the answer depends on besides the device: model, format and limits.
        """
        ...

    def create_linear(
        self,
        weight: Tensor,
        bias: Tensor | None,
        weight_format: WeightFormat | None = None,
        get_packed: PackedWeightProvider = pack_in_memory,
    ) -> Callable[[Tensor], Tensor]:
        """Pack weight [N, K] and bias [N] once; the result maps [T, K] to [T, N] in their dtype.

        form: what to round the weight to. ValueError: this device cannot compute with it.
        Weights that `keep` has already are on meta: only their shape and dtype count.
        """
        ...

    @property
    def elementwise_ops(self) -> ElementwiseOps:
        """Norms and gates."""
        ...

    def create_attention(self, shape: KvCacheShape) -> Attention:
        """Allocate a paged KV cache and the attention over it. ValueError: what it cannot do."""
        ...

    def to_device(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """Launch a copy of a host tensor, over `into` if given; the tensor itself where that will do."""
        ...

    def to_host(self, tensor: Tensor) -> Tensor:
        """Launch a copy to the host, there once an event marked after it is done."""
        ...

    def record_event(self) -> DeviceEvent:
        """Mark the work launched so far; on CPU it is already done."""
        ...


class HostEvent:
    """The event of a device that finishes work before it returns."""

    def __init__(self) -> None:
        self._time_s = time.perf_counter()

    def synchronize(self) -> None:
        """See `Event`."""

    def seconds_since(self, earlier: Self) -> float:
        """See `Event`."""
        return self._time_s - earlier._time_s


@dataclass(frozen=True, slots=True)
class _CpuDevice:
    """The processor that this process runs on."""

    threads: int
    default_dtype: torch.dtype
    elementwise_ops: ElementwiseOps

    @property
    def name(self) -> str:
        return f"cpu ({active_kernels_name()}, {self.threads} threads)"

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
    def kv_share(self) -> float:
        return DEFAULT_KV_MEMORY_FRACTION

    def working_bytes(self, key: str, run_largest_step: Callable[[], object]) -> int:
        del key, run_largest_step
        return 0  # the share leaves enough

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
            return create_cpu_linear(weight, bias, self.threads, get_packed)
        if weight_format == "fp8":
            raise ValueError(
                "the CPU has no fp8 weights; set quantize to int8 or int4, or take a CUDA device"
            )
        return create_int_linear(weight, bias, weight_format, self.threads, get_packed)

    def create_attention(self, shape: KvCacheShape) -> Attention:
        if shape.dtype.itemsize == 1:
            raise ValueError(
                "the CPU has no fp8 KV cache; leave kv_dtype at auto, or take a CUDA device"
            )
        return create_cpu_attention(shape, threads=self.threads)

    def to_device(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        return tensor if out is None else out.copy_(tensor)

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor

    def record_event(self) -> DeviceEvent:
        return HostEvent()


def create_cpu_device(threads: int | None, colocated_replicas: int = 0) -> Device:
    """Build the CPU device; None takes every CPU that this process may use, or its part beside neighbours.

    Sets torch's intra-op threads for the calling thread, so call it from the thread that computes.
    Raises ValueError for fewer than one thread.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"threads is {threads}; set it to 1 or more, or leave it out")
    count = threads or max(1, cgroup.usable_cpus() // (1 + colocated_replicas))
    torch.set_num_threads(count)
    return _CpuDevice(
        threads=count,
        default_dtype=_native_dtype(),
        elementwise_ops=create_cpu_elementwise_ops(count),
    )


def _native_dtype() -> torch.dtype:
    """bfloat16 where the CPU multiplies it natively; emulated it is slower than float32."""
    native = cpu_features() & {"avx512_bf16", "amx_bf16", "bf16"}
    return torch.bfloat16 if native else torch.float32
