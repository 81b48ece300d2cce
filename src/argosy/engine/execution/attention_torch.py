"""Paged attention in plain torch, for where no native kernel is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from argosy.engine.execution.huge_pages import huge_zeros
from argosy.engine.execution.kv_cache_tensor import KvCacheTensor
from argosy.engine.execution.rope import apply_rope

if TYPE_CHECKING:
    from torch import Tensor

    from argosy.engine.execution.batch import AttentionParams, Batch, KvCacheShape
    from argosy.engine.execution.rope import RopeRotation


class TorchAttention(KvCacheTensor):
    """Paged attention in plain torch: correct anywhere, slower than the native kernel.

    Tokens are grouped into units of QUERY_TILE neighbouring positions of one sequence, and keys
    into tiles; both are cut at absolute positions, so every matrix product of a token has the same
    shape, and the token the same place in it, whatever else is in the batch. The online softmax
    (Milakov & Gimelshein 2018) then runs over the tiles in order.
    """

    QUERY_TILE = 8
    KEY_TILE = 128
    MAX_TILE_BYTES = 32 << 20
    """Most memory for one gathered key tile; units beyond it are done in a next turn."""

    def __init__(self, shape: KvCacheShape) -> None:
        block_size, kv_heads, head_dim = shape.block_size, shape.num_kv_heads, shape.head_dim
        sizes = (shape.num_layers, shape.num_blocks, block_size, kv_heads, head_dim)
        super().__init__(huge_zeros(sizes, shape.dtype), huge_zeros(sizes, shape.dtype))
        self._block_size = block_size
        self._tile_blocks = max(1, self.KEY_TILE // block_size)
        self._tile = self._tile_blocks * block_size
        unit_bytes = self._tile * kv_heads * head_dim * 4
        self._max_units = max(1, self.MAX_TILE_BYTES // unit_bytes)

    @property
    def name(self) -> str:
        """What is in use, for the log."""
        return "torch"

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: Batch,
        params: AttentionParams,
        rope: RopeRotation | None,
    ) -> Tensor:
        """See `Attention`."""
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        keys, values = self.keys[params.layer], self.values[params.layer]
        keys.flatten(0, 1).index_copy_(0, batch.slot_mapping, k.to(keys.dtype))
        values.flatten(0, 1).index_copy_(0, batch.slot_mapping, v.to(values.dtype))

        _, heads, head_dim = q.shape
        counts = batch.query_start_loc.long().diff()
        sequence = torch.repeat_interleave(torch.arange(len(counts)), counts)
        tile = batch.positions // self.QUERY_TILE
        marks, unit = torch.unique_consecutive(
            torch.stack((sequence, tile), 1), dim=0, return_inverse=True
        )
        place = (unit, batch.positions % self.QUERY_TILE)
        padded = torch.zeros(len(marks), self.QUERY_TILE, heads, head_dim)
        padded[place] = q.float() * params.scale
        # One matrix a KV head: the heads that share it stand among the rows.
        units = padded.unflatten(2, (keys.shape[2], -1)).transpose(1, 2).flatten(2, 3)
        parts = [
            self._attend(part, mark[:, 0], mark[:, 1], batch, params)
            for part, mark in zip(
                units.split(self._max_units), marks.split(self._max_units), strict=True
            )
        ]
        out = torch.cat(parts).unflatten(2, (self.QUERY_TILE, -1)).transpose(1, 2).flatten(2, 3)
        rows: Tensor = out[place]
        return rows.to(q.dtype)

    def _attend(
        self, q: Tensor, sequence: Tensor, tile: Tensor, batch: Batch, spec: AttentionParams
    ) -> Tensor:
        """Online softmax of units q [U, kv_heads, rows, D] over their sequences' key tiles."""
        length = batch.seq_lens.long()[sequence]
        row = tile[:, None] * self.QUERY_TILE + torch.arange(self.QUERY_TILE)
        row = row.repeat_interleave(q.shape[2] // self.QUERY_TILE, 1)  # the position of each row
        oldest = (
            row[:, 0] - (spec.sliding_window - 1)
            if spec.sliding_window
            else torch.zeros_like(length)
        )
        first = oldest.clamp(min=0) // self._tile
        last = torch.minimum(row[:, -1], length - 1) // self._tile
        peak = torch.full(q.shape[:3], -torch.inf)
        total = torch.zeros(q.shape[:3])
        out = torch.zeros_like(q)
        for index in range(int(first.min()), int(last.max()) + 1):
            active = ((first <= index) & (index <= last)).nonzero().flatten()
            if active.numel() == 0:
                continue
            pages = self._tile_blocks_of(batch.block_table, sequence[active], length[active], index)
            at = index * self._tile + torch.arange(self._tile)
            held = at < length[active, None]
            scores = torch.matmul(q[active], self._gather(self.keys, spec, pages, held).mT)
            if spec.softcap:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            seen = _visible(at, row[active, :, None], spec.sliding_window) & held[:, None]
            scores.masked_fill_(~seen[:, None], -torch.inf)
            before = peak[active]
            now = torch.maximum(before, scores.amax(-1))
            base = now.masked_fill(now == -torch.inf, 0.0)  # rows that have seen no key yet
            weights = torch.exp(scores - base[..., None])
            fade = torch.exp(before - base)
            peak[active] = now
            total[active] = total[active] * fade + weights.sum(-1)
            values = self._gather(self.values, spec, pages, held)
            out[active] = out[active] * fade[..., None] + torch.matmul(weights, values)
        # Adding zero turns -0.0, which depends on how many masked keys were summed, into 0.0.
        return out / total[..., None] + 0.0

    def _tile_blocks_of(
        self, table: Tensor, sequence: Tensor, length: Tensor, index: int
    ) -> Tensor:
        """Blocks of key tile `index` of each sequence: [U, tile_blocks]; 0 beyond its length."""
        column = index * self._tile_blocks + torch.arange(self._tile_blocks)
        inside = column * self._block_size < length[:, None]
        pages = table[sequence[:, None], column.clamp(max=table.shape[1] - 1)]
        return pages.long().masked_fill(~inside, 0)

    def _gather(self, cache: Tensor, spec: AttentionParams, pages: Tensor, held: Tensor) -> Tensor:
        """One key tile of a cache in float32: [U, kv_heads, tile, D].

        Zero where not held: a block may still have another sequence's values there, and those
        need not be finite.
        """
        tile = cache[spec.layer][pages].flatten(1, 2).transpose(1, 2).float()
        return torch.where(held[:, None, :, None], tile, 0.0)


def _visible(at: Tensor, row: Tensor, window: int | None) -> Tensor:
    """Which keys at positions `at` [K] the rows at positions [U, R, 1] see: [U, R, K]."""
    seen = at <= row
    return seen if window is None else seen & (at > row - window)
