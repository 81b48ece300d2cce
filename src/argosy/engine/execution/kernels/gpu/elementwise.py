"""Norms and gated activations on the GPU. The order of each row's sums depends only on the size of the row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from argosy.engine.execution.architectures.decoder import Activation, NormKind
from argosy.engine.execution.kernels.operations import Norm, norm_scale

NORM_TILE_ELEMENTS = 1024
"""Minimum number of elements of a norm's program. Several short rows share one program."""
GATE_TILE_OUTPUTS = 1024
"""Number of outputs of a gated activation's program. Each of 128 threads has eight, so that loads have 16 bytes."""


@dataclass(frozen=True, slots=True)
class TritonElementwiseOps:
    """Elementwise operations of a GPU."""

    def create_norm(self, kind: NormKind, weight: Tensor, eps: float) -> Norm:
        return _TritonNorm(kind, weight, eps)

    def create_gated_activation(self, activation: Activation) -> Callable[[Tensor], Tensor]:

        def compute(x: Tensor) -> Tensor:
            x = x.contiguous()
            rows, size = x.shape[0], x.shape[1] // 2
            out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
            if rows:
                grid = (rows, -(-size // GATE_TILE_OUTPUTS))
                _gated_activation[grid](
                    x, out, size, ACTIVATION=activation, TILE=GATE_TILE_OUTPUTS, num_warps=4
                )
            return out

        return compute


class _TritonNorm:
    """RMS norm of rows of one size."""

    def __init__(self, kind: NormKind, weight: Tensor, eps: float) -> None:
        self.scale = norm_scale(kind, weight)
        self._round_before_weight = kind == "narrow"
        self._eps = eps
        self._width = triton.next_power_of_2(len(weight))
        self._rows = max(1, NORM_TILE_ELEMENTS // self._width)
        # Each thread has 8 to 16 elements. A decode step has few rows, so each row must be fast.
        self._warps = min(16, max(4, self._width // 512))

    def __call__(self, x: Tensor) -> Tensor:
        if x.stride(-1) != 1 or (x.dim() == 3 and x.stride(1) != x.shape[2]):
            x = x.contiguous()
        return self._compute(x, x)

    def add_and_norm(self, x: Tensor, delta: Tensor) -> Tensor:
        return self._compute(x, delta.contiguous())

    def _compute(self, x: Tensor, delta: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        inner = x.shape[1] if x.dim() == 3 else 1
        rows = x.shape[0] * inner
        if rows:
            _norm[(-(-rows // self._rows),)](
                x,
                delta,
                self.scale,
                out,
                rows,
                inner,
                x.stride(0),
                self._eps,
                SIZE=x.shape[-1],
                WIDTH=self._width,
                ROWS=self._rows,
                ROUND_BEFORE_WEIGHT=self._round_before_weight,
                ADD=delta is not x,
                num_warps=self._warps,
            )
        return out


@triton.jit(do_not_specialize=["rows"])  # each batch size would compile a new kernel
def _norm(
    x,
    delta,
    scale,
    out,
    rows,
    inner,
    stride,
    eps,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ROUND_BEFORE_WEIGHT: tl.constexpr,
    ADD: tl.constexpr,
):
    """Compute the RMS norm of ROWS rows of x, with `inner` rows per `stride`. ADD first adds delta to x in offset."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH)
    mask = (row < rows)[:, None] & (col < SIZE)[None, :]
    start = (row // inner).to(tl.int64) * stride + row % inner * SIZE
    offset = start[:, None] + col[None, :]
    out_offset = row.to(tl.int64)[:, None] * SIZE + col[None, :]
    dtype = out.dtype.element_ty
    values = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(delta + out_offset, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(dtype)
        tl.store(x + offset, rounded, mask=mask)
        values = rounded.to(tl.float32)
    mean = tl.sum(values * values, axis=1) / SIZE
    normed = values * (1.0 / tl.sqrt_rn(mean + eps))[:, None]
    if ROUND_BEFORE_WEIGHT:
        normed = normed.to(dtype).to(tl.float32)
    weight = tl.load(scale + col, mask=col < SIZE, other=0.0)
    tl.store(out + out_offset, (normed * weight[None, :]).to(dtype), mask=mask)


@triton.jit
def _gated_activation(x, out, size, ACTIVATION: tl.constexpr, TILE: tl.constexpr):
    """Compute one tile of activation(first half, second half) of a row."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = col < size
    gate_pointer = x + row * 2 * size + col
    gate = tl.load(gate_pointer, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_pointer + size, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        active = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "clamped_swiglu":
        gate = tl.where(gate > 7.0, 7.0, gate)  # NaN passes through
        active = gate / (1.0 + tl.exp(-1.702 * gate))
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
    elif ACTIVATION == "sigmoid":
        active = 1.0 / (1.0 + tl.exp(-gate))
    else:  # gelu_tanh, where tanh(u) is 1 - 2 / (exp(2 u) + 1)
        doubled = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)  # 2 sqrt(2 / pi)
        active = gate * (1.0 - 1.0 / (tl.exp(doubled) + 1.0))
    tl.store(out + row * size + col, (active * up).to(out.dtype.element_ty), mask=mask)
