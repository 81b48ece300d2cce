"""Mixture of experts on the GPU: no wait for the device, and grids that depend only on the number of rows.

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

from argosy.engine.execution.kernels.gpu.linear import ExpertPairs, GpuLinear, stack_linears

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
            _add_choices[(rows, triton.cdiv(size, SUM_TILE))](
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


def select_largest(scores: Tensor, count: int) -> Tensor:
    """Return the indices of each row's `count` largest scores [T, N], largest first, and of equal ones the first."""
    rows, size = scores.shape
    indices = torch.empty(rows, count, dtype=torch.int64, device=scores.device)
    if rows:
        _select_largest[(rows,)](
            scores.contiguous(),
            indices,
            SIZE=size,
            COUNT=count,
            WIDTH=triton.next_power_of_2(size),
            num_warps=1,
        )
    return indices


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
def _select_largest(scores, indices, SIZE: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Select the largest scores of a row one after the other."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, WIDTH)
    values = tl.load(scores + row * SIZE + col, mask=col < SIZE, other=float("-inf"))
    is_number = values >= float("-inf")  # NaN makes the row invalid anyway
    values = tl.where(is_number, values, float("-inf"))
    for position in range(COUNT):
        index = tl.argmax(values, 0, tie_break_left=True)
        tl.store(indices + row * COUNT + position, index.to(tl.int64))
        values = tl.where(col == index, float("-inf"), values)
