"""Output stage of models that generate: masks, sampled tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from argosy.engine.execution.executor.draft_windows import DraftWindows
from argosy.engine.execution.executor.output_stage import (
    LaunchedStep,
    StepHandle,
    find_corrupt_blocks,
)
from argosy.engine.execution.executor.persistent_batch import PersistentBatch
from argosy.engine.execution.executor.sampler import Sampler
from argosy.engine.execution.kernels.device import Device, DeviceEvent
from argosy.engine.execution.kernels.torch.logit_edits import TokenMasks
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
        self._masks = RowMasks(
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            find_grammar=find_grammar or _find_no_grammar,
            threads=device.mask_threads,
        )
        self._mask_job: PendingMasks | None = None
        """Masks of the step between `begin` and `finish`."""
        self._windows: DraftWindows | None = None
        """Windows of that step, if it has drafts."""
        self._prompt_logprob_counts: dict[int, int] = {}
        """Row -> number of likeliest tokens to return for each prompt position."""
        self._spans: dict[int, tuple[int, int, int]] = {}
        """Chunk of that step -> (first flat token, its position, count) of the logits that predict prompt tokens."""
        self.clear()

    def clear(self) -> None:
        self._masks.clear()
        size = (self._max_seqs, self._vocab_size)
        self._sampler = Sampler(*size, self._device.create_logit_sampler(*size))
        self._prompt_logprob_counts.clear()

    def keep_rows(self, rows: set[int]) -> None:
        self._masks.keep_rows(rows)

    def find_forced_tokens(self, row: int) -> list[int]:
        return self._masks.find_forced_tokens(row)

    def admit(self, admission: AdmittedSequence) -> None:
        params = admission.params
        self._sampler.admit(admission, sorted(end_token_ids(params, self._eos_token_ids)))
        self._masks.admit(admission)
        self._prompt_logprob_counts.pop(admission.row, None)
        if params.prompt_logprobs is not None:
            self._prompt_logprob_counts[admission.row] = params.prompt_logprobs

    def begin(self, plan: StepPlan) -> tuple[NDArray[np.int64] | None, None]:
        """Start to fill the masks, and return the flat tokens whose logits predict prompt tokens."""
        self._windows = windows = DraftWindows(plan) if plan.draft_tokens else None
        self._mask_job = self._masks.start(
            [row for row, samples in zip(plan.rows, plan.sample_counts, strict=True) if samples],
            None if windows is None else windows.drafts,
        )
        self._spans = spans = self._prompt_spans(plan) if self._prompt_logprob_counts else {}
        if not spans:
            return None, None
        ranges = [np.arange(first, first + count) for first, _, count in spans.values()]
        return np.concatenate(ranges), None

    def finish(self, step: LaunchedStep) -> StepHandle:
        prompt_logprobs = self._prompt_logprobs(step)
        job, self._mask_job = self._mask_job, None
        windows, self._windows = self._windows, None
        token_masks = None
        masks = None if job is None else job.result()
        if masks is not None:
            words = self._device.to_device(torch.from_numpy(masks.words))
            token_masks = TokenMasks(masks.index, words)
        tokens: Tensor | None = None
        read_logprobs: Callable[[Sequence[int]], dict[int, Logprob]] | None = None
        if len(step.packed.sample_index):
            failed_samples = () if masks is None else masks.failures
            device_tokens, read_logprobs = self._sample(step, token_masks, windows, failed_samples)
            tokens = self._device.to_host(device_tokens)
        done = self._device.record_event()
        if job is not None and tokens is not None:
            if windows is None:
                self._masks.record_sampled(job, partial(_wait_for_tokens, tokens, done))
            else:
                self._masks.record_windows(job, _wait_for_tokens(tokens, done))
        return _PendingStep(
            step=step,
            tokens=tokens,
            read_logprobs=read_logprobs,
            prompt_logprobs=prompt_logprobs,
            done=done,
            masks=masks,
            windows=windows,
            mask_wait_s=0.0 if job is None else job.wait_s,
        )

    def _sample(
        self,
        step: LaunchedStep,
        masks: TokenMasks | None,
        windows: DraftWindows | None,
        failed_samples: Iterable[int],
    ) -> tuple[Tensor, Callable[[Sequence[int]], dict[int, Logprob]]]:
        """Sample tokens for the chunks that need one, and append them to the persistent batch."""
        packed, logits = step.packed, step.outputs
        count = len(packed.sample_index)
        if count != len(packed.logit_index):
            selected = torch.from_numpy(np.searchsorted(packed.logit_index, packed.sample_index))
            logits = logits[self._device.to_device(selected)]
        tokens, read_logprobs = self._sampler(
            logits[:count],
            packed.sample_rows,
            packed.sample_positions,
            masks,
            windows,
            failed_samples,
        )
        self._persistent_batch.append_tokens(step.sample_index, tokens)
        return tokens, read_logprobs

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

    def _prompt_logprobs(self, step: LaunchedStep) -> dict[int, Callable[[], list[Logprob]]]:
        """Launch for each span the log-probabilities of the tokens that follow its positions."""
        logprobs = {}
        for chunk, (flat, start, count) in self._spans.items():
            row = step.plan.rows[chunk]
            first = int(np.searchsorted(step.packed.logit_index, flat))
            next_tokens = self._persistent_batch.tokens[row, start + 1 : start + 1 + count]
            num_top = np.full(count, self._prompt_logprob_counts[row], np.int64)
            logprobs[chunk] = self._sampler.launch_logprobs(
                step.outputs[first : first + count], next_tokens, np.arange(count), num_top
            )
        return logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingStep:
    """Handle of a step whose tokens are being copied to the host."""

    step: LaunchedStep
    tokens: Tensor | None
    """[C] int64, in host memory, complete after `done`. Negative where a sample is not valid."""
    read_logprobs: Callable[[Sequence[int]], dict[int, Logprob]] | None
    """Returns index into `tokens` -> log-probabilities, for the tokens."""
    prompt_logprobs: dict[int, Callable[[], list[Logprob]]]
    done: DeviceEvent
    """Event after sampling and the copy of the tokens."""
    masks: MaskBatch | None
    windows: DraftWindows | None
    mask_wait_s: float

    def result(self) -> StepResult:
        step, masks = self.step, self.masks
        self.done.synchronize()
        sampled: list[int] = [] if self.tokens is None else self.tokens.tolist()
        logprobs = {} if self.read_logprobs is None else self.read_logprobs(sampled)
        prompt_logprobs = {chunk: read() for chunk, read in self.prompt_logprobs.items()}
        if self.windows is not None:
            return self._result_of_windows(self.windows, sampled, logprobs, prompt_logprobs)
        sample_counts = step.plan.sample_counts
        chunks: Sequence[int] = range(len(sample_counts))
        tokens = sampled
        if len(sampled) < len(sample_counts):
            chunks = [chunk for chunk in chunks if sample_counts[chunk]]
            token_by_chunk = dict(zip(chunks, sampled, strict=True))
            tokens = [token_by_chunk.get(chunk, -1) for chunk in range(len(sample_counts))]
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
            logprobs={chunks[i]: [logprob] for i, logprob in logprobs.items()},
            prompt_logprobs=prompt_logprobs,
            failures=failed,
            corrupt_blocks=find_corrupt_blocks(step.restores),
            durations=self._durations(),
            masked_rows=0 if masks is None else len(masks.index),
        )

    def _result_of_windows(
        self,
        windows: DraftWindows,
        sampled: list[int],
        logprobs_by_sample: dict[int, Logprob],
        prompt_logprobs: dict[int, list[Logprob]],
    ) -> StepResult:
        """Return the result of a step with drafts. Only a chunk without drafts can fail."""
        plan, masks = self.step.plan, self.masks
        tokens = [-1] * len(plan.rows)
        accepted: dict[int, list[int]] = {}
        logprobs: dict[int, list[Logprob]] = {}
        failed: dict[int, SequenceFailure] = {}
        for chunk, samples in windows.samples_by_chunk().items():
            valid = [sample for sample in samples if sampled[sample] >= 0]
            if chunk in plan.draft_tokens:
                accepted[chunk] = [sampled[sample] for sample in valid]
            elif valid:
                tokens[chunk] = sampled[valid[0]]
            elif masks is not None and samples[0] in masks.failures:
                failed[chunk] = SequenceFailure(masks.failures[samples[0]], DEAD_END_CODE)
            else:
                failed[chunk] = NON_FINITE_LOGITS
            if valid and valid[0] in logprobs_by_sample:
                logprobs[chunk] = [logprobs_by_sample[sample] for sample in valid]
        return StepResult(
            tokens,
            accepted,
            logprobs,
            prompt_logprobs,
            failed,
            find_corrupt_blocks(self.step.restores),
            self._durations(),
            0 if masks is None else sum(sampled[sample] >= 0 for sample in masks.index.tolist()),
        )

    def _durations(self) -> StepDurations:
        step, masks = self.step, self.masks
        return StepDurations(
            step.launch_s,
            step.computed.seconds_since(step.ready),
            self.done.seconds_since(step.computed),
            0.0 if masks is None else masks.fill_s,
            self.mask_wait_s,
        )


def _wait_for_tokens(tokens: Tensor, done: DeviceEvent) -> list[int]:
    """Wait for the tokens of a step, which are complete after its last event."""
    done.synchronize()
    values: list[int] = tokens.tolist()
    return values


def _find_no_grammar(text: str) -> CompiledGrammar:
    raise KeyError(text)
