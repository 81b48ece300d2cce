"""Draft model, a small model that guesses the next tokens of sequences, with a KV cache of its own.

Each block of the target's KV cache has one in that of the draft model, with the same number. A full block is marked
with the key of its tokens. By the key, a sequence finds what the draft model has computed for others with its prefix.
The target neither keeps nor computes a block for the draft model. What is missing is computed in bounded chunks, before
the draft model proposes anything.

The tokens after the last full block, and the drafts themselves, are in blocks of the row. They are copied to the
sequence's block when it is full, so that no block which sequences share has a token that may not be accepted.
"""

from __future__ import annotations

import collections.abc
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from argosy.engine.execution.executor.sampler import Sampler
from argosy.engine.execution.kernels.batch import Batch
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.layers.model import Model
from argosy.engine.scheduling import (
    MAX_DRAFT_TOKENS,
    AdmittedSequence,
    SchedulerLimits,
    Sequence,
)
from argosy.protocol import SamplingParams

MAX_CATCH_UP_TOKENS = 128
"""Maximum tokens that one call computes for sequences of which more than a window is missing."""
WARMUP_PASSES = 4
"""Passes that are measured, of which the fastest counts. The first may read weights or compile."""
_NO_KEY = (-1, b"")


@dataclass(slots=True)
class Row:
    """Progress of the draft model in one running sequence."""

    index: int
    """Row of the sequence in the persistent batch."""
    preemptions: int
    """Number of preemptions of the sequence, after each of which it has other blocks."""
    num_blocks: int = 0
    """Number of leading blocks that are those of the sequence. Those after them are of the row."""
    first_block: int = 0
    """Number of leading blocks that are left out, as if the sequence began after them."""
    length: int = 0
    """Number of leading tokens up to which the others have keys and values."""
    drafts: list[int] = field(default_factory=list)
    """Drafts after them that have, too."""


class Chunk(NamedTuple):
    """Tokens of one sequence in a forward pass."""

    number: int
    """Index of its sequence in the call."""
    row: Row
    start: int
    tokens: list[int]
    limit: int
    """Number of drafts that are sampled from its last token on. 0 if it does not reach the sequence's end."""
    source: int = -1
    """Index of the sample that is its token, in the pass before. -1 for tokens of the sequence."""


class DraftModel:
    """Proposes drafts that are sampled as the target samples, with the seeds and positions of its tokens.

    Equal random numbers make equal tokens likely where the two distributions are similar. Penalties, biases and
    grammars are not applied. Not thread-safe.
    """

    name = "draft_model"
    """Label of its drafts in metrics."""
    lookahead = 0
    """Number of tokens of a sequence before the one that the first keys and values belong to."""

    def __init__(
        self,
        model: Model,
        device: Device,
        limits: SchedulerLimits,
        kv_dtype: torch.dtype | None = None,
        *,
        num_drafted: int | None = None,
    ) -> None:
        """Allocate the KV cache. `limits` are those of the target, whose first KV cache group has no window.

        The model samples `num_drafted` different tokens, by default all that it knows.
        """
        architecture = model.architecture
        self._model = model
        self._device = device.torch_device
        self._max_len = architecture.max_model_len
        self._vocab_size = architecture.vocab_size
        """Number of tokens that it knows. The target may have more."""
        self._block_size = block_size = limits.block_size
        self._row_blocks = count_row_blocks(block_size)
        self._first_block = limits.max_seqs * self._row_blocks
        """Block with number 0 of the target, after those of the rows."""
        self._num_blocks = self._first_block + limits.num_blocks
        groups = len(architecture.kv_layout.windows)
        self._group_offsets = self._num_blocks * np.arange(groups)[:, None]
        """[G, 1], number of blocks before those of each KV cache group."""
        self._attention = model.create_attention(groups * self._num_blocks, block_size, kv_dtype)
        max_blocks = -(-limits.max_model_len // block_size) + self._row_blocks
        self._tables = np.zeros((limits.max_seqs, -(-max_blocks // 4) * 4), np.int64)
        """[R, P], blocks of each row in order."""
        self._keys = [_NO_KEY] * limits.num_blocks
        """Key of each block of the target that is full here, too: `Row.first_block`, and the key of its tokens."""
        self._rows: dict[str, Row] = {}
        """Request id -> its row."""
        size = (limits.max_seqs, num_drafted or self._vocab_size)
        self._sampler = Sampler(*size, device.create_logit_sampler(*size))
        self.pass_s = 0.0
        """Seconds of a forward pass of one token, as the warm-up measured it."""
        self.num_passes = 0
        """Forward passes of the last proposal. 0 if it computed tokens that were missing."""

    def close(self) -> None:
        """Let the target do no more for drafts, because none will be asked for."""

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run the forward pass of one token. Its results are meaningless."""
        seconds = []
        for _ in range(WARMUP_PASSES):
            started_at = time.perf_counter()
            self._sample([Chunk(0, Row(0, 0), 0, [0], 1)])
            seconds.append(time.perf_counter() - started_at)
        self.pass_s = min(seconds)

    @torch.inference_mode()
    def propose(
        self, sequences: collections.abc.Sequence[Sequence], limits: collections.abc.Sequence[int]
    ) -> list[list[int]]:
        """Return up to `limits[i]` drafts that follow the i-th sequence, and none while much of it is missing.

        `limits` are 1 to `MAX_DRAFT_TOKENS`.
        """
        drafts: list[list[int]] = [[] for _ in sequences]
        copies: list[tuple[int, int]] = []
        chunks: list[Chunk] = []
        budget = MAX_CATCH_UP_TOKENS
        for number, (seq, limit) in enumerate(zip(sequences, limits, strict=True)):
            if len(seq.tokens) + limit > self._max_len:
                continue
            end = len(seq.tokens) - self.lookahead
            row = self._update_row(seq, end, copies)
            start = row.length
            if end - start > MAX_DRAFT_TOKENS + 1:
                end = min(end, start + budget)
                budget -= end - start
            if end > start:
                num_drafts = limit if end == len(seq.tokens) - self.lookahead else 0
                chunks.append(self._extend_row(seq, row, end, number, num_drafts))
        if copies:
            self._attention.copy_blocks(copies)
        self.num_passes = 0
        while chunks:
            self.num_passes += budget == MAX_CATCH_UP_TOKENS
            chunks = self._append_drafts(chunks, self._sample(chunks), drafts)
        return drafts

    def catch_up(self, running: collections.abc.Collection[Sequence]) -> None:
        """Compute what must be computed before the next step, of sequences that may not get drafts yet."""

    def _extend_row(
        self, seq: Sequence, row: Row, end: int, number: int = 0, limit: int = 0
    ) -> Chunk:
        """Return the chunk that computes what a row lacks up to `end`."""
        start = row.length
        self._mark_blocks(seq, row, start, end)
        row.length = end
        tokens = seq.tokens[start + self.lookahead : end + self.lookahead]
        return Chunk(number, row, start, tokens, limit)

    def release(self, request_id: str) -> None:
        """Forget a request that has ended, if it is known. Its full blocks stay."""
        self._rows.pop(request_id, None)

    def _append_drafts(
        self, chunks: list[Chunk], sampled: list[int], drafts: list[list[int]]
    ) -> list[Chunk]:
        """Append the sampled token of each chunk to its drafts, and return the chunks that continue from it."""
        following = []
        continued = (chunk for chunk in chunks if chunk.limit)
        for source, (chunk, token) in enumerate(zip(continued, sampled, strict=True)):
            if token < 0:  # the logits are not finite
                continue
            drafts[chunk.number].append(token)
            if chunk.limit > 1:
                chunk.row.drafts.append(token)
                end = chunk.start + len(chunk.tokens)
                following.append(
                    Chunk(chunk.number, chunk.row, end, [token], chunk.limit - 1, source)
                )
        return following

    def _update_row(self, seq: Sequence, end: int, copies: list[tuple[int, int]]) -> Row:
        """Return the row of a sequence, whose drafts are now those that were accepted, and whose blocks are its own.

        The blocks are those before `end`, up to which at least one token is left to compute. Adds the blocks that must
        be copied to `copies`.
        """
        size = self._block_size
        num_full = (end - 1) // size
        table = seq.block_tables[0]
        row = self._rows.get(seq.id)
        if row is None or row.preemptions != seq.preemptions:
            row = self._rows[seq.id] = self._admit(seq)
            row.first_block, num_known = self._find_known(seq, num_full)
            row.length = num_known * size
            self._set_blocks(row, table, 0, num_full)
            return row
        self._accept_drafts(row, seq.tokens)
        row.length = min(row.length, end - 1)
        first = row.num_blocks
        if num_full > first:
            num_moved = min(num_full, -(-row.length // size)) - first
            sources = self._tables[row.index, first : first + max(0, num_moved)].tolist()
            self._set_blocks(row, table, first, num_full)
            copies.extend(
                (offset + source, offset + self._first_block + block)
                for source, block in zip(sources, table[first:], strict=False)
                for offset in self._group_offsets[:, 0].tolist()
            )
            self._mark_blocks(seq, row, first * size, row.length)
        return row

    def _find_known(self, seq: Sequence, num_full: int) -> tuple[int, int]:
        """Return `Row.first_block` of a sequence, and up to which of its first `num_full` blocks all are computed."""
        num_known = 0
        while num_known < num_full and self._find_key(seq, 0, num_known) == self._stored_key(
            seq, num_known
        ):
            num_known += 1
        return 0, num_known

    def _find_key(self, seq: Sequence, first_block: int, index: int) -> tuple[int, bytes]:
        """Return the key of block `index` of a sequence of which `first_block` blocks are left out."""
        return first_block, seq.block_hash(index, self._block_size)

    def _stored_key(self, seq: Sequence, index: int) -> tuple[int, bytes]:
        """Return the key of what block `index` of a sequence has."""
        return self._keys[seq.block_tables[0][index]]

    def _accept_drafts(self, row: Row, tokens: list[int]) -> None:
        """Count those of the row's drafts as computed that are tokens of its sequence now."""
        for token in row.drafts:
            if row.length >= len(tokens) or tokens[row.length] != token:
                break
            row.length += 1
        row.drafts.clear()

    def _admit(self, seq: Sequence) -> Row:
        params = seq.params
        self._sampler.admit(
            AdmittedSequence(
                seq.row,
                [],
                seq.prompt_len,
                SamplingParams(
                    temperature=params.temperature,
                    top_k=params.top_k,
                    top_p=params.top_p,
                    min_p=params.min_p,
                    seed=params.seed,
                ),
                [],
            ),
            [],
        )
        return Row(seq.row, seq.preemptions)

    def _set_blocks(self, row: Row, table: list[int], first: int, end: int) -> None:
        """Set blocks `first .. end` of a row to those of its sequence, and the next ones to its own."""
        blocks = np.array(table[first:end], np.int64) + self._first_block
        self._tables[row.index, first:end] = blocks
        own = end + np.arange(self._row_blocks)
        self._tables[row.index, own] = row.index * self._row_blocks + own % self._row_blocks
        row.num_blocks = end
        if end > first:
            self._attention.ensure_block(int(blocks.max()))

    def _mark_blocks(self, seq: Sequence, row: Row, start: int, end: int) -> None:
        """Mark the blocks of the sequence that get tokens `start .. end`, with no key if they are not full then."""
        size = self._block_size
        for index in range(
            max(row.first_block, start // size), min(row.num_blocks, -(-end // size))
        ):
            is_full = end >= (index + 1) * size
            key = self._find_key(seq, row.first_block, index) if is_full else _NO_KEY
            self._keys[seq.block_tables[0][index]] = key

    def _sample(self, chunks: list[Chunk]) -> list[int]:
        """Compute chunks, and return a token after each chunk with a limit."""
        rows = np.array([chunk.row.index for chunk in chunks])
        ends = np.array([chunk.start + len(chunk.tokens) for chunk in chunks])
        is_sampled = np.array([chunk.limit > 0 for chunk in chunks])
        logits = self._compute(self._build_batch(chunks, rows, ends, is_sampled), chunks)
        if not is_sampled.any():
            return []
        positions = ends[is_sampled] + self.lookahead
        tokens, _ = self._sampler(logits, rows[is_sampled], positions)
        return [self._to_target_token(token) for token in tokens.tolist()]

    def _to_target_token(self, token: int) -> int:
        """Return the target's token for a sampled one. Negative ones stay."""
        return token

    def _compute(self, batch: Batch, chunks: list[Chunk]) -> Tensor:
        """Return the logits of a batch of chunks."""
        del chunks
        return self._model.forward(batch, self._attention)

    def _build_batch(
        self,
        chunks: list[Chunk],
        rows: NDArray[np.int64],
        chunk_ends: NDArray[np.int64],
        is_sampled: NDArray[np.bool_],
    ) -> Batch:
        counts = np.array([len(chunk.tokens) for chunk in chunks])
        ends = counts.cumsum()
        positions = np.arange(ends[-1]) + (chunk_ends - ends).repeat(counts)
        ids = np.array([token for chunk in chunks for token in chunk.tokens])
        size = self._block_size
        index = positions // size
        slots = self._tables[rows.repeat(counts), index] * size + positions - index * size
        first_blocks = np.array([chunk.row.first_block for chunk in chunks])
        seq_lens = chunk_ends - first_blocks * size
        positions -= (first_blocks * size).repeat(counts)
        columns = first_blocks[:, None] + np.arange(-(-int(seq_lens.max()) // (4 * size)) * 4)
        tables = self._tables[rows[:, None], columns.clip(max=self._tables.shape[1] - 1)]
        return Batch(
            token_ids=self._to_device(ids.clip(0, self._vocab_size - 1)),
            positions=self._to_device(positions),
            query_start_loc=self._to_device(np.concatenate(((0,), ends)).astype(np.int32)),
            seq_lens=self._to_device(seq_lens.astype(np.int32)),
            block_tables=self._to_device(
                (tables + self._group_offsets[:, :, None]).astype(np.int32)
            ),
            slot_mappings=self._to_device(slots + self._group_offsets * size),
            rows=self._to_device(rows),
            logit_index=self._to_device(ends[is_sampled] - 1),
        )

    def _to_device(self, values: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def count_row_blocks(block_size: int) -> int:
    """Return the number of blocks that each row has beside those of its sequence."""
    return 1 + -(-(MAX_DRAFT_TOKENS - 1) // block_size)
