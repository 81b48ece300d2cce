"""Attention in both directions over whole sequences, without a KV cache."""

from __future__ import annotations

from itertools import groupby, pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.engine.execution.architectures.architecture import AttentionParams
from argosy.engine.execution.kernels.attention import Attention
from argosy.engine.execution.kernels.batch import Batch
from argosy.engine.execution.kernels.rope import RopeRotation, apply_rope


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
