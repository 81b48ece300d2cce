"""Adapters of linear layers (LoRA) on the GPU: one kernel for A and one for B, over all rows that have adapters.

Ranks are padded with zeros to 16, not to the largest rank. Each sum has one order, whatever else is in the batch. Rows
without an adapter are neither read nor written. Embeddings and heads of adapters are those of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from argosy.engine.execution.kernels.gpu.linear import STAGE_BYTES, multiply_floats
from argosy.engine.execution.kernels.torch.lora import (
    AdapterWeights,
    LinearUpdate,
    TokenRows,
    TorchRowAdapters,
)

if TYPE_CHECKING:
    from argosy.engine.execution.kernels.device import Device

RANKS_TILE = 16
OUTS_TILE = 64
TOKEN_TILES = (16, 64)
"""Rows of a tile: the first for decode, the second as soon as an adapter has more rows."""
RECORD = 7
"""Fields of a packed update: addresses of A, of the table of tiles and of B, of gain and offset (0 is none), then the
number of ranks and of tiles."""


@dataclass(frozen=True, slots=True)
class GpuAdapter:
    """Adapter in the form of the GPU."""

    weights: AdapterWeights
    """Weights that torch computes with."""
    records: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    """[linear layers, RECORD]. Zeros for layers that are not changed."""
    num_bytes: int
    packed: tuple[Tensor, ...]
    """Owners of the memory behind the addresses."""


def create_gpu_adapter(
    weights: AdapterWeights, num_linears: int, device: torch.device
) -> GpuAdapter:
    """Pack the updates of linear layers, and move all tensors to the GPU."""
    records = np.zeros((num_linears, RECORD), np.int64)
    owners: list[Tensor] = []
    for number, update in weights.linears.items():
        packed, num_tiles = _pack(update, device)
        a, tiles, b, gain, offset = packed
        addresses = [0 if each is None else each.data_ptr() for each in (a, tiles, b, gain, offset)]
        records[number] = [*addresses, len(a), num_tiles]
        owners += [each for each in packed if each is not None]
    moved = replace(
        weights,
        linears={},
        embedding=_move_rows(weights.embedding, device),
        embedding_update=_move_update(weights.embedding_update, device),
        head=_move_rows(weights.head, device),
    )
    num_bytes = moved.num_bytes + sum(tensor.nbytes for tensor in owners)
    return GpuAdapter(moved, records, num_bytes, tuple(owners))


class GpuRowAdapters(TorchRowAdapters):
    """Adapters of rows, see `TorchRowAdapters`. `rows` and `starts` are in host memory."""

    def __init__(
        self, device: Device, adapters: Sequence[GpuAdapter], rows: Tensor, starts: Tensor
    ) -> None:
        on_device = device.to_device(rows)
        super().__init__([adapter.weights for adapter in adapters], on_device, starts)
        ends = starts.tolist()
        widest = max(end - start for start, end in pairwise(ends))
        self._tokens_tile = TOKEN_TILES[widest > TOKEN_TILES[0]]
        tiles = [
            (segment, first, end)
            for segment, (start, end) in enumerate(pairwise(ends))
            for first in range(start, end, self._tokens_tile)
        ]
        records = np.stack([adapter.records for adapter in adapters])
        self._sizes: list[list[int]] = records[:, :, -2:].max(axis=0).tolist()
        """Largest number of ranks and of tiles by linear layer."""
        self._rows = on_device
        self._row_tiles = device.to_device(torch.tensor(tiles))
        self._records = device.to_device(torch.from_numpy(records))
        self._owners = tuple(adapters)

    def update_linear(self, number: int, x: Tensor, out: Tensor) -> None:
        ranks, out_tiles = self._sizes[number]
        if not ranks:
            return
        if x.stride(1) != 1:
            x = x.contiguous()
        hidden = torch.empty(len(self._rows), ranks, dtype=x.dtype, device=x.device)
        num_linears, cols = self._records.shape[1], x.shape[1]
        common = (self._records, self._row_tiles, self._rows, hidden, ranks, number, num_linears)
        _project[len(self._row_tiles), ranks // RANKS_TILE](
            x,
            *common,
            x.stride(0),
            COLS=cols,
            TOKENS_TILE=self._tokens_tile,
            COLS_TILE=STAGE_BYTES // x.dtype.itemsize,
            num_warps=4,
        )
        _expand[len(self._row_tiles), out_tiles](
            out,
            *common,
            out.stride(0),
            TOKENS_TILE=self._tokens_tile,
            num_warps=4,
            enable_fp_fusion=False,  # so that gain and offset round as in torch
        )


def _pack(
    update: LinearUpdate, device: torch.device
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], int]:
    """Return A, the table of tiles, B, gain and offset on the GPU, and the number of tiles.

    A tile is a row of its first output, the number of its outputs, its first rank, the number of its ranks, and its
    position in B.
    """
    a_rows, tiles, b_parts = [], [], []
    ranks = position = 0
    first_ranks: dict[int, int] = {}
    for run in update.runs:
        size = run.b.shape[1]
        padding = -size % RANKS_TILE
        if run.first_rank not in first_ranks:  # runs of the same ranks share them
            first_ranks[run.first_rank] = ranks
            rows = update.a[run.first_rank : run.first_rank + size]
            a_rows.append(F.pad(rows, (0, 0, 0, padding)))
            ranks += size + padding
        for first in range(0, len(run.b), OUTS_TILE):
            count, width = min(OUTS_TILE, len(run.b) - first), size + padding
            place = position + first * width
            tiles.append((run.first + first, count, first_ranks[run.first_rank], width, place))
        b_parts.append(F.pad(run.b, (0, padding)).flatten())
        position += b_parts[-1].numel()
    a, table, b = (
        tensor.to(device) for tensor in (torch.cat(a_rows), torch.tensor(tiles), torch.cat(b_parts))
    )
    gain, offset = (
        None if factor is None else factor.contiguous().to(device)
        for factor in (update.gain, update.offset)
    )
    return (a, table, b, gain, offset), len(tiles)


def _move_update(update: LinearUpdate | None, device: torch.device) -> LinearUpdate | None:
    if update is None:
        return None
    runs = tuple(run._replace(b=run.b.to(device)) for run in update.runs)
    gain, offset = (
        None if each is None else each.to(device) for each in (update.gain, update.offset)
    )
    return LinearUpdate(update.a.to(device), runs, gain, offset)


def _move_rows(rows: TokenRows, device: torch.device) -> TokenRows:
    tensors = (rows.table, rows.ids, rows.rows)
    return TokenRows(*(None if each is None else each.to(device) for each in tensors))


@triton.jit(do_not_specialize=["hidden_stride", "number"])
def _project(
    x,
    records,
    row_tiles,
    rows,
    hidden,
    hidden_stride,
    number,
    num_linears,
    x_stride,
    COLS: tl.constexpr,
    TOKENS_TILE: tl.constexpr,
    COLS_TILE: tl.constexpr,
):
    """Compute 16 ranks of A x for a tile of rows. A fills a quarter of the matrix instruction, and zeros the rest."""
    row_tile = row_tiles + tl.program_id(0) * 3
    record = records + (tl.load(row_tile) * num_linears + number) * 7
    first = tl.program_id(1) * 16
    if first >= tl.load(record + 5):
        return
    end = tl.load(row_tile + 2)
    position = tl.load(row_tile + 1) + tl.arange(0, TOKENS_TILE)
    source = tl.load(rows + tl.minimum(position, end - 1))
    local = tl.arange(0, 64)
    a = tl.load(record).to(tl.pointer_type(x.dtype.element_ty))
    left = a + (first + tl.minimum(local, 15)).to(tl.int64)[:, None] * COLS
    right = x + source[None, :] * x_stride
    acc = tl.zeros((64, TOKENS_TILE), tl.float32)
    acc = multiply_floats(left, right, acc, COLS, 16, COLS_TILE, SCALED=False)
    target = hidden + position[None, :] * hidden_stride + (first + local)[:, None]
    mask = (local < 16)[:, None] & (position < end)[None, :]
    tl.store(target, acc.to(hidden.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["hidden_stride", "number"])
def _expand(
    out,
    records,
    row_tiles,
    rows,
    hidden,
    hidden_stride,
    number,
    num_linears,
    out_stride,
    TOKENS_TILE: tl.constexpr,
):
    """Change 64 outputs of a tile of rows: (out + B h) * gain + offset, rounded once."""
    row_tile = row_tiles + tl.program_id(0) * 3
    record = records + (tl.load(row_tile) * num_linears + number) * 7
    if tl.program_id(1) >= tl.load(record + 6):
        return
    tile = tl.load(record + 1).to(tl.pointer_type(tl.int64)) + tl.program_id(1) * 5
    first, count = tl.load(tile), tl.load(tile + 1)
    first_rank, ranks = tl.load(tile + 2), tl.load(tile + 3)
    b = tl.load(record + 2).to(tl.pointer_type(out.dtype.element_ty)) + tl.load(tile + 4)
    end = tl.load(row_tile + 2)
    position = tl.load(row_tile + 1) + tl.arange(0, TOKENS_TILE)
    stored = tl.minimum(position, end - 1)
    local = tl.arange(0, 64)
    rank = tl.arange(0, 16)
    left = b + tl.minimum(local, count - 1)[:, None] * ranks + rank[None, :]
    right = hidden + stored[None, :] * hidden_stride + (first_rank + rank)[:, None]
    acc = tl.zeros((64, TOKENS_TILE), tl.float32)
    for _ in range(0, ranks, 16):
        acc = tl.dot(tl.load(left), tl.load(right), acc, input_precision="tf32x3")
        left += 16
        right += 16
    target = out + tl.load(rows + stored)[None, :] * out_stride + (first + local)[:, None]
    is_output = local < count
    mask = is_output[:, None] & (position < end)[None, :]
    value = tl.load(target, mask=mask, other=0.0).to(tl.float32) + acc
    gain = tl.load(record + 3)
    if gain != 0:
        factor = gain.to(tl.pointer_type(tl.float32)) + first + local
        value *= tl.load(factor, mask=is_output, other=1.0)[:, None]
    offset = tl.load(record + 4)
    if offset != 0:
        added = offset.to(tl.pointer_type(tl.float32)) + first + local
        value += tl.load(added, mask=is_output, other=0.0)[:, None]
    tl.store(target, value.to(out.dtype.element_ty), mask=mask)
