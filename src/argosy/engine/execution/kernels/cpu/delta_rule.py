"""Gated delta rule (Yang et al. 2024) on the CPU, by the native kernel or in torch.

The recurrence runs token by token in float32, so that a result depends only on the tokens of its own sequence, bit for
bit, however they are divided into chunks.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional as F

from argosy.engine.execution.kernels.cpu.native_calls import DeltaRuleCall
from argosy.engine.execution.kernels.cpu.native_kernels import Kernels, load_kernels
from argosy.native import NativeUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from argosy.engine.execution.architectures.model_architecture import DeltaNetArchitecture
    from argosy.engine.execution.kernels.batch import Batch, BatchStates

NORM_EPS = 1e-6
"""Epsilon of the norm of queries and keys."""
MAX_SOFTPLUS_INPUT = 20.0
"""Input above which softplus is the identity."""


@dataclass(frozen=True, slots=True)
class DeltaRuleWeights:
    """Weights of a layer, all float32."""

    conv: Tensor
    """[width, channels]."""
    decay_rate: Tensor
    """[value_heads], negative: logarithm of the decay for each unit of the softplus of its logit."""
    decay_bias: Tensor
    """[value_heads], added to the logit of the decay."""


class DeltaRule(Protocol):
    """Gated delta rule of one layer."""

    def __call__(
        self, qkv: Tensor, factors: Tensor, states: BatchStates, layer: int, batch: Batch
    ) -> Tensor:
        """Update the states of the batch's sequences by all their tokens, and read them after each token.

        Args:
            qkv: Queries, keys and values of all heads [T, channels], before the convolution.
            factors: Logits of the update's factor for each value head, then of the decay, [T, 2 * value_heads].
            states: States of the sequences.
            layer: Index of the layer in the states.
            batch: The batch.

        Returns:
            Tensor [T, value_heads, value_dim] in qkv's dtype.
        """
        ...


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


class TorchDeltaRule:
    """Gated delta rule in plain torch. Every operation has the same shape for each token, and so the same result."""

    def __init__(self, architecture: DeltaNetArchitecture, weights: DeltaRuleWeights) -> None:
        self._architecture = architecture
        self._weights = weights

    def __call__(
        self, qkv: Tensor, factors: Tensor, states: BatchStates, layer: int, batch: Batch
    ) -> Tensor:
        net = self._architecture
        starts = batch.query_start_loc.tolist()
        saved = [-1] * len(qkv) if states.save_slots is None else states.save_slots.tolist()
        out = torch.empty(len(qkv), net.value_heads, net.value_dim, dtype=qkv.dtype)
        for row, start, end in zip(batch.rows.tolist(), starts, starts[1:], strict=False):
            state = states.layer_state(row, layer)
            if int(batch.positions[start]) == 0:
                state.zero_()
            for token in range(start, end):
                out[token] = self._step(state, qkv[token].float(), factors[token].float())
                if saved[token] >= 0:
                    states.layer_state(saved[token], layer).copy_(state)
        return out

    def _step(self, state: Tensor, qkv: Tensor, factors: Tensor) -> Tensor:
        """Update the state in place by one token, and read it."""
        net, weights = self._architecture, self._weights
        flat_matrices, flat_inputs = state.tensor_split((net.matrix_elements,))
        matrices = flat_matrices.view(net.value_heads, net.key_dim, net.value_dim)
        inputs = flat_inputs.view(net.conv_width - 1, net.channels)
        window = torch.cat((inputs, qkv.unsqueeze(0)))
        mixed = (window * weights.conv).sum(0)
        inputs.copy_(window[1:])
        mixed = mixed / mixed.neg().exp_().add_(1.0)
        keys = net.key_heads * net.key_dim
        query, key, value = mixed.split_with_sizes((keys, keys, net.value_size))
        heads_per_key = net.value_heads // net.key_heads
        query, key = (
            _normalize(x.view(net.key_heads, net.key_dim)).repeat_interleave(heads_per_key, 0)
            for x in (query, key)
        )
        update, decay = factors.chunk(2)
        factor = update.neg().exp_().add_(1.0).reciprocal_().unsqueeze(1)
        rate = weights.decay_rate * F.softplus(
            decay + weights.decay_bias, threshold=MAX_SOFTPLUS_INPUT
        )
        matrices.mul_(rate.exp_()[:, None, None])
        known = (matrices * key.unsqueeze(2)).sum(1)
        delta = (value.view(net.value_heads, net.value_dim) - known).mul_(factor)
        matrices.add_(key.unsqueeze(2) * delta.unsqueeze(1))
        return (matrices * query.unsqueeze(2)).sum(1).mul_(net.key_dim**-0.5)


def _normalize(x: Tensor) -> Tensor:
    """Normalize the rows of x to length 1."""
    return x * (x * x).sum(-1, keepdim=True).add_(NORM_EPS).rsqrt_()
