"""Norms, gated activations and the gated delta rule on the CPU, by native kernels if they build.

Every result depends only on its own token's row, or in the delta rule on the tokens of its own sequence, bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from argosy.engine.execution.architectures.decoder import Activation, DeltaNetArchitecture, NormKind
from argosy.engine.execution.kernels.batch import Batch, BatchStates
from argosy.engine.execution.kernels.cpu.native_kernels import (
    DeltaRuleCall,
    GatedActivationCall,
    Kernels,
    NormCall,
    load_kernels,
)
from argosy.engine.execution.kernels.operations import (
    DeltaRule,
    DeltaRuleWeights,
    ElementwiseOps,
    Norm,
    norm_scale,
)
from argosy.engine.execution.kernels.torch.operations import (
    TorchDeltaRule,
    TorchElementwiseOps,
    TorchNorm,
)
from argosy.native import NativeUnavailableError


def create_cpu_elementwise_ops(threads: int) -> ElementwiseOps:
    """Create the native operations if the kernels are available, else torch's."""
    try:
        return NativeElementwiseOps(load_kernels(), threads)
    except NativeUnavailableError:
        return TorchElementwiseOps()  # `create_cpu_attention` logs the reason


@dataclass(frozen=True, slots=True)
class NativeElementwiseOps:
    """Row operations by csrc/elementwise.cpp for bfloat16 and float32, else by torch. Not thread-safe."""

    kernels: Kernels
    threads: int

    def create_norm(self, kind: NormKind, weight: Tensor, eps: float) -> Norm:
        if weight.dtype not in self.kernels.norm:
            return TorchNorm(kind, weight, eps)
        return _NativeNorm(self, kind, weight, eps)

    def create_gated_activation(self, activation: Activation) -> Callable[[Tensor], Tensor]:
        functions = self.kernels.gated_activation[activation]
        call = GatedActivationCall(threads=self.threads)

        def compute(x: Tensor) -> Tensor:
            if x.dtype not in functions:
                return TorchElementwiseOps().create_gated_activation(activation)(x)
            x = x.contiguous()
            rows, size = len(x), x.shape[1] // 2
            out = torch.empty((rows, size), dtype=x.dtype)
            call.x, call.out, call.rows, call.size = x.data_ptr(), out.data_ptr(), rows, size
            functions[x.dtype](ctypes.addressof(call))
            return out

        return compute


class _NativeNorm:
    """Norm by csrc/elementwise.cpp. Not thread-safe, because all calls share one argument structure."""

    def __init__(
        self, ops: NativeElementwiseOps, kind: NormKind, weight: Tensor, eps: float
    ) -> None:
        self._run = ops.kernels.norm[weight.dtype]
        self.scale = norm_scale(kind, weight)
        self._call = NormCall(
            weight=self.scale.data_ptr(),
            size=len(weight),
            round_before_weight=kind == "narrow",
            threads=ops.threads,
            eps=eps,
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self._compute(x, None)

    def add_and_norm(self, x: Tensor, delta: Tensor) -> Tensor:
        return self._compute(x, delta.contiguous().data_ptr())

    def _compute(self, x: Tensor, delta_pointer: int | None) -> Tensor:
        call = self._call
        *outer_strides, row_stride, element_stride = x.stride()
        if element_stride != 1 or (outer_strides and row_stride != call.size):
            x = x.contiguous()
            *outer_strides, row_stride, _ = x.stride()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        call.x, call.delta, call.out = x.data_ptr(), delta_pointer, out.data_ptr()
        call.outer_size, call.x_stride = len(x), outer_strides[0] if outer_strides else row_stride
        call.inner_size = x.shape[1] if outer_strides else 1
        self._run(ctypes.addressof(call))
        return out


def create_cpu_delta_rule(
    architecture: DeltaNetArchitecture, weights: DeltaRuleWeights, threads: int
) -> DeltaRule:
    """Create the native rule if the kernels are available, else torch's."""
    try:
        return NativeDeltaRule(architecture, weights, threads, load_kernels())
    except NativeUnavailableError:
        return TorchDeltaRule(architecture, weights)  # `create_cpu_attention` logs the reason


class NativeDeltaRule:
    """Gated delta rule by csrc/delta_rule.cpp. Not thread-safe, because all calls share one argument structure."""

    def __init__(
        self,
        architecture: DeltaNetArchitecture,
        weights: DeltaRuleWeights,
        threads: int,
        kernels: Kernels,
    ) -> None:
        self._functions = kernels.delta_rule
        self._architecture = architecture
        self._weights = weights  # keeps the memory that the call points to
        self._call = DeltaRuleCall(
            conv=weights.conv.data_ptr(),
            decay_rate=weights.decay_rate.data_ptr(),
            decay_bias=weights.decay_bias.data_ptr(),
            key_heads=architecture.key_heads,
            value_heads=architecture.value_heads,
            key_dim=architecture.key_dim,
            value_dim=architecture.value_dim,
            width=architecture.conv_width,
            threads=threads,
        )

    def __call__(
        self, qkv: Tensor, factors: Tensor, states: BatchStates, layer: int, batch: Batch
    ) -> Tensor:
        if qkv.dtype not in self._functions:
            return self(qkv.float(), factors, states, layer, batch).to(qkv.dtype)
        call, net = self._call, self._architecture
        if qkv.stride(1) != 1:
            qkv = qkv.contiguous()
        logits = factors.float().contiguous()
        mixed = torch.empty(len(qkv), net.channels)
        scratch = torch.empty_like(logits)
        out = torch.empty(len(qkv), net.value_heads, net.value_dim, dtype=qkv.dtype)
        call.qkv, call.qkv_stride = qkv.data_ptr(), qkv.stride(0)
        call.factors, call.out = logits.data_ptr(), out.data_ptr()
        call.mixed, call.scratch = mixed.data_ptr(), scratch.data_ptr()
        call.states, call.state_stride = states.layer_pointer(layer), states.table.stride(0)
        call.rows, call.positions = batch.rows.data_ptr(), batch.positions.data_ptr()
        call.query_start_loc = batch.query_start_loc.data_ptr()
        saved = states.save_slots
        call.save_slots = None if saved is None else saved.data_ptr()
        call.tokens, call.sequences = len(qkv), len(batch.rows)
        self._functions[qkv.dtype](ctypes.addressof(call))
        return out
