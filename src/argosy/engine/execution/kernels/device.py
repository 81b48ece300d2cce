"""Interface of the engine to its hardware."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, Self

import torch
from torch import Tensor

from argosy.engine.engine_config import WeightFormat
from argosy.engine.execution.architectures.decoder import DeltaNetArchitecture, MoeArchitecture
from argosy.engine.execution.checkpoint_formats.grouped_weight import GroupedSource
from argosy.engine.execution.kernels.attention import Attention
from argosy.engine.execution.kernels.batch import KvCacheShape, RowAdapters
from argosy.engine.execution.kernels.operations import (
    DeltaRule,
    DeltaRuleWeights,
    ElementwiseOps,
    Experts,
)
from argosy.engine.execution.kernels.pack_cache import PackedWeightProvider, pack_in_memory
from argosy.engine.execution.kernels.torch.logit_edits import LogitSampler
from argosy.engine.execution.kernels.torch.lora import AdapterWeights
from argosy.engine.execution.kernels.torch.operations import select_experts

GraphCapture = Callable[[Callable[[], object]], Callable[[], object]]


class DeviceEvent(Protocol):
    """Event in the device's stream of work."""

    def synchronize(self) -> None:
        """Wait until all work launched before the event is done."""
        ...

    def wait(self) -> None:
        """Let work launched later in the current stream wait for the event. The host does not wait."""
        ...

    def seconds_since(self, earlier: Self) -> float:
        """Return the seconds of device time between two completed events."""
        ...


class DeviceAdapter(Protocol):
    """Adapter in the form of a device."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its memory."""
        ...


class HostEvent:
    """Event of a device whose launches return only when their work is done."""

    def __init__(self) -> None:
        self._time_s = time.perf_counter()

    def synchronize(self) -> None:
        """Return at once."""

    def wait(self) -> None:
        """Return at once."""

    def seconds_since(self, earlier: Self) -> float:
        return self._time_s - earlier._time_s


class Device(ABC):
    """Hardware of the engine. Methods have no hidden state, apart from `begin_step`."""

    name: str
    """Description of the hardware in use, for the log and for `CoreReady`."""
    torch_device: torch.device
    """Torch device of the model's tensors."""
    default_dtype: torch.dtype
    """Dtype of weights and activations if the settings say "auto"."""
    elementwise_ops: ElementwiseOps
    """Norms and gated activations."""
    max_steps_in_flight: int
    """Best number of steps in flight while the next one is planned."""
    ridge_tokens: int
    """Number of tokens above which computing a step takes longer than reading the weights (roofline ridge)."""
    warmup_sizes: tuple[int, ...]
    """Step sizes in tokens with separate code paths, each of which runs once before serving."""
    mask_threads: int
    """Host threads that compute the masks of constrained rows while the device computes."""
    kv_memory_fraction: float
    """Default fraction of the free memory for the KV cache."""
    computes_float8: bool = False
    """Whether the device computes with weights in e4m3."""
    normalizes_heads: bool = False
    """Whether attention computes `AttentionParams.head_norm`, so that the norm needs no pass of its own."""
    capture_graph: GraphCapture | None = None
    """Captures what a function launches, and returns a function that launches it again with the current inputs.

    The captured function must have run once before, and its inputs and outputs must stay at their addresses. Graphs
    share one memory pool, so the largest must be captured first. None if the device's launch cost requires no graphs.
    """

    @property
    @abstractmethod
    def kernel_compiler(self) -> str:
        """Name and version of the compiler of the engine's own kernels, or "" if none are in use."""

    @property
    def num_compute_threads(self) -> int:
        """CPU threads that compute, or 0 if the device is not a CPU."""
        return 0

    def begin_step(self, now: float) -> None:
        """Adapt to the load of the machine, before a step that starts at `now`."""
        del now

    @abstractmethod
    def instruction_set(self, dtype: torch.dtype, weight_format: WeightFormat | None) -> str:
        """Return the instruction sets that operations in this dtype and weight format use.

        Devices with equal instruction sets compute the same bytes with the same kernels.
        """

    @abstractmethod
    def free_bytes(self) -> int:
        """Return the bytes that may still be allocated on this device."""

    @abstractmethod
    def working_bytes(self, key: str, run_largest_step: Callable[[], object]) -> int:
        """Return the bytes to keep free for activations and graphs. May call `run_largest_step` to measure them.

        `run_largest_step` returns the owner of the graphs. `key` names model, format and limits, on which the result
        depends besides the device.
        """

    @abstractmethod
    def weight_layout_id(self, dtype: torch.dtype) -> str:
        """Return an id of the packed layout that `create_linear` makes, or "" if packed weights are not cached.

        The packed bytes depend only on this id and the weight.
        """

    @abstractmethod
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

    @abstractmethod
    def create_group_linear(
        self, source: GroupedSource, bias: Tensor | None, get_packed: PackedWeightProvider
    ) -> Callable[[Tensor], Tensor]:
        """Pack a grouped weight [N, K] with a bias [N], and return a function that maps [T, K] to [T, N]."""

    def create_head_linears(self, weights: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
        """Pack a weight [N, K] of each head, and return a function that maps [T, heads, K] to [T, heads, N]."""
        linears = [self.create_linear(weight, None) for weight in weights]

        def compute(x: Tensor) -> Tensor:
            heads = zip(linears, x.unbind(1), strict=True)
            return torch.stack([linear(head) for linear, head in heads], 1)

        return compute

    def create_experts(
        self,
        gate_up: Sequence[Callable[[Tensor], Tensor]],
        down: Sequence[Callable[[Tensor], Tensor]],
        activation: Callable[[Tensor], Tensor],
    ) -> Experts | None:
        """Create the computation of all experts of a layer, of which each has a gated MLP of these linears.

        None if the device computes one expert after the other.

        Raises:
            ValueError: The device does not support the formats of the experts' weights.
        """
        del gate_up, down, activation
        return None

    def select_experts(
        self,
        logits: Tensor,
        correction: Tensor | None,
        architecture: MoeArchitecture,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Select the experts of each token, whose order depends only on the token's row.

        Args:
            logits: Scores of the experts before softmax or sigmoid, [T, experts].
            correction: Float32 [experts], added to the scores that select experts.
            architecture: Architecture of the experts.
            dtype: Dtype of the model, to which weights are rounded if the architecture says so.

        Returns:
            Float32 weights and int64 ids of the experts, [T, experts per token], likeliest first.
        """
        return select_experts(logits, correction, architecture, dtype)

    @abstractmethod
    def create_attention(self, shape: KvCacheShape) -> Attention:
        """Allocate a paged KV cache and create the attention over it.

        Raises:
            ValueError: The device does not support `shape`.
        """

    @abstractmethod
    def create_delta_rule(
        self, architecture: DeltaNetArchitecture, weights: DeltaRuleWeights
    ) -> DeltaRule:
        """Create the gated delta rule of a layer."""

    @abstractmethod
    def create_adapter(
        self, weights: AdapterWeights, num_linears: int, dtype: torch.dtype
    ) -> DeviceAdapter:
        """Pack an adapter of a model in `dtype` with `num_linears` linear layers that adapters can change."""

    @abstractmethod
    def create_row_adapters(
        self, adapters: Sequence[DeviceAdapter], rows: Tensor, starts: Tensor, dtype: torch.dtype
    ) -> RowAdapters:
        """Create the adapters of `rows` [M] int64, of which `starts[i] .. starts[i + 1]` have `adapters[i]`.

        There is at least one row. `starts` [len(adapters) + 1] are int64. Both tensors are in host memory.
        """

    @abstractmethod
    def create_logit_sampler(self, rows: int, vocab_size: int) -> LogitSampler:
        """Create the sampling of R rows, without edits."""

    def to_device(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """Launch a copy of a host tensor to the device, into `out` if given. May return the tensor itself."""
        return tensor if out is None else out.copy_(tensor)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Launch a copy to the host. The copy is complete when an event recorded after it is done."""
        return tensor

    def record_event(self) -> DeviceEvent:
        """Record an event after the work launched so far in the current stream, which is already done on a CPU."""
        return HostEvent()

    def copy_stream(self) -> AbstractContextManager[object]:
        """Return a context that launches copies beside the stream of steps, whose order they follow only by events."""
        return nullcontext()

    def allocate_host_memory(self, shape: tuple[int, ...]) -> Tensor:
        """Return uninitialised uint8 memory of the host, which the device reads and writes itself."""
        return torch.empty(shape, dtype=torch.uint8)
