"""Gated delta rule (Yang et al. 2024) on the CPU, by the native kernel if it builds.

The recurrence runs token by token in float32, so that a result depends only on the tokens of its own sequence, bit for
bit, however they are divided into chunks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from argosy.engine.execution.architectures.decoder import DeltaNetArchitecture
from argosy.engine.execution.kernels.batch import Batch, BatchStates
from argosy.engine.execution.kernels.cpu.native_calls import DeltaRuleCall
from argosy.engine.execution.kernels.cpu.native_kernels import Kernels, load_kernels
from argosy.engine.execution.kernels.operations import DeltaRule, DeltaRuleWeights
from argosy.engine.execution.kernels.torch.delta_rule import TorchDeltaRule
from argosy.native import NativeUnavailableError


def create_cpu_delta_rule(
    architecture: DeltaNetArchitecture,
    weights: DeltaRuleWeights,
    threads: int,
    kernels: Callable[[], Kernels] = load_kernels,
) -> DeltaRule:
    """Create the native rule if the kernels are available, else torch's."""
    try:
        return NativeDeltaRule(architecture, weights, threads, kernels())
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
