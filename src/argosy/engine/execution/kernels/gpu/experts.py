"""Experts and heads on the GPU: no wait for the device, and grids that depend only on the number of rows.

The pairs of a row and one of its experts are sorted by expert on the device. A matrix product computes all pairs, each
tile with the weights of one expert. Every pair has the bits that the expert's own linear layer gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from argosy.engine.execution.architectures.decoder import MoeArchitecture, RoutingGroups
from argosy.engine.execution.kernels.gpu.linear import (
    ExpertPairs,
    GpuLinear,
    create_gpu_linear,
    stack_linears,
)

_TRITON_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}
SORT_TILE = 1024
"""Number of pairs that a program reads at a time."""
SUM_TILE = 1024
"""Number of outputs of a program that adds the choices of a row."""


@dataclass(frozen=True, slots=True, eq=False)
class GpuExperts:
    """Experts of a layer."""

    gate_up: GpuLinear
    down: GpuLinear
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        rows, choices = expert_ids.shape
        pairs = sort_by_expert(expert_ids, len(self.down.weight))
        inner = self.activation(self.gate_up.multiply(x, pairs, choices))
        outputs = self.down.multiply(inner, pairs)
        size = outputs.shape[1]
        total = torch.empty(rows, size, dtype=torch.float32, device=x.device)
        if rows:
            _add_choices[(rows, -(-size // SUM_TILE))](
                outputs,
                weights.contiguous(),
                total,
                size,
                CHOICES=choices,
                TILE=SUM_TILE,
                num_warps=4,
                enable_fp_fusion=False,
            )
        return total


def create_gpu_experts(
    gate_up: Sequence[Callable[[Tensor], Tensor]],
    down: Sequence[Callable[[Tensor], Tensor]],
    activation: Callable[[Tensor], Tensor],
) -> GpuExperts:
    """Stack the linear layers of experts.

    Raises:
        ValueError: The experts differ in their formats, or their matrices have parts in several formats.
    """
    return GpuExperts(_stack(gate_up), _stack(down), activation)


def create_gpu_head_linears(weights: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """Stack the weights [N, K] of heads, which one product computes like experts of which each has all tokens."""
    linear = stack_linears([create_gpu_linear(weight, None) for weight in weights])

    def compute(x: Tensor) -> Tensor:
        tokens, heads, _ = x.shape
        index = torch.arange(tokens * heads, dtype=torch.int32, device=x.device)
        order = index.view(tokens, heads).T.reshape(-1)
        ends = (index[:heads] + 1) * tokens
        outputs = linear.multiply(x.flatten(0, 1), ExpertPairs(order, ends))
        return outputs.view(tokens, heads, linear.shape[0])

    return compute


def _stack(linears: Sequence[Callable[[Tensor], Tensor]]) -> GpuLinear:
    simple = [linear for linear in linears if isinstance(linear, GpuLinear)]
    if len(simple) < len(linears):
        raise ValueError(
            "GPUs do not support experts whose matrices have columns in an order of their own (GPTQ with "
            "desc_act) or parts in several formats; set quantize to none, or device to cpu"
        )
    return stack_linears(simple)


def sort_by_expert(expert_ids: Tensor, num_experts: int) -> ExpertPairs:
    """Sort the pairs of expert ids [T, experts per token]."""
    count = expert_ids.numel()
    order = torch.empty(count, dtype=torch.int32, device=expert_ids.device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=expert_ids.device)
    ids = expert_ids.contiguous()
    _sort_pairs[(num_experts,)](ids, order, ends, count, TILE=SORT_TILE, num_warps=4)
    return ExpertPairs(order, ends)


def select_experts(
    logits: Tensor, correction: Tensor | None, architecture: MoeArchitecture, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Select experts, as `Device.select_experts` does. Of equal scores, the first one counts as the largest."""
    rows, size = logits.shape
    count = architecture.num_experts_per_token
    expert_ids = torch.empty(rows, count, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, count, dtype=torch.float32, device=logits.device)
    groups = architecture.groups or RoutingGroups(1, 1, 1)
    if rows:
        _select_experts[(rows,)](
            logits.contiguous(),
            logits if correction is None else correction,
            weights,
            expert_ids,
            architecture.weight_factor,
            SIZE=size,
            WIDTH=triton.next_power_of_2(size),
            COUNT=count,
            SIGMOID=architecture.scoring == "sigmoid",
            CORRECTED=correction is not None,
            GROUPS=groups.num_groups,
            ACTIVE_GROUPS=groups.num_active_groups,
            SCORED=groups.scored_experts,
            NORMALIZED=architecture.normalize_weights,
            ROUNDED=_TRITON_DTYPES[dtype] if architecture.round_weights else tl.float32,
            num_warps=1,
        )
    return weights, expert_ids


@triton.jit(do_not_specialize=["count"])  # each batch size would compile a new kernel
def _sort_pairs(ids, order, ends, count, TILE: tl.constexpr):
    """Write the indices of the pairs of one expert, in order, after those of the experts before."""
    expert = tl.program_id(0)
    index = tl.arange(0, TILE)
    num_before = tl.zeros((TILE,), tl.int32)
    for first in range(0, count, TILE):
        others = tl.load(ids + first + index, mask=first + index < count, other=expert)
        num_before += (others < expert).to(tl.int32)
    start = tl.sum(num_before, 0)
    for first in range(0, count, TILE):
        is_own = tl.load(ids + first + index, mask=first + index < count, other=-1) == expert
        position = start + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(order + position, first + index, mask=is_own)
        start += tl.sum(is_own.to(tl.int32), 0)
    tl.store(ends + expert, start)


@triton.jit
def _add_choices(outputs, weights, total, size, CHOICES: tl.constexpr, TILE: tl.constexpr):
    """Add the weighted outputs of a row's experts, likeliest first."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = col < size
    acc = tl.zeros((TILE,), tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = row * CHOICES + choice
        output = tl.load(outputs + pair * size + col, mask=mask, other=0.0).to(tl.float32)
        weighted = output * tl.load(weights + pair)
        acc = weighted if choice == 0 else acc + weighted
    tl.store(total + row * size + col, acc, mask=mask)


@triton.jit
def _select_experts(
    logits,
    correction,
    weights,
    expert_ids,
    weight_factor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    GROUPS: tl.constexpr,
    ACTIVE_GROUPS: tl.constexpr,
    SCORED: tl.constexpr,
    NORMALIZED: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """Select the experts of one row one after the other."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, WIDTH)
    is_expert = col < SIZE
    values = tl.load(logits + row * SIZE + col, mask=is_expert, other=0.0).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-values))
    else:
        values = tl.where(is_expert, values, float("-inf"))
        scores = tl.exp(values - tl.max(values, 0))
        scores /= tl.sum(scores, 0)
    keys = scores
    if CORRECTED:
        keys += tl.load(correction + col, mask=is_expert, other=0.0)
    is_valid = is_expert & (keys >= float("-inf"))  # NaN makes all weights of the row NaN
    keys = tl.where(is_valid, keys, float("-inf"))
    if GROUPS > 1:
        group = col // (SIZE // GROUPS)
        totals = tl.full((WIDTH,), float("-inf"), tl.float32)  # score of group i at position i
        for index in range(GROUPS):
            members = tl.where(group == index, keys, float("-inf"))
            total = tl.max(members, 0)
            for _ in tl.static_range(SCORED - 1):
                best = tl.argmax(members, 0, tie_break_left=True)
                members = tl.where(col == best, float("-inf"), members)
                total += tl.max(members, 0)
            totals = tl.where(col == index, total, totals)
        is_active = group < 0
        for _ in range(ACTIVE_GROUPS):
            best = tl.argmax(totals, 0, tie_break_left=True)
            is_active |= group == best
            totals = tl.where(col == best, float("-inf"), totals)
        keys = tl.where(is_active, keys, float("-inf"))
    chosen = tl.zeros((WIDTH,), tl.float32)  # weight of choice i at position i
    total = 0.0
    for choice in range(COUNT):
        expert = tl.argmax(keys, 0, tie_break_left=True)
        tl.store(expert_ids + row * COUNT + choice, expert.to(tl.int64))
        weight = tl.sum(tl.where(col == expert, scores, 0.0), 0)
        chosen = tl.where(col == choice, weight, chosen)
        total += weight
        keys = tl.where(col == expert, float("-inf"), keys)
    if NORMALIZED:
        chosen /= total + 1e-20
    chosen *= weight_factor
    rounded = chosen.to(ROUNDED).to(tl.float32)
    tl.store(weights + row * COUNT + col, rounded, mask=col < COUNT)
