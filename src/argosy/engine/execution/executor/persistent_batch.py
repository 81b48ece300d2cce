"""Persistent batch, which keeps a row of tokens and KV blocks per running sequence on the device between steps.

The host packs a step's inputs into one buffer, so that they reach the device in one copy. They contain only the tokens
and blocks that the device does not have yet. The device updates its rows from the buffer and gathers the batch. Its
rows also hold the tokens that it sampled itself, which the host may not know yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from argosy.engine.execution.kernels.batch import Batch
from argosy.engine.scheduling import NO_BLOCK, AdmittedSequence, StepPlan

ARRAY_ALIGNMENT_BYTES = 16
"""Alignment of every array, in bytes. Triton compiles kernels for the alignment of their arguments."""


class ArrayLayout(NamedTuple):
    """Lengths of the 64-bit and then the 32-bit arrays of a buffer. Equal layouts have equal offsets."""

    int64_lengths: tuple[int, ...]
    int32_lengths: tuple[int, ...]

    def word_offsets(self) -> list[int]:
        """Return the offset of each array, and the end of the last one, in 64-bit words."""
        words = ARRAY_ALIGNMENT_BYTES // 8
        offset, offsets = 0, [0]
        for length in self.int64_lengths:
            offset += (length + words - 1) // words * words
            offsets.append(offset)
        for length in self.int32_lengths:
            offset += (length + 2 * words - 1) // (2 * words) * words
            offsets.append(offset)
        return offsets


def pack_arrays(
    longs: Sequence[NDArray[Any]], ints: Sequence[NDArray[Any]]
) -> tuple[NDArray[np.int64], ArrayLayout]:
    """Pack `longs` as 64-bit and `ints` as 32-bit integers into one buffer, and return it with its layout."""
    layout = ArrayLayout(tuple(map(len, longs)), tuple(map(len, ints)))
    offsets = layout.word_offsets()
    buffer = np.zeros(offsets[-1], dtype=np.int64)
    for offset, array in zip(offsets, longs, strict=False):
        if len(array):
            buffer[offset : offset + len(array)] = array
    int32_view = buffer.view(np.int32)
    for offset, array in zip(offsets[len(longs) :], ints, strict=False):
        int32_view[2 * offset : 2 * offset + len(array)] = array
    return buffer, layout


def unpack_arrays(buffer: Tensor, layout: ArrayLayout) -> tuple[list[Tensor], list[Tensor]]:
    """Return the int64 arrays and the int32 arrays of a packed buffer, as views of it."""
    offsets = layout.word_offsets()
    int32_view = buffer.view(torch.int32)
    empty = buffer[:0]
    longs = [
        buffer[offset : offset + length] if length else empty
        for offset, length in zip(offsets, layout.int64_lengths, strict=False)
    ]
    int32_arrays = zip(offsets[len(layout.int64_lengths) :], layout.int32_lengths, strict=False)
    return longs, [int32_view[2 * offset : 2 * offset + length] for offset, length in int32_arrays]


TABLE_ALIGNMENT = ARRAY_ALIGNMENT_BYTES // 4
"""Multiple of integers to which rows of block tables and of slots are padded."""


class StepShape(NamedTuple):
    """Shape of a packed step. All steps with the same shape can replay the same captured graph."""

    layout: ArrayLayout
    max_blocks: int
    """Number of KV blocks of the longest sequence."""


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Inputs of one step, packed by the host."""

    buffer: Tensor
    """[words] int64, in host memory."""
    shape: StepShape
    logit_index: NDArray[np.int64]
    """[L], ascending indices of the flat tokens whose logits are computed."""
    sample_index: NDArray[np.int64]
    """[C], those flat tokens of `logit_index` from which a token is sampled."""
    sample_rows: NDArray[np.int64]
    """[C], rows of the sampled tokens."""
    sample_positions: NDArray[np.int64]
    """[C], positions of the sampled tokens."""


class PersistentBatch:
    """Tokens of R rows of up to `max_len` tokens, and of one padding row, and their blocks in G KV cache groups.

    The padding row has no blocks. Its token has a negative KV slot, and its sequence has length 0.
    """

    def __init__(
        self, rows: int, max_len: int, block_size: int, num_groups: int, device: torch.device
    ) -> None:
        self.prompt_lens = np.zeros(rows + 1, dtype=np.int64)
        self._block_size = block_size
        self._padding = rows
        # One token more than `max_len`, because the last sampled token is recorded but not computed.
        self._stride = max_len + 1
        self._blocks_per_row = _align(-(-max_len // block_size))
        self._num_groups = num_groups
        self._blocks = np.zeros((num_groups, rows + 1, self._blocks_per_row), dtype=np.int64)
        self._blocks[:, rows] = NO_BLOCK
        self._arange = np.arange(rows + 1)
        self._unsent_tokens: dict[int, list[int]] = {}
        """Flat index into `tokens` -> the tokens from there on that are not on the device yet."""
        self._unsent_blocks: dict[int, int] = {}
        """Flat index into the block tables -> block that is not on the device yet."""
        self.tokens = torch.zeros(rows + 1, self._stride, dtype=torch.int64, device=device)
        self._block_tables = torch.from_numpy(self._blocks.astype(np.int32)).to(device)
        self._flat_tokens = self.tokens.view(-1)
        self._flat_block_tables = self._block_tables.view(-1)

    def admit(self, admission: AdmittedSequence) -> None:
        """Fill a row for a sequence that joins the batch."""
        row = admission.row
        self._unsent_tokens[row * self._stride] = admission.tokens
        for group, table in enumerate(admission.block_tables):
            first = table.count(NO_BLOCK)
            blocks = table[first:]
            self._unsent_blocks.update(enumerate(blocks, self._flat_index(group, row) + first))
            self._blocks[group, row, first : len(table)] = blocks
        self.prompt_lens[row] = admission.prompt_len

    def append_blocks(self, new_blocks: list[tuple[int, int, int, int]]) -> None:
        """Append blocks to rows, given as (row, group, index, block)."""
        for row, group, index, block in new_blocks:
            self._unsent_blocks[self._flat_index(group, row) + index] = block
            self._blocks[group, row, index] = block

    def _flat_index(self, group: int, row: int) -> int:
        """Return the index of a row's first block in the flattened block tables."""
        return (group * self._blocks.shape[1] + row) * self._blocks_per_row

    def clear(self) -> None:
        """Free all rows, and discard updates that are not on the device yet."""
        self._unsent_tokens, self._unsent_blocks = {}, {}

    def is_uniform_decode(self, plan: StepPlan) -> bool:
        """Return whether `pack_padded_step` supports the plan.

        Each sequence must compute and sample one token. The step may add at most one block per sequence and group in
        total.
        """
        sequences = len(plan.rows)
        return (
            plan.total_tokens == sequences
            and not self._unsent_tokens
            and len(self._unsent_blocks) <= sequences * self._num_groups
            and all(plan.sample_counts)
        )

    def pack_step(
        self, plan: StepPlan, extra_logit_index: NDArray[np.int64] | None = None
    ) -> PackedStep:
        """Pack the inputs of `plan`. Logits are computed where it samples and at `extra_logit_index`."""
        size = len(plan.rows)
        rows = np.fromiter(plan.rows, np.int64, size)
        starts = np.fromiter(plan.starts, np.int64, size)
        if extra_logit_index is None and plan.total_tokens == size and all(plan.sample_counts):
            seq_lens = starts + 1
            return self._pack_single_tokens(
                rows, starts, seq_lens, size, self._max_blocks(seq_lens)
            )
        counts = np.fromiter(plan.counts, np.int64, size)
        sample_counts = np.fromiter(plan.sample_counts, np.int64, size)
        for chunk, drafts in plan.draft_tokens.items():
            end = plan.starts[chunk] + plan.counts[chunk]
            self._unsent_tokens[plan.rows[chunk] * self._stride + end - len(drafts)] = drafts
        ends, seq_lens = counts.cumsum(), starts + counts
        row_of = rows.repeat(counts)
        positions = np.arange(len(row_of)) + (seq_lens - ends).repeat(counts)
        sample_ends = sample_counts.cumsum()
        sample_index = np.arange(sample_ends[-1]) + (ends - sample_ends).repeat(sample_counts)
        sample_rows, sample_positions = row_of[sample_index], positions[sample_index] + 1
        logit_index = (
            sample_index
            if extra_logit_index is None
            else np.union1d(sample_index, extra_logit_index)
        )
        buffer, layout = pack_arrays(
            (
                *self._locate_tokens(row_of, positions),
                rows,
                logit_index,
                sample_rows * self._stride + sample_positions,
                *self._take_unsent(),
            ),
            (np.concatenate(((0,), ends)), seq_lens),
        )
        shape = StepShape(layout, self._max_blocks(seq_lens))
        return PackedStep(
            torch.from_numpy(buffer),
            shape,
            logit_index,
            sample_index,
            sample_rows,
            sample_positions,
        )

    def pack_padded_step(self, plan: StepPlan, size: int) -> PackedStep:
        """Pack the inputs of a uniform decode plan, padded with the padding row to `size` sequences.

        The shape depends only on `size`.
        """
        num_used = len(plan.rows)
        rows, starts = np.full(size, self._padding), np.zeros(size, dtype=np.int64)
        rows[:num_used], starts[:num_used] = plan.rows, plan.starts
        seq_lens = starts + 1
        seq_lens[num_used:] = 0
        return self._pack_single_tokens(
            rows,
            starts,
            seq_lens,
            num_used,
            self._blocks_per_row,
            min_blocks=size * self._num_groups,
        )

    def _pack_single_tokens(
        self,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        seq_lens: NDArray[np.int64],
        num_used: int,
        max_blocks: int,
        min_blocks: int = 0,
    ) -> PackedStep:
        """Pack one token per row, with samples for the first `used` rows.

        The packed block updates are padded to at least `min_blocks`.
        """
        token_index, _, slots = self._locate_tokens(rows, positions)
        order = self._arange[: len(rows)]
        updates = self._take_unsent(min_blocks)
        buffer, layout = pack_arrays(
            (token_index, positions, slots, rows, order, token_index + 1, *updates),
            (self._arange[: len(rows) + 1], seq_lens),
        )
        shape, order = StepShape(layout, max_blocks), order[:num_used]
        return PackedStep(
            torch.from_numpy(buffer), shape, order, order, rows[:num_used], seq_lens[:num_used]
        )

    def _locate_tokens(
        self, row_of: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return each flat token's index into `tokens`, its position, and its slots, those of each group in turn."""
        size = self._block_size
        index = positions // size
        slots = (self._blocks[:, row_of, index] - index) * size + positions
        if self._num_groups > 1:
            slots = np.pad(slots, ((0, 0), (0, _align(len(index)) - len(index))))
        return row_of * self._stride + positions, positions, slots.reshape(-1)

    def _max_blocks(self, seq_lens: NDArray[np.int64]) -> int:
        """Return the number of KV blocks of the longest sequence, padded for alignment."""
        return _align(-(-int(seq_lens.max()) // self._block_size))

    def _take_unsent(self, min_blocks: int = 0) -> tuple[NDArray[np.int64], ...]:
        """Return and clear the updates for the device, as indices and values of tokens and then of blocks."""
        tokens, blocks = self._unsent_tokens, self._unsent_blocks
        self.clear()
        token_index = token_ids = block_index = block_ids = np.empty(0, dtype=np.int64)
        if tokens:
            token_index = np.concatenate(
                [np.arange(start, start + len(ids)) for start, ids in tokens.items()]
            )
            token_ids = np.concatenate([np.array(ids) for ids in tokens.values()])
        num_padding = max(0, min_blocks - len(blocks))
        if blocks or num_padding:
            padding_index = self._flat_index(0, self._padding)
            block_index = np.array([*blocks, *[padding_index] * num_padding])
            block_ids = np.array([*blocks.values(), *[NO_BLOCK] * num_padding])
        return token_index, token_ids, block_index, block_ids

    def gather_batch(
        self, buffer: Tensor, shape: StepShape, token_types: Tensor | None = None
    ) -> tuple[Batch, Tensor]:
        """Update the rows from a packed buffer on the device and gather the batch, with device operations only.

        Returns:
            The batch, and the indices [C] at which `append_tokens` stores the tokens that it samples.
        """
        (
            (
                token_index,
                positions,
                slot_mappings,
                rows,
                logit_index,
                sample_index,
                new_token_index,
                new_tokens,
                new_block_index,
                new_blocks,
            ),
            (query_start_loc, seq_lens),
        ) = unpack_arrays(buffer, shape.layout)
        if len(new_tokens):
            self._flat_tokens.index_copy_(0, new_token_index, new_tokens)
        if len(new_blocks):
            self._flat_block_tables.index_copy_(0, new_block_index, new_blocks.to(torch.int32))
        batch = Batch(
            token_ids=self._flat_tokens.index_select(0, token_index),
            positions=positions,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=self._block_tables[..., : shape.max_blocks].index_select(1, rows),
            slot_mappings=self._split_groups(slot_mappings)[:, : len(positions)],
            rows=rows,
            logit_index=logit_index,
            token_types=token_types,
        )
        return batch, sample_index

    def _split_groups(self, slots: Tensor) -> Tensor:
        """Return the slots of each KV cache group, [G, N]."""
        return slots.view(self._num_groups, len(slots) // max(1, self._num_groups))

    def append_tokens(self, sample_index: Tensor, tokens: Tensor) -> None:
        """Append sampled tokens to their rows, in the order in which the rows were packed, without padding rows.

        A negative token belongs to a failed row, whose next step may be in flight already. It is stored as token 0. In
        a row with drafts, the tokens after the first one that differs from its draft are overwritten later.
        """
        self._flat_tokens.index_copy_(0, sample_index[: len(tokens)], tokens.clamp(min=0))


def _align(count: int) -> int:
    """Return a number of 32-bit or 64-bit integers, not below `count`, that keeps the array after them aligned."""
    return -(-count // TABLE_ALIGNMENT) * TABLE_ALIGNMENT
