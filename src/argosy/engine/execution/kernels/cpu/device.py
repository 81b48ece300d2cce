"""Device of the CPU of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from argosy import machine_resources as resources
from argosy.engine.engine_config import DEFAULT_KV_MEMORY_FRACTION, WeightFormat
from argosy.engine.execution.architectures.decoder import DeltaNetArchitecture
from argosy.engine.execution.checkpoint_formats.grouped_weight import GroupedSource
from argosy.engine.execution.kernels.attention import Attention
from argosy.engine.execution.kernels.batch import KvCacheShape, RowAdapters
from argosy.engine.execution.kernels.cpu.attention import create_cpu_attention
from argosy.engine.execution.kernels.cpu.compute_threads import (
    ComputeThreads,
    create_compute_threads,
)
from argosy.engine.execution.kernels.cpu.isa import TORCH_ISA_NAME, available_isas, cpu_features
from argosy.engine.execution.kernels.cpu.linear import (
    create_cpu_linear,
    create_group_linear,
    create_int_linear,
)
from argosy.engine.execution.kernels.cpu.lora import (
    CpuAdapter,
    create_cpu_adapter,
    create_cpu_row_adapters,
)
from argosy.engine.execution.kernels.cpu.native_kernels import active_kernels_name, load_kernels
from argosy.engine.execution.kernels.cpu.operations import (
    create_cpu_delta_rule,
    create_cpu_elementwise_ops,
)
from argosy.engine.execution.kernels.cpu.sampling_ops import create_cpu_sampling_ops
from argosy.engine.execution.kernels.device import Device, DeviceAdapter
from argosy.engine.execution.kernels.operations import DeltaRule, DeltaRuleWeights
from argosy.engine.execution.kernels.pack_cache import PackedWeightProvider, pack_in_memory
from argosy.engine.execution.kernels.torch.logit_edits import LogitSampler, TorchLogitSampler
from argosy.engine.execution.kernels.torch.lora import AdapterWeights
from argosy.native import NativeUnavailableError, compiler_version

ONEDNN_ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
"""Environment variable that limits the instruction set of oneDNN, which torch uses for float32 linears."""


class CpuDevice(Device):
    """CPU of this machine."""

    torch_device = torch.device("cpu")
    max_steps_in_flight = 0
    ridge_tokens = 24
    """A step of the bundled model on one core (AMX) takes 1.35 ms plus 0.053 ms per prompt token."""
    warmup_sizes = (1, 16)
    """Sizes of one row and of several, which take different code paths."""
    mask_threads = 1  # the other CPUs run the model
    kv_memory_fraction = DEFAULT_KV_MEMORY_FRACTION

    def __init__(self, threads: ComputeThreads) -> None:
        self._threads = threads
        self._max_threads = threads.max_threads
        # bfloat16 if the CPU multiplies it natively, else float32, which is faster than emulated bfloat16.
        has_bfloat16 = cpu_features() & {"avx512_bf16", "amx_bf16", "bf16"}
        self.default_dtype = torch.bfloat16 if has_bfloat16 else torch.float32
        self.elementwise_ops = create_cpu_elementwise_ops(self._max_threads)
        self.name = f"cpu ({active_kernels_name()}, {self._max_threads} threads)"

    @property
    def kernel_compiler(self) -> str:
        try:
            return compiler_version(load_kernels().path)
        except NativeUnavailableError:
            return ""

    @property
    def num_compute_threads(self) -> int:
        return self._threads.count

    def begin_step(self, now: float) -> None:
        self._threads.begin_step(now)

    def instruction_set(self, dtype: torch.dtype, weight_format: WeightFormat | None) -> str:
        kernels = active_kernels_name()
        names = [kernels, f"torch {torch.backends.cpu.get_cpu_capability()}"]
        has_native_linears = dtype == torch.bfloat16 or weight_format is not None
        if kernels == TORCH_ISA_NAME or not has_native_linears:
            names.append(
                f"oneDNN {os.environ.get(ONEDNN_ISA_VARIABLE) or available_isas()[0].name}"
            )
        return ", ".join(names)

    def free_bytes(self) -> int:
        return resources.free_bytes()

    def working_bytes(self, key: str, run_largest_step: Callable[[], object]) -> int:
        del key, run_largest_step
        return 0  # `kv_memory_fraction` leaves enough

    def weight_layout_id(self, dtype: torch.dtype) -> str:
        try:
            return load_kernels().path.parent.name if dtype == torch.bfloat16 else ""
        except NativeUnavailableError:
            return ""

    def create_adapter(
        self, weights: AdapterWeights, num_linears: int, dtype: torch.dtype
    ) -> DeviceAdapter:
        return create_cpu_adapter(weights, num_linears, dtype)

    def create_row_adapters(
        self, adapters: Sequence[DeviceAdapter], rows: Tensor, starts: Tensor, dtype: torch.dtype
    ) -> RowAdapters:
        packed = cast("Sequence[CpuAdapter]", adapters)
        return create_cpu_row_adapters(packed, rows, starts, dtype, self._max_threads)

    def create_logit_sampler(self, rows: int, vocab_size: int) -> LogitSampler:
        """Create a sampler that uses the calling thread's torch thread count."""
        ops = create_cpu_sampling_ops(torch.get_num_threads())
        return TorchLogitSampler(ops, rows, vocab_size)

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

    def create_group_linear(
        self, source: GroupedSource, bias: Tensor | None, get_packed: PackedWeightProvider
    ) -> Callable[[Tensor], Tensor]:
        return create_group_linear(source, bias, self._max_threads, get_packed)

    def create_attention(self, shape: KvCacheShape) -> Attention:
        if shape.dtype == torch.float8_e4m3fn:
            raise ValueError(
                "the CPU has no fp8 KV cache; set kv_dtype to auto or int8, or use a CUDA device"
            )
        return create_cpu_attention(shape, threads=self._max_threads)

    def create_delta_rule(
        self, architecture: DeltaNetArchitecture, weights: DeltaRuleWeights
    ) -> DeltaRule:
        return create_cpu_delta_rule(architecture, weights, self._max_threads)


def create_cpu_device(threads: int | None, colocated_replicas: int = 0) -> Device:
    """Create the CPU device, and set torch's intra-op threads for the calling thread.

    Call it from the thread that computes. If `threads` is None, OMP_NUM_THREADS or the free CPUs determine the number.

    Raises:
        ValueError: The number of threads is less than 1.
    """
    compute_threads = create_compute_threads(threads, colocated_replicas)
    torch.set_num_threads(compute_threads.count)
    return CpuDevice(compute_threads)
