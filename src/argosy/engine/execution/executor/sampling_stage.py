"""Output stage of models that generate: masks, sampled tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from argosy.engine.execution.executor.logit_edits import TokenMasks
from argosy.engine.execution.executor.output_stage import LaunchedStep, StepHandle
from argosy.engine.execution.executor.persistent_batch import PersistentBatch
from argosy.engine.execution.executor.sampler import Sampler, create_sampling_ops
from argosy.engine.execution.kernels.device import Device, DeviceEvent
from argosy.engine.grammar import (
    DEAD_END_CODE,
    CompiledGrammar,
    MaskBatch,
    PendingMasks,
    RowMasks,
    end_token_ids,
)
from argosy.engine.scheduling import (
    AdmittedSequence,
    Logprob,
    SequenceFailure,
    StepDurations,
    StepPlan,
    StepResult,
)

NON_FINITE_LOGITS = SequenceFailure("the model produced logits that are not finite")


class SamplingStage:
    """Sampler of one executor, with the grammars of its rows. The tokens of a step are copied to the host later."""

    def __init__(
        self,
        persistent_batch: PersistentBatch,
        device: Device,
        *,
        max_seqs: int,
        vocab_size: int,
        eos_token_ids: list[int],
        find_grammar: Callable[[str], CompiledGrammar] | None = None,
    ) -> None:
        """Create the stage. `find_grammar` returns the compiled grammar of an admitted sequence that has one."""
        self._persistent_batch = persistent_batch
        self._device = device
        self._max_seqs = max_seqs
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._sampling_ops = create_sampling_ops(device.torch_device)
        self._masks = RowMasks(
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            find_grammar=find_grammar or _find_no_grammar,
            threads=device.mask_threads,
        )
        self._mask_job: PendingMasks | None = None
        """Masks of the step between `begin` and `finish`."""
        self._prompt_logprob_counts: dict[int, int] = {}
        """Row -> number of likeliest tokens to return for each prompt position."""
        self._spans: dict[int, tuple[int, int, int]] = {}
        """Chunk of that step -> (first flat token, its position, count) of the logits that predict prompt tokens."""
        self.clear()

    def clear(self) -> None:
        self._masks.clear()
        self._sampler = Sampler(
            self._max_seqs, self._vocab_size, self._device.torch_device, self._sampling_ops
        )
        self._prompt_logprob_counts.clear()

    def keep_rows(self, rows: set[int]) -> None:
        self._masks.keep_rows(rows)

    def admit(self, admission: AdmittedSequence) -> None:
        params = admission.params
        self._sampler.admit(admission, sorted(end_token_ids(params, self._eos_token_ids)))
        self._masks.admit(admission)
        self._prompt_logprob_counts.pop(admission.row, None)
        if params.prompt_logprobs is not None:
            self._prompt_logprob_counts[admission.row] = params.prompt_logprobs

    def begin(self, plan: StepPlan) -> tuple[NDArray[np.int64] | None, None]:
        """Start to fill the masks, and return the flat tokens whose logits predict prompt tokens."""
        self._mask_job = self._masks.start(
            [row for row, samples in zip(plan.rows, plan.sample_flags, strict=True) if samples]
        )
        self._spans = spans = self._prompt_spans(plan) if self._prompt_logprob_counts else {}
        if not spans:
            return None, None
        ranges = [np.arange(first, first + count) for first, _, count in spans.values()]
        return np.concatenate(ranges), None

    def finish(self, step: LaunchedStep) -> StepHandle:
        prompt_logprobs = self._prompt_logprobs(step)
        job, self._mask_job = self._mask_job, None
        token_masks = None
        masks = None if job is None else job.result()
        if masks is not None:
            words = self._device.to_device(torch.from_numpy(masks.words))
            token_masks = TokenMasks(masks.index, words)
        tokens: Tensor | None = None
        logprobs: dict[int, Logprob] = {}
        if len(step.packed.sample_index):
            device_tokens, logprobs = self._sample(step, token_masks)
            tokens = self._device.to_host(device_tokens)
        done = self._device.record_event()
        if job is not None and tokens is not None:
            self._masks.record_sampled(job, partial(_wait_for_tokens, tokens, done))
        return _PendingStep(
            step=step,
            tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            done=done,
            masks=masks,
            mask_wait_s=0.0 if job is None else job.wait_s,
        )

    def _sample(
        self, step: LaunchedStep, masks: TokenMasks | None
    ) -> tuple[Tensor, dict[int, Logprob]]:
        """Sample tokens for the chunks that need one, and append them to the persistent batch."""
        packed, logits = step.packed, step.outputs
        count = len(packed.sample_index)
        if count != len(packed.logit_index):
            selected = torch.from_numpy(np.searchsorted(packed.logit_index, packed.sample_index))
            logits = logits[self._device.to_device(selected)]
        tokens, logprobs = self._sampler(
            logits[:count], packed.sample_rows, packed.sample_positions, masks
        )
        self._persistent_batch.append_tokens(step.sample_index, tokens)
        return tokens, logprobs

    def _prompt_spans(self, plan: StepPlan) -> dict[int, tuple[int, int, int]]:
        spans, flat = {}, 0
        for chunk, (row, start, count) in enumerate(
            zip(plan.rows, plan.starts, plan.counts, strict=True)
        ):
            last = min(start + count, int(self._persistent_batch.prompt_lens[row]) - 1)
            if row in self._prompt_logprob_counts and last > start:
                spans[chunk] = (flat, start, last - start)
            flat += count
        return spans

    def _prompt_logprobs(self, step: LaunchedStep) -> dict[int, list[Logprob]]:
        """Compute for each span the log-probabilities of the tokens that follow its positions."""
        logprobs: dict[int, list[Logprob]] = {}
        for chunk, (flat, start, count) in self._spans.items():
            row = step.plan.rows[chunk]
            first = int(np.searchsorted(step.packed.logit_index, flat))
            next_tokens = self._persistent_batch.tokens[row, start + 1 : start + 1 + count]
            logit_rows = np.arange(first, first + count)
            num_top = np.full(count, self._prompt_logprob_counts[row], np.int64)
            logprobs[chunk] = self._sampler.compute_logprobs(
                step.outputs, logit_rows, next_tokens, num_top
            )
        return logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingStep:
    """Handle of a step whose tokens are being copied to the host."""

    step: LaunchedStep
    tokens: Tensor | None
    """[C] int64, in host memory, complete after `done`. Negative where logits were not finite."""
    logprobs: dict[int, Logprob]
    """Index into `tokens` -> log-probabilities."""
    prompt_logprobs: dict[int, list[Logprob]]
    done: DeviceEvent
    """Event after sampling and the copy of the tokens."""
    masks: MaskBatch | None
    mask_wait_s: float

    def result(self) -> StepResult:
        step, masks = self.step, self.masks
        self.done.synchronize()
        sampled = [] if self.tokens is None else self.tokens.tolist()
        sample_flags = step.plan.sample_flags
        chunks: Sequence[int] = range(len(sample_flags))
        tokens = sampled
        if len(sampled) < len(sample_flags):
            chunks = [chunk for chunk in chunks if sample_flags[chunk]]
            token_by_chunk = dict(zip(chunks, sampled, strict=True))
            tokens = [token_by_chunk.get(chunk, -1) for chunk in range(len(sample_flags))]
        failed = {}
        if sampled and min(sampled) < 0:
            failed = {
                chunk: NON_FINITE_LOGITS
                for chunk, token in zip(chunks, sampled, strict=True)
                if token < 0
            }
        if masks is not None:
            for index, reason in masks.failures.items():
                failed[chunks[index]] = SequenceFailure(reason, DEAD_END_CODE)
        return StepResult(
            tokens,
            {chunks[i]: logprob for i, logprob in self.logprobs.items()},
            self.prompt_logprobs,
            failed,
            step.corrupt_blocks,
            StepDurations(
                step.launch_s,
                step.computed.seconds_since(step.ready),
                self.done.seconds_since(step.computed),
                0.0 if masks is None else masks.fill_s,
                self.mask_wait_s,
            ),
            0 if masks is None else len(masks.index),
        )


def _wait_for_tokens(tokens: Tensor, done: DeviceEvent) -> list[int]:
    """Wait for the tokens of a step, which are complete after its last event."""
    done.synchronize()
    values: list[int] = tokens.tolist()
    return values


def _find_no_grammar(text: str) -> CompiledGrammar:
    raise KeyError(text)
