"""Norms and gates on the GPU: each row is reduced in one order, which its size alone decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from argosy.engine.execution.elementwise_cpu import norm_scale

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from argosy.engine.execution.elementwise_cpu import Norm
    from argosy.engine.execution.model_architecture import Activation, NormKind

NORM_TILE_ELEMENTS = 1024
"""Elements of a norm's program, where rows are short: several heads share one."""
GATE_TILE_OUTPUTS = 1024
"""Outputs of a gate's program: 128 threads of eight, so that loads are 16 bytes."""


@dataclass(frozen=True, slots=True)
class TritonElementwiseOps:
    """The `RowOps` of a GPU."""

    def create_norm(self, kind: NormKind, weight: Tensor, eps: float) -> Norm:
        """See `RowOps`."""
        return _TritonNorm(kind, weight, eps)

    def create_gated_activation(self, activation: Activation) -> Callable[[Tensor], Tensor]:
        """See `RowOps`."""

        def compute(x: Tensor) -> Tensor:
            x = x.contiguous()
            rows, size = x.shape[0], x.shape[1] // 2
            out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
            if rows:
                grid = (rows, triton.cdiv(size, GATE_TILE_OUTPUTS))
                _gated_activation[grid](
                    x, out, size, ACTIVATION=activation, TILE=GATE_TILE_OUTPUTS, num_warps=4
                )
            return out

        return compute


class _TritonNorm:
    """An RMS norm of rows of one size."""

    def __init__(self, kind: NormKind, weight: Tensor, eps: float) -> None:
        self._scale = norm_scale(kind, weight)
        self._round_before_weight = kind == "narrow"
        self._eps = eps
        self._width = triton.next_power_of_2(len(weight))
        self._rows = max(1, NORM_TILE_ELEMENTS // self._width)
        # 8 to 16 elements a thread: a decode step has few rows, so each must be quick.
        self._warps = min(16, max(4, self._width // 512))

    def __call__(self, x: Tensor) -> Tensor:
        """See `Norm`."""
        if x.stride(-1) != 1 or (x.dim() == 3 and x.stride(1) != x.shape[2]):
            x = x.contiguous()
        return self._compute(x, x)

    def add_and_norm(self, x: Tensor, delta: Tensor) -> Tensor:
        """See `Norm`."""
        return self._compute(x, delta.contiguous())

    def _compute(self, x: Tensor, mixed: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        inner = x.shape[1] if x.dim() == 3 else 1
        rows = x.shape[0] * inner
        if rows:
            _norm[(triton.cdiv(rows, self._rows),)](
                x,
                mixed,
                self._scale,
                out,
                rows,
                inner,
                x.stride(0),
                self._eps,
                SIZE=x.shape[-1],
                WIDTH=self._width,
                ROWS=self._rows,
                NARROW=self._round_before_weight,
                ADD=mixed is not x,
                num_warps=self._warps,
            )
        return out


@triton.jit(do_not_specialize=["rows"])  # or each kind of batch would make a new kernel
def _norm(
    x,
    mixed,
    scale,
    out,
    rows,
    inner,
    stride,
    eps,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    NARROW: tl.constexpr,
    ADD: tl.constexpr,
):
    """RMS norm of ROWS rows of x, `inner` to each `stride`; with ADD, of x + mixed, put back into x."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH)
    held = (row < rows)[:, None] & (col < SIZE)[None, :]
    start = (row // inner).to(tl.int64) * stride + row % inner * SIZE
    place = start[:, None] + col[None, :]
    packed = row.to(tl.int64)[:, None] * SIZE + col[None, :]
    dtype = out.dtype.element_ty
    wide = tl.load(x + place, mask=held, other=0.0).to(tl.float32)
    if ADD:
        wide += tl.load(mixed + packed, mask=held, other=0.0).to(tl.float32)
        rounded = wide.to(dtype)
        tl.store(x + place, rounded, mask=held)
        wide = rounded.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1) / SIZE
    normed = wide * (1.0 / tl.sqrt_rn(mean + eps))[:, None]
    if NARROW:
        normed = normed.to(dtype).to(tl.float32)
    weight = tl.load(scale + col, mask=col < SIZE, other=0.0)
    tl.store(out + packed, (normed * weight[None, :]).to(dtype), mask=held)


@triton.jit
def _gated_activation(x, out, size, ACTIVATION: tl.constexpr, TILE: tl.constexpr):
    """One tile of activation(first half) * second half of a row."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * TILE + tl.arange(0, TILE)
    held = col < size
    first = x + row * 2 * size + col
    gate = tl.load(first, mask=held, other=0.0).to(tl.float32)
    up = tl.load(first + size, mask=held, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        active = gate / (1.0 + tl.exp(-gate))
    else:  # gelu_tanh; tanh(u) is 1 - 2 / (exp(2 u) + 1)
        doubled = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)  # 2 sqrt(2 / pi)
        active = gate * (1.0 - 1.0 / (tl.exp(doubled) + 1.0))
    tl.store(out + row * size + col, (active * up).to(out.dtype.element_ty), mask=held)
