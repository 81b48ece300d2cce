"""Runs plans: moves blocks, builds the batch, calls the model, samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from argosy.engine.execution.host_store import HostStore
from argosy.engine.execution.sampler import Sampler
from argosy.engine.execution.tables import SequenceTable
from argosy.engine.scheduling import Logprob, Plan, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from argosy.engine.config import EngineLimits
    from argosy.engine.execution.batch import Attention, Batch


class Executor(Protocol):
    """Does what a plan says. The twin's prices it instead."""

    def execute(self, plan: Plan) -> StepResult:
        """One step; an exception means that nothing of it counts."""
        ...

    def reset(self) -> None:
        """Forget all rows: every running sequence will be admitted again."""
        ...


class TorchExecutor:
    """The executor that computes. `model(batch, attention)` gives logits [L, V]."""

    def __init__(
        self,
        model: Callable[[Batch, Attention], Tensor],
        attention: Attention,
        *,
        limits: EngineLimits,
        vocab_size: int,
        eos_token_ids: list[int],
        device: torch.device,
    ) -> None:
        self._model = model
        self._attention = attention
        self._limits = limits
        self._vocab = vocab_size
        self._eos = eos_token_ids
        self._device = device
        self.host = HostStore()
        self._prompt_tops: dict[int, int] = {}
        """Row -> how many of the likeliest tokens to tell for each prompt position."""
        self.reset()

    def reset(self) -> None:
        """Fresh tables; KV blocks stay as they are."""
        limits = self._limits
        self._table = SequenceTable(
            limits.max_seqs, limits.max_model_len, limits.block_size, self._device
        )
        self._sampler = Sampler(limits.max_seqs, self._vocab, self._device)
        self._prompt_tops.clear()

    @torch.inference_mode()
    def execute(self, plan: Plan) -> StepResult:
        """Apply the plan and compute it."""
        corrupt = self._move_blocks(plan)
        for admission in plan.admitted:
            self._table.admit(admission)
            params = admission.params
            ends = [*params.stop_token_ids, *([] if params.ignore_eos else self._eos)]
            self._sampler.admit(admission, ends)
            self._prompt_tops.pop(admission.row, None)
            if params.prompt_logprobs is not None:
                self._prompt_tops[admission.row] = params.prompt_logprobs
        self._table.place(plan.placed)
        if not plan.rows:
            return StepResult([], corrupt=corrupt)
        spans = self._prompt_spans(plan)
        wanted = None
        if spans:
            ranges = [torch.arange(first, first + count) for first, _, count in spans.values()]
            wanted = torch.cat(ranges).to(self._device)
        batch = self._table.batch(plan, wanted)
        logits = self._model(batch, self._attention)
        prompt_logprobs = self._prompt_logprobs(plan, batch, logits, spans)
        tokens, logprobs, failed = self._sample(plan, batch, logits)
        return StepResult(tokens, logprobs, prompt_logprobs, failed, corrupt)

    def _move_blocks(self, plan: Plan) -> list[int]:
        """Offloads, copies, restores; returns the blocks that could not be restored intact."""
        for block, slot in plan.offloads:
            self.host.save(slot, self._attention.read_block(block))
        if plan.copies:
            self._attention.copy_blocks(plan.copies)
        corrupt = []
        for slot, block in plan.restores:
            data = self.host.load(slot)
            if data is None:
                corrupt.append(block)
            else:
                self._attention.write_block(block, data)
        return corrupt

    def _sample(
        self, plan: Plan, batch: Batch, logits: Tensor
    ) -> tuple[list[int], dict[int, Logprob], dict[int, str]]:
        chunks = [chunk for chunk, samples in enumerate(plan.samples) if samples]
        tokens = [-1] * len(plan.rows)
        if not chunks:
            return tokens, {}, {}
        picked = torch.tensor(chunks, device=self._device)
        rows, positions = batch.rows[picked], batch.seq_lens[picked].to(torch.int64)
        if len(logits) != len(chunks):
            logits = logits[torch.searchsorted(batch.logit_index, batch.cu_q[picked + 1] - 1)]
        sampled = self._sampler(logits, rows, positions)
        self._table.append(rows, positions, sampled.tokens)
        for chunk, token in zip(chunks, sampled.tokens.tolist(), strict=True):
            tokens[chunk] = token
        failed = {chunks[i]: "the model gave numbers that are not finite" for i in sampled.invalid}
        return tokens, {chunks[i]: lp for i, lp in sampled.logprobs.items()}, failed

    def _prompt_spans(self, plan: Plan) -> dict[int, tuple[int, int, int]]:
        """Chunk -> (first flat token, its position, how many): logits that predict prompt tokens."""
        if not self._prompt_tops:
            return {}
        spans, flat = {}, 0
        for chunk, (row, start, count) in enumerate(
            zip(plan.rows, plan.starts, plan.counts, strict=True)
        ):
            last = min(start + count, int(self._table.prompt_lens[row]) - 1)
            if row in self._prompt_tops and last > start:
                spans[chunk] = (flat, start, last - start)
            flat += count
        return spans

    def _prompt_logprobs(
        self, plan: Plan, batch: Batch, logits: Tensor, spans: dict[int, tuple[int, int, int]]
    ) -> dict[int, list[Logprob]]:
        """For each span, the log-probabilities of the tokens that follow its positions."""
        found: dict[int, list[Logprob]] = {}
        for chunk, (flat, start, count) in spans.items():
            row = plan.rows[chunk]
            first = int(torch.searchsorted(batch.logit_index, flat))
            following = self._table.tokens[row, start + 1 : start + 1 + count]
            found[chunk] = self._sampler.describe(
                logits[first : first + count], following, self._prompt_tops[row]
            )
        return found
