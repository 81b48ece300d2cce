"""Permanent rows: what is known of each running sequence, gathered into one batch each step.

The host packs what a step needs into one buffer. The device, which holds the tokens (those sampled a
moment ago, too) and the pages of every row, takes its news from the buffer and gathers the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from argosy.engine.execution.array_packing import ArrayLayout, pack_arrays, unpack_arrays
from argosy.engine.execution.batch import Batch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from argosy.engine.scheduling import AdmittedSequence, StepPlan


NO_BLOCK = -1


class StepShape(NamedTuple):
    """What all steps have in common that one recording of the device's work can serve."""

    layout: ArrayLayout
    max_blocks: int
    """Pages of the longest sequence."""


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step as the host hands it over."""

    buffer: Tensor
    """[words] int64, in host memory."""
    shape: StepShape
    logit_index: NDArray[np.int64]
    """[L]: flat tokens whose logits are wanted, in rising order."""
    sample_index: NDArray[np.int64]
    """[C]: those of them that a token is sampled from."""
    sample_rows: NDArray[np.int64]
    """[C]: the rows that it is sampled for."""
    sample_positions: NDArray[np.int64]
    """[C]: the positions of these tokens."""


class DeviceInputs:
    """A step as the device reads it: views of the buffer that was handed over."""

    def __init__(self, data: Tensor, shape: StepShape) -> None:
        (
            (
                self.token_index,
                self.positions,
                self.slot_mapping,
                self.rows,
                self.logit_index,
                self.sample_index,
                self.new_token_index,
                self.new_tokens,
                self.new_block_index,
                self.new_blocks,
            ),
            (self.query_start_loc, self.seq_lens),
        ) = unpack_arrays(data, shape.layout)
        self.max_blocks = shape.max_blocks


class PersistentBatch:
    """Tokens and KV pages of R rows of at most `max_len` tokens, and of one row more, for padding.

    The padding row has no blocks: its token goes to a negative slot, and its sequence's length is 0.
    """

    def __init__(self, rows: int, max_len: int, block_size: int, device: torch.device) -> None:
        self.prompt_lens = np.zeros(rows + 1, dtype=np.int64)
        self._block_size = block_size
        self._padding = rows
        # One token more than a sequence may have: the last one sampled is recorded, never computed.
        self._stride = max_len + 1
        self._blocks_per_row = -(-max_len // block_size)
        self._blocks = np.zeros((rows + 1, self._blocks_per_row), dtype=np.int64)
        self._blocks[rows] = NO_BLOCK
        self._arange = np.arange(rows + 1)
        self._unsent_tokens: dict[int, list[int]] = {}
        """Row -> its tokens, where the device does not know them yet."""
        self._unsent_blocks: dict[int, int] = {}
        """Place among all rows' pages -> the block that is there now."""
        self.tokens = torch.zeros(rows + 1, self._stride, dtype=torch.int64, device=device)
        self._block_table = torch.from_numpy(self._blocks.astype(np.int32)).to(device)
        self._flat_tokens, self._flat_block_table = self.tokens.view(-1), self._block_table.view(-1)

    def admit(self, admission: AdmittedSequence) -> None:
        """Fill a row for a sequence that joins the batch."""
        row, blocks = admission.row, admission.blocks
        self._unsent_tokens[row] = admission.tokens
        self._unsent_blocks.update(enumerate(blocks, row * self._blocks_per_row))
        self._blocks[row, : len(blocks)] = blocks
        self.prompt_lens[row] = admission.prompt_len

    def append_blocks(self, new_blocks: list[tuple[int, int, int]]) -> None:
        """Append blocks: (row, index, block)."""
        for row, index, block in new_blocks:
            self._unsent_blocks[row * self._blocks_per_row + index] = block
            self._blocks[row, index] = block

    def clear(self) -> None:
        """All rows are free again; news that the device was not told are dropped."""
        self._unsent_tokens, self._unsent_blocks = {}, {}

    def is_uniform_decode(self, plan: StepPlan) -> bool:
        """Whether `pack_padded` can do it: a single token for each, and at most a page for each."""
        sequences = len(plan.rows)
        return (
            plan.total_tokens == sequences
            and not self._unsent_tokens
            and len(self._unsent_blocks) <= sequences
            and all(plan.sample_flags)
        )

    def pack_step(
        self, plan: StepPlan, extra_logit_index: NDArray[np.int64] | None = None
    ) -> PackedStep:
        """What the device needs for `plan`; logits are wanted where it samples, and at `wanted`."""
        size = len(plan.rows)
        rows = np.fromiter(plan.rows, np.int64, size)
        starts = np.fromiter(plan.starts, np.int64, size)
        if extra_logit_index is None and plan.total_tokens == size and all(plan.sample_flags):
            seq_lens = starts + 1
            return self._pack_single_tokens(
                rows, starts, seq_lens, size, self._max_blocks(seq_lens)
            )
        counts = np.fromiter(plan.counts, np.int64, size)
        samples = np.fromiter(plan.sample_flags, np.bool_, size)
        ends, seq_lens = counts.cumsum(), starts + counts
        row_of = rows.repeat(counts)
        positions = np.arange(len(row_of)) + (seq_lens - ends).repeat(counts)
        sampled = ends[samples] - 1
        logit_index = (
            sampled if extra_logit_index is None else np.union1d(sampled, extra_logit_index)
        )
        data, layout = pack_arrays(
            (
                *self._locate_tokens(row_of, positions),
                rows,
                logit_index,
                (rows * self._stride + seq_lens)[samples],
                *self._take_unsent(),
            ),
            (np.concatenate(((0,), ends)), seq_lens),
        )
        shape = StepShape(layout, self._max_blocks(seq_lens))
        return PackedStep(
            torch.from_numpy(data), shape, logit_index, sampled, rows[samples], seq_lens[samples]
        )

    def pack_padded_step(self, plan: StepPlan, size: int) -> PackedStep:
        """The same for a `uniform` plan, filled up with the padding row to `size` sequences.

        The shape depends on `size` alone.
        """
        used = len(plan.rows)
        rows, starts = np.full(size, self._padding), np.zeros(size, dtype=np.int64)
        rows[:used], starts[:used] = plan.rows, plan.starts
        seq_lens = starts + 1
        seq_lens[used:] = 0
        return self._pack_single_tokens(
            rows, starts, seq_lens, used, self._blocks_per_row, min_blocks=size
        )

    def _pack_single_tokens(
        self,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        seq_lens: NDArray[np.int64],
        used: int,
        width: int,
        min_blocks: int = 0,
    ) -> PackedStep:
        """One token for each of these rows, of which the first `used` are sampled.

        At least `pages` pages are told.
        """
        at, _, slots = self._locate_tokens(rows, positions)
        order = self._arange[: len(rows)]
        news = self._take_unsent(min_blocks)
        data, layout = pack_arrays(
            (at, positions, slots, rows, order, at + 1, *news),
            (self._arange[: len(rows) + 1], seq_lens),
        )
        shape, order = StepShape(layout, width), order[:used]
        return PackedStep(torch.from_numpy(data), shape, order, order, rows[:used], seq_lens[:used])

    def _locate_tokens(
        self, row_of: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Of each flat token: its place in `tokens`, its position, its slot in the KV cache."""
        size = self._block_size
        index = positions // size
        slots = (self._blocks[row_of, index] - index) * size + positions
        return row_of * self._stride + positions, positions, slots

    def _max_blocks(self, seq_lens: NDArray[np.int64]) -> int:
        """Pages of the longest."""
        return -(-int(seq_lens.max()) // self._block_size)

    def _take_unsent(self, min_blocks: int = 0) -> tuple[NDArray[np.int64], ...]:
        """Places and values of the tokens, then of the pages, that the device does not know yet."""
        tokens, pages = self._unsent_tokens, self._unsent_blocks
        self.clear()
        token_at = token = page_at = page = np.empty(0, dtype=np.int64)
        if tokens:
            starts = [(row * self._stride, len(ids)) for row, ids in tokens.items()]
            token_at = np.concatenate([np.arange(at, at + count) for at, count in starts])
            token = np.concatenate([np.array(ids) for ids in tokens.values()])
        known = max(0, min_blocks - len(pages))
        if pages or known:
            place = self._padding * self._blocks_per_row
            page_at = np.array([*pages, *[place] * known])
            page = np.array([*pages.values(), *[NO_BLOCK] * known])
        return token_at, token, page_at, page

    def gather_batch(self, inputs: DeviceInputs) -> Batch:
        """Take the news and gather the batch; work of the device alone."""
        tokens, pages = self._flat_tokens, self._flat_block_table
        if len(inputs.new_tokens):
            tokens.index_copy_(0, inputs.new_token_index, inputs.new_tokens)
        if len(inputs.new_blocks):
            pages.index_copy_(0, inputs.new_block_index, inputs.new_blocks.to(torch.int32))
        return Batch(
            token_ids=tokens.index_select(0, inputs.token_index),
            positions=inputs.positions,
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            block_table=self._block_table[:, : inputs.max_blocks].index_select(0, inputs.rows),
            slot_mapping=inputs.slot_mapping,
            rows=inputs.rows,
            logit_index=inputs.logit_index,
        )

    def append_tokens(self, inputs: DeviceInputs, tokens: Tensor) -> None:
        """Record sampled tokens, in the order in which they were packed; padding gets none.

        One below 0, of a row that failed while its next token may be under way, becomes token 0.
        """
        self._flat_tokens.index_copy_(0, inputs.sample_index[: len(tokens)], tokens.clamp(min=0))


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

    def select_rows(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
