"""Permanent rows: what the executor knows of each running sequence, gathered into batches each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from argosy.engine.execution.batch import Batch

if TYPE_CHECKING:
    from argosy.engine.scheduling import Admission, Plan


class SequenceTable:
    """Tokens and KV pages of every row. R rows, at most `max_len` tokens each."""

    def __init__(self, rows: int, max_len: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self._device = device
        # One token more than a sequence may have: the last one sampled is recorded, never computed.
        self.tokens = torch.zeros(rows, max_len + 1, dtype=torch.int64, device=device)
        pages = -(-max_len // block_size)
        self.pages = torch.zeros(rows, pages, dtype=torch.int32, device=device)
        self.prompt_lens = np.zeros(rows, dtype=np.int64)

    def admit(self, admission: Admission) -> None:
        """Fill a row for a sequence that joins the batch."""
        row, tokens, blocks = admission.row, admission.tokens, admission.blocks
        self.tokens[row, : len(tokens)] = torch.tensor(tokens, device=self._device)
        self.pages[row, : len(blocks)] = torch.tensor(
            blocks, dtype=torch.int32, device=self._device
        )
        self.prompt_lens[row] = admission.prompt_len

    def place(self, placed: list[tuple[int, int, int]]) -> None:
        """Append blocks: (row, index, block)."""
        if placed:
            row, index, block = torch.tensor(placed, device=self._device).unbind(1)
            self.pages[row, index] = block.to(torch.int32)

    def batch(self, plan: Plan, wanted: Tensor | None) -> Batch:
        """The inputs of `plan`; logits are wanted at chunks that sample, and at flat tokens `wanted`."""
        shape = torch.tensor(
            [plan.rows, plan.starts, plan.counts, plan.samples], device=self._device
        )
        rows, starts, counts, samples = shape.unbind(0)
        ends = counts.cumsum(0)
        cu_q = torch.zeros(len(plan.rows) + 1, dtype=torch.int32, device=self._device)
        cu_q[1:] = ends
        seq_lens = starts + counts
        total = plan.tokens
        if total == len(plan.rows):
            row_of, positions = rows, starts
        else:
            row_of = torch.repeat_interleave(rows, counts, output_size=total)
            offsets = torch.repeat_interleave(starts - ends + counts, counts, output_size=total)
            positions = torch.arange(total, device=self._device) + offsets
        size = self.block_size
        pages = self.pages[row_of, positions // size].to(torch.int64)
        longest = max(map(int.__add__, plan.starts, plan.counts))
        logit_index = ends[samples.bool()] - 1
        if wanted is not None:
            logit_index = torch.unique(torch.cat([logit_index, wanted]))
        return Batch(
            token_ids=self.tokens[row_of, positions],
            positions=positions,
            cu_q=cu_q,
            seq_lens=seq_lens.to(torch.int32),
            page_table=self.pages[rows, : -(-longest // size)],
            slots=pages * size + positions % size,
            rows=rows,
            logit_index=logit_index,
        )

    def append(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Record sampled tokens: `tokens[i]` is the token at `positions[i]` of `rows[i]`."""
        self.tokens[rows, positions] = tokens


class RaggedTable:
    """For each row any number of (token id, value) pairs, picked out for a batch without a loop."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._lists: dict[int, tuple[list[int], list[float]]] = {}
        self._index = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self._device = device
        self._pack()

    def set(self, row: int, ids: list[int], values: list[float]) -> None:
        """Replace the row's pairs; none at all when `ids` is empty."""
        if ids:
            self._lists[row] = (ids, values)
        elif self._lists.pop(row, None) is None:
            return
        self._pack()

    def __bool__(self) -> bool:
        return bool(self._lists)

    def pick(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For a batch of rows [S]: (index into the batch [N], token ids [N], values [N])."""
        self._index[rows] = torch.arange(len(rows), device=self._device)
        index = self._index[self._rows]
        self._index[rows] = -1
        here = index >= 0
        return index[here], self._ids[here], self._values[here]

    def _pack(self) -> None:
        rows = [row for row, (ids, _) in self._lists.items() for _ in ids]
        ids = [i for ids, _ in self._lists.values() for i in ids]
        values = [v for _, values in self._lists.values() for v in values]
        self._rows = torch.tensor(rows, dtype=torch.int64, device=self._device)
        self._ids = torch.tensor(ids, dtype=torch.int64, device=self._device)
        self._values = torch.tensor(values, dtype=torch.float32, device=self._device)
