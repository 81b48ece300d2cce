"""Attention in plain torch: paged for CPUs without the native kernel, and in both directions without a KV cache."""

from __future__ import annotations

from itertools import groupby, pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.engine.execution.architectures.architecture import SCALE_BYTES, AttentionParams
from argosy.engine.execution.checkpoint_formats.quantization import quantize_rows
from argosy.engine.execution.kernels.attention import Attention
from argosy.engine.execution.kernels.batch import Batch, KvCacheShape
from argosy.engine.execution.kernels.huge_pages import huge_zeros
from argosy.engine.execution.kernels.rope import RopeRotation, apply_rope


class TorchAttention(Attention):
    """Paged attention in plain torch, which runs anywhere but is slower than the native kernel.

    Tokens are grouped into query tiles of `QUERY_TILE` neighbouring positions of one sequence, and keys into key
    tiles. Both are cut at absolute positions. Every matrix product of a token therefore has the same shape, and the
    token the same index in it, whatever else is in the batch. The online softmax (Milakov & Gimelshein 2018) runs over
    the key tiles in order.
    """

    name = "torch"
    QUERY_TILE = 8
    KEY_TILE = 128
    MAX_TILE_BYTES = 32 << 20
    """Maximum memory of the gathered key tiles. More query tiles are computed in several passes."""

    def __init__(self, shape: KvCacheShape) -> None:
        block_size, kv_heads, head_dim = shape.block_size, shape.num_kv_heads, shape.head_dim
        sizes = (shape.num_layers, shape.num_blocks, block_size, kv_heads, head_dim)
        self._codec = None
        if shape.dtype == torch.int8:
            self._codec = RoundedRows(head_dim, shape.exact_dim)
            sizes = (*sizes[:-1], self._codec.row_bytes)
        self._keys = huge_zeros(sizes, shape.dtype)
        self._values = self._keys
        if shape.value_dim is None:
            self._values = huge_zeros(sizes, shape.dtype)
        super().__init__(self._keys, None if self._values is self._keys else self._values)
        self._value_dim = shape.value_dim or head_dim
        self._block_size = block_size
        self._tile_blocks = max(1, self.KEY_TILE // block_size)
        self._tile = self._tile_blocks * block_size
        if self._tile != self.KEY_TILE:
            self.name = f"torch, {self._tile} keys"
        unit_bytes = self._tile * kv_heads * head_dim * 4
        self._max_units = max(1, self.MAX_TILE_BYTES // unit_bytes)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        batch: Batch,
        params: AttentionParams,
        rope: RopeRotation | None,
    ) -> Tensor:
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        self._store(self._keys, k, batch, params)
        if v is not None:
            self._store(self._values, v, batch, params)
        _, heads, head_dim = q.shape
        query_lens = batch.query_start_loc.long().diff()
        sequence = torch.repeat_interleave(torch.arange(len(query_lens)), query_lens)
        tile = batch.positions // self.QUERY_TILE
        tiles, tile_of_token = torch.unique_consecutive(
            torch.stack((sequence, tile), 1), dim=0, return_inverse=True
        )
        index = (tile_of_token, batch.positions % self.QUERY_TILE)
        padded = torch.zeros(len(tiles), self.QUERY_TILE, heads, head_dim)
        padded[index] = q.float() * params.scale
        # Build one matrix per KV head. The query heads that share a KV head become rows.
        units = padded.unflatten(2, (k.shape[1], -1)).transpose(1, 2).flatten(2, 3)
        outputs = [
            self._attend(queries, tile_ids[:, 0], tile_ids[:, 1], batch, params)
            for queries, tile_ids in zip(
                units.split(self._max_units), tiles.split(self._max_units), strict=True
            )
        ]
        out = torch.cat(outputs).unflatten(2, (self.QUERY_TILE, -1)).transpose(1, 2).flatten(2, 3)
        rows: Tensor = out[index]
        return rows.to(q.dtype)

    def _store(self, cache: Tensor, rows: Tensor, batch: Batch, params: AttentionParams) -> None:
        slots = cache[params.layer].flatten(0, 1)
        stored = rows.to(cache.dtype) if self._codec is None else self._codec.round(rows)
        slots.index_copy_(0, batch.slot_mappings[params.group], stored)

    def _attend(
        self, q: Tensor, sequence: Tensor, tile: Tensor, batch: Batch, params: AttentionParams
    ) -> Tensor:
        """Compute the online softmax of query tiles q [U, kv_heads, rows, D] over their sequences' key tiles."""
        length = batch.seq_lens.long()[sequence]
        positions = tile[:, None] * self.QUERY_TILE + torch.arange(self.QUERY_TILE)
        positions = positions.repeat_interleave(q.shape[2] // self.QUERY_TILE, 1)
        first_key = torch.zeros_like(length)
        if params.sliding_window:
            chunk_starts = batch.positions[batch.query_start_loc.long()[sequence]]
            first_token = torch.maximum(positions[:, 0], chunk_starts)
            first_key = (first_token - (params.sliding_window - 1)).clamp(min=0)
        first = first_key // self._tile
        last = torch.minimum(positions[:, -1], length - 1) // self._tile
        row_max = torch.full(q.shape[:3], -torch.inf)
        total = torch.zeros(q.shape[:3])
        out = torch.zeros(*q.shape[:3], self._value_dim)
        for index in range(int(first.min()), int(last.max()) + 1):
            active = ((first <= index) & (index <= last)).nonzero().flatten()
            if active.numel() == 0:
                continue
            key_positions = index * self._tile + torch.arange(self._tile)
            valid = (key_positions < length[active, None]) & (
                key_positions >= first_key[active, None]
            )
            blocks = self._tile_block_ids(
                batch.block_tables[params.group], sequence[active], valid, index
            )
            scores = torch.matmul(q[active], self._gather(self._keys, params, blocks, valid).mT)
            if params.softcap:
                scores = params.softcap * torch.tanh(scores / params.softcap)
            visible = (
                _visible(key_positions, positions[active, :, None], params.sliding_window)
                & valid[:, None]
            )
            scores.masked_fill_(~visible[:, None], -torch.inf)
            old_max = row_max[active]
            new_max = torch.maximum(old_max, scores.amax(-1))
            # Rows without a visible key so far would yield NaN.
            base = new_max.masked_fill(new_max == -torch.inf, 0.0)
            weights = torch.exp(scores - base[..., None])
            rescale = torch.exp(old_max - base)
            row_max[active] = new_max
            total[active] = total[active] * rescale + weights.sum(-1)
            values = self._gather(self._values, params, blocks, valid)[..., -self._value_dim :]
            out[active] = out[active] * rescale[..., None] + torch.matmul(weights, values)
        if params.sinks is not None:  # a row (token of the tile, query head of the group)
            sinks = params.sinks.view(q.shape[1], -1).repeat(1, self.QUERY_TILE)
            total += torch.exp(sinks - row_max)
        # Adding zero turns -0.0 into 0.0, because the sign depends on the number of masked keys.
        return out / total[..., None] + 0.0

    def _tile_block_ids(self, table: Tensor, sequence: Tensor, valid: Tensor, index: int) -> Tensor:
        """Return the blocks of key tile `index` of each sequence, [U, tile_blocks], 0 for those without a valid key."""
        column = index * self._tile_blocks + torch.arange(self._tile_blocks)
        blocks = table[sequence[:, None], column.clamp(max=table.shape[1] - 1)]
        is_used = valid.unflatten(1, (self._tile_blocks, self._block_size)).any(-1)
        return blocks.long().masked_fill(~is_used, 0)

    def _gather(
        self, cache: Tensor, params: AttentionParams, blocks: Tensor, valid: Tensor
    ) -> Tensor:
        """Return one key tile of a cache in float32, [U, kv_heads, tile, D].

        Invalid positions are zero, because a block may still contain another sequence's values, which may not be
        finite.
        """
        rows = cache[params.layer][blocks]
        rows = rows.float() if self._codec is None else self._codec.expand(rows)
        tile = rows.flatten(1, 2).transpose(1, 2)
        return torch.where(valid[:, None, :, None], tile, 0.0)


class RoundedRows:
    """Rows of an int8 KV cache: bytes with a scale for each row, as the torch reference for all kernels.

    A row depends on nothing but itself, see `quantize_rows`. Its last bytes are the scale, of which its elements are
    multiples.
    """

    def __init__(self, size: int, exact_dim: int) -> None:
        """Describe rows of `size` elements, of which the first `exact_dim` are bfloat16 multiples of the scale."""
        self._exact_bytes = 2 * exact_dim
        self._exact_dim = exact_dim
        self._size = size
        self._padding = -(size + exact_dim) % SCALE_BYTES
        self.row_bytes = size + exact_dim + self._padding + SCALE_BYTES

    def round(self, rows: Tensor) -> Tensor:
        """Round rows [..., size] to int8 [..., row_bytes]."""
        exact, rest = rows.tensor_split((self._exact_dim,), -1)
        integers, scales = quantize_rows(rest.flatten(0, -2), rest.shape[-1])
        if self._exact_dim:
            scales.masked_fill_(scales == 0, 1.0)
        scales = scales.view(*rows.shape[:-1], 1)
        parts = (
            (exact.float() / scales).to(torch.bfloat16).view(torch.int8),
            F.pad(integers.to(torch.int8).view(rest.shape), (0, self._padding)),
            scales.view(torch.int8),
        )
        return torch.cat(parts, -1)

    def expand(self, rows: Tensor) -> Tensor:
        """Return rows [..., row_bytes] as float32 [..., size]."""
        exact = rows[..., : self._exact_bytes].contiguous().view(torch.bfloat16).float()
        integers = rows[..., self._exact_bytes : self._size + self._exact_dim]
        scales = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
        return torch.cat((exact, integers.float()), -1) * scales


def _visible(key_positions: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Return the mask [U, R, K] of keys at positions [K] that are visible to rows at positions [U, R, 1]."""
    visible = key_positions <= positions
    return visible if window is None else visible & (key_positions > positions - window)


class BidirectionalAttention(Attention):
    """Attention of every token to all tokens of its sequence, or to those nearer than the window.

    Neighbouring sequences of equal length are computed in one call of torch's fused attention, whose work items are
    single heads of single sequences. A result therefore depends only on its own sequence, bit for bit. Nothing is
    padded. Not thread-safe.
    """

    name = "bidirectional"

    def __init__(self) -> None:
        super().__init__()
        self._batch: Batch | None = None
        self._runs: list[tuple[int, int, int]] = []
        """First token, length and number of neighbouring sequences of equal length."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        batch: Batch,
        params: AttentionParams,
        rope: RopeRotation | None,
    ) -> Tensor:
        if v is None or params.softcap is not None or params.sinks is not None:
            raise NotImplementedError("attention in both directions has no softcap and no sinks")
        if batch is not self._batch:
            self._bind_batch(batch)
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        out = q.new_empty(q.shape)
        for start, length, count in self._runs:
            rows = slice(start, start + length * count)
            queries, keys, values = (
                part[rows].unflatten(0, (count, length)).transpose(1, 2) for part in (q, k, v)
            )
            group_size = q.shape[1] // k.shape[1]
            if group_size > 1:
                keys = keys.repeat_interleave(group_size, 1)
                values = values.repeat_interleave(group_size, 1)
            mask = _window_mask(length, params.sliding_window, q.device)
            output = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=params.scale
            )
            out[rows].view_as(output.transpose(1, 2)).copy_(output.transpose(1, 2))
        return out

    def _bind_batch(self, batch: Batch) -> None:
        """Find the runs of equal lengths, which all layers share."""
        self._batch, self._runs = batch, []
        bounds = batch.query_start_loc.tolist()
        start = 0
        for length, group in groupby(end - first for first, end in pairwise(bounds)):
            count = len(list(group))
            self._runs.append((start, length, count))
            start += length * count


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return the mask [length, length] of visible keys, or None if all are visible."""
    if window is None or length <= window:
        return None
    positions = torch.arange(length, device=device)
    return (positions[:, None] - positions).abs() < window
