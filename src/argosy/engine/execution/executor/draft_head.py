"""Drafts by a head, which continues hidden states that the target computes in its steps.

A head has a KV cache as a draft model has. Its entry for a token is computed from the hidden state at the token and the
token after it. A hidden state that is missing, such as those of a prefix hit that the head has not seen, is left out or
zero, and costs accepted drafts only. For the same reason, the entry of the last token of a shared block may belong to
another continuation of the prefix.
"""

from __future__ import annotations

import collections.abc
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from argosy.engine.execution.decoders.draft_head import DraftHead
from argosy.engine.execution.executor.draft_model import Chunk, DraftModel, Row
from argosy.engine.execution.kernels.batch import Batch
from argosy.engine.execution.kernels.device import Device
from argosy.engine.scheduling import MAX_DRAFT_TOKENS, SchedulerLimits, Sequence, StepPlan

if TYPE_CHECKING:
    from argosy.engine.execution.executor.executor import Executor

MAX_WINDOW = MAX_DRAFT_TOKENS + 1
"""Maximum tokens of a sequence that decodes in a step."""
KEPT_STATES = 4 * MAX_WINDOW
"""Number of latest hidden states that are kept of each row."""


class HiddenStates:
    """Hidden states of the target at the latest tokens of each row, and at all tokens of the latest step's prefills."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate `KEPT_STATES` states of `width` elements for each row."""
        self._zero = num_rows * KEPT_STATES
        """Index of a state of zeros."""
        self._kept = torch.zeros(self._zero + 1, width, dtype=dtype, device=device)
        self._starts = [0] * num_rows
        """Position of the first state that is kept of each row."""
        self.ends = [-1] * num_rows
        """Position after the last state of each row. Negative if it has none."""
        self._prefills: dict[int, tuple[int, Tensor]] = {}
        """Row -> first position and states of its chunk in the latest step, if they are too many to keep."""

    def record_step(self, plan: StepPlan, states: Tensor) -> None:
        """Record the states [T, width] at the tokens of a step."""
        for admission in plan.admissions:
            self.ends[admission.row] = -1
        self._prefills = {}
        sources: list[int] = []
        slots: list[int] = []
        first = 0
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            end = start + count
            kept = count if count <= MAX_WINDOW else 1
            if kept < count:
                self._prefills[row] = (start, states[first : first + count])
            if kept < count or not self._starts[row] <= start <= self.ends[row]:
                self._starts[row] = end - kept
            self._starts[row] = max(self._starts[row], end - KEPT_STATES)
            self.ends[row] = end
            sources += range(first + count - kept, first + count)
            slots += [row * KEPT_STATES + i % KEPT_STATES for i in range(end - kept, end)]
            first += count
        if len(sources) < first:
            states = states.index_select(0, self._to_device(sources))
        self._kept.index_copy_(0, self._to_device(slots), states)

    def has_prefill(self, row: int) -> bool:
        """Return whether the latest step computed more tokens of a row than are kept."""
        return row in self._prefills

    def find_first(self, row: int) -> int:
        """Return the position of the first state of a row."""
        return self._prefills[row][0] if row in self._prefills else self._starts[row]

    def read(self, spans: list[tuple[int, int, int]]) -> Tensor:
        """Return the states [T, width] at positions `start .. end` of each (row, start, end). Missing ones are zero."""
        parts: list[Tensor] = []
        slots: list[int] = []
        for row, start, end in spans:
            position, prefill = self._prefills.get(row, (end, None))
            kept_end = min(end, position)
            first, last = self._starts[row], self.ends[row]
            slots += [
                row * KEPT_STATES + i % KEPT_STATES if first <= i < last else self._zero
                for i in range(start, kept_end)
            ]
            if prefill is not None and end > position:
                parts += [
                    self._read_kept(slots),
                    prefill[max(0, start - position) : end - position],
                ]
                slots = []
        parts.append(self._read_kept(slots))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read_kept(self, slots: list[int]) -> Tensor:
        return self._kept.index_select(0, self._to_device(slots))

    def _to_device(self, indices: list[int]) -> Tensor:
        return torch.tensor(indices, dtype=torch.int64, device=self._kept.device)


class HeadDrafter(DraftModel):
    """Proposes drafts of a head, as `DraftModel` does those of a model."""

    lookahead = 1

    def __init__(
        self,
        head: DraftHead,
        device: Device,
        limits: SchedulerLimits,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate the KV cache, and memory for hidden states of `dtype`."""
        architecture = head.architecture
        super().__init__(head, device, limits, kv_dtype, num_drafted=architecture.draft_vocab_size)
        self.name = architecture.method
        self._head = head
        self.hidden_states = HiddenStates(
            limits.max_seqs, architecture.hidden_states_width, dtype, device.torch_device
        )
        self._executor: Executor | None = None
        """Executor of the target."""
        self._states: Tensor
        """[samples, hidden], states from which the head continues after the samples of the latest pass."""

    def attach(self, executor: Executor) -> None:
        """Let the target of an executor keep its hidden states, and record them after each step until `close`."""
        self._executor = executor
        executor.on_computed = self.watch_target()

    def close(self) -> None:
        if self._executor is not None:
            self._head.unwatch_target()
            self._executor.on_computed = None
            self._executor = None

    def watch_target(self) -> Callable[[StepPlan], None]:
        """Let the target keep its hidden states, and return what records them after each step."""
        target = self._head.watch_target()

        def record(plan: StepPlan) -> None:
            states, target.hidden_states = target.hidden_states, []
            self.hidden_states.record_step(plan, torch.cat(states, 1))

        return record

    @torch.inference_mode()
    def catch_up(self, running: collections.abc.Collection[Sequence]) -> None:
        hidden = self.hidden_states
        copies: list[tuple[int, int]] = []
        chunks: list[Chunk] = []
        for seq in running:
            is_decode = seq.is_prefilled and not hidden.has_prefill(seq.row)
            if is_decode or not seq.can_draft:
                continue
            row = self._rows.get(seq.id)
            is_current = row is not None and row.preemptions == seq.preemptions
            length = row.length if row is not None and is_current else hidden.find_first(seq.row)
            end = min(hidden.ends[seq.row], len(seq.tokens) - self.lookahead)
            end -= seq.is_prefilled  # from the last token on, drafts are sampled
            if end > length:
                row = self._update_row(seq, end, copies)
                chunks.append(self._extend_row(seq, row, end))
        if copies:
            self._attention.copy_blocks(copies)
        if chunks:
            self._sample(chunks)

    def _update_row(self, seq: Sequence, end: int, copies: list[tuple[int, int]]) -> Row:
        row = self._rows.get(seq.id)
        if row is not None and row.length < self.hidden_states.find_first(seq.row):
            del self._rows[seq.id]  # states are missing, and the row starts again after them
        return super()._update_row(seq, end, copies)

    def _find_known(self, seq: Sequence, num_full: int) -> tuple[int, int]:
        """Leave out all blocks before the first hidden state, unless they are computed up to it."""
        end = min(num_full, self.hidden_states.find_first(seq.row) // self._block_size)
        if end == 0:
            return 0, 0
        first_block, _ = self._stored_key(seq, end - 1)
        is_known = 0 <= first_block < end and all(
            self._find_key(seq, first_block, index) == self._stored_key(seq, index)
            for index in range(first_block, end)
        )
        return (first_block if is_known else end), end

    def _accept_drafts(self, row: Row, tokens: list[int]) -> None:
        """Compute accepted drafts again, from hidden states of the target instead of the head's own."""
        del tokens
        row.drafts.clear()

    def _compute(self, batch: Batch, chunks: list[Chunk]) -> Tensor:
        if chunks[0].source < 0:
            spans = [
                (chunk.row.index, chunk.start, chunk.start + len(chunk.tokens)) for chunk in chunks
            ]
            states = self._head.prepare_hidden_states(self.hidden_states.read(spans))
        else:
            sources = torch.tensor([chunk.source for chunk in chunks])
            states = self._states[sources.to(self._states.device)]
        self._states = self._head.forward(replace(batch, hidden_states=states), self._attention)
        return self._head.compute_logits(self._states)

    def _to_target_token(self, token: int) -> int:
        tokens = self._head.target_tokens
        return token if tokens is None or token < 0 else tokens[token]
