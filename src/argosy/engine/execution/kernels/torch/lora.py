"""Adapters of linear layers, embedding and head (LoRA, Hu et al. 2021, and DoRA, Liu et al. 2024) in torch.

A result depends only on its own row and its adapter, bit for bit, whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.engine.execution.kernels.torch.rowwise_ops import rowwise_linear


class OutputRun(NamedTuple):
    """Outputs `first .. first + len(b)` of a linear layer, which some ranks of its adapter change."""

    first: int
    first_rank: int
    b: Tensor
    """[outputs, ranks], in the model's dtype, with the adapter's scale."""


@dataclass(frozen=True, slots=True)
class LinearUpdate:
    """Adapter of a linear layer: out = (out + B round(A x)) * gain + offset in float32, rounded once.

    Each run of outputs has its own rows of A and B, so that fused matrices have one update.
    """

    a: Tensor
    """[ranks, K], in the model's dtype."""
    runs: tuple[OutputRun, ...]
    gain: Tensor | None = None
    """[N] float32, factor of each output. None is 1."""
    offset: Tensor | None = None
    """[N] float32. None is 0."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.a, *(run.b for run in self.runs), self.gain, self.offset)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def apply(self, x: Tensor, out: Tensor) -> None:
        """Change the outputs [T, N] for x [T, K] in place."""
        hidden = rowwise_linear(x.float(), self.a.float()).to(x.dtype).float()
        for run in self.runs:
            end = run.first + len(run.b)
            ranks = hidden[:, run.first_rank : run.first_rank + run.b.shape[1]]
            part = out[:, run.first : end].float()
            part += rowwise_linear(ranks, run.b.float())
            if self.gain is not None:
                part *= self.gain[run.first : end]
            if self.offset is not None:
                part += self.offset[run.first : end]
            out[:, run.first : end] = part


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of an embedding or of a head that an adapter has itself."""

    table: Tensor | None = None
    """[V, hidden], all rows. None if there are only `rows`."""
    ids: Tensor | None = None
    """[n] int64, ascending tokens of `rows`."""
    rows: Tensor | None = None
    """[n, hidden], in place of those of the table or of the base."""


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """Weights of an adapter, in the form that a model computes with."""

    linears: dict[int, LinearUpdate] = field(default_factory=dict)
    """Number of a linear layer -> its update."""
    embedding: TokenRows = TokenRows()
    embedding_update: LinearUpdate | None = None
    """Update of the embedding, whose A [ranks, V] is stored transposed and is read one row a token."""
    head: TokenRows = TokenRows()
    head_linear: Callable[[Tensor], Tensor] | None = None
    """Linear layer of the head's table, or of its rows if there is no table. None if the adapter has neither."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        updates = [*self.linears.values()]
        if self.embedding_update is not None:
            updates.append(self.embedding_update)
        tensors = (
            tensor
            for rows in (self.embedding, self.head)
            for tensor in (rows.table, rows.ids, rows.rows)
            if tensor is not None
        )
        return sum(update.num_bytes for update in updates) + sum(t.nbytes for t in tensors)


class TorchRowAdapters:
    """Adapters of rows in plain torch.

    `rows` [M] int64 are sorted by adapter. Segment i is `rows[starts[i] : starts[i + 1]]`, with adapter `adapters[i]`.
    """

    def __init__(self, adapters: Sequence[AdapterWeights], rows: Tensor, starts: Tensor) -> None:
        ends = starts.tolist()
        self._segments = [
            (adapter, rows[start:end])
            for adapter, start, end in zip(adapters, ends, ends[1:], strict=False)
        ]

    def update_linear(self, number: int, x: Tensor, out: Tensor) -> None:
        for adapter, rows in self._segments:
            update = adapter.linears.get(number)
            if update is not None:
                part = out[rows]
                update.apply(x[rows], part)
                out[rows] = part

    def replace_embeddings(self, token_ids: Tensor, out: Tensor) -> None:
        for adapter, rows in self._segments:
            own, ids = adapter.embedding, token_ids[rows]
            if own.table is not None:
                out[rows] = F.embedding(ids, own.table)
            if own.ids is not None and own.rows is not None:
                index = torch.searchsorted(own.ids, ids).clamp_(max=len(own.ids) - 1)
                found = (own.ids[index] == ids).unsqueeze(1)
                out[rows] = torch.where(found, own.rows[index], out[rows])

    def update_embeddings(self, token_ids: Tensor, out: Tensor, scale: float) -> None:
        for adapter, rows in self._segments:
            update = adapter.embedding_update
            if update is None:
                continue
            ((_, _, b),) = update.runs
            hidden = F.embedding(token_ids[rows], update.a)
            part = out[rows].float()
            part += rowwise_linear(hidden.float(), b.float()) * scale
            if update.gain is not None:
                part *= update.gain
            out[rows] = part.to(out.dtype)

    def replace_logits(self, x: Tensor, out: Tensor) -> None:
        for adapter, rows in self._segments:
            if adapter.head_linear is None:
                continue
            logits = adapter.head_linear(x[rows])
            if adapter.head.ids is None:
                out[rows] = logits
            else:
                out[rows.unsqueeze(1), adapter.head.ids] = logits
