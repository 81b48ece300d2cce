"""Executor of step plans, which moves KV blocks, launches the model and the sampler, and returns results later."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from argosy.engine.execution.executor.decode_graphs import DecodeGraphs
from argosy.engine.execution.executor.host_block_store import HostBlockStore
from argosy.engine.execution.executor.persistent_batch import DeviceInputs, PersistentBatch
from argosy.engine.execution.executor.sampler import Sampler, SamplerOutput, create_sampling_ops
from argosy.engine.execution.executor.token_masks import TokenMasks
from argosy.engine.grammar import DEAD_END_CODE, RowMasks, end_token_ids
from argosy.engine.scheduling import (
    Logprob,
    SequenceFailure,
    StepDurations,
    StepPlan,
    StepResult,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from argosy.engine.engine_config import EngineLimits
    from argosy.engine.execution.executor.persistent_batch import PackedStep
    from argosy.engine.execution.kernels.batch import Attention, Batch
    from argosy.engine.execution.kernels.device import Device, DeviceEvent, GraphCapturer
    from argosy.engine.execution.kernels.recurrent_states import RecurrentStates
    from argosy.engine.grammar import CompiledGrammar, MaskBatch

NON_FINITE_LOGITS = SequenceFailure("the model produced logits that are not finite")
PromptSpans = dict[int, tuple[int, int, int]]
"""Chunk -> (first flat token, its position, count) of the logits that predict prompt tokens."""


class StepHandle(Protocol):
    """Handle of a launched step."""

    def result(self) -> StepResult:
        """Wait for the step and return its result. May be called once.

        If it raises, all results of the step are invalid.
        """
        ...


class Executor(Protocol):
    """Executor of step plans, in the order of submission."""

    def submit(self, plan: StepPlan) -> StepHandle:
        """Launch a step, which may happen before the previous one is done.

        If it raises, all results of the step are invalid.
        """
        ...

    def reset(self) -> None:
        """Discard all rows and steps. The scheduler admits every running sequence again."""
        ...

    @property
    def pending_preparations(self) -> int:
        """Number of `prepare_next` calls that still have work to do."""
        ...

    def prepare_next(self) -> None:
        """Do one optional piece of work that makes later steps faster. Called between two steps."""
        ...


class TorchExecutor:
    """Executor that computes with torch.

    `model(batch, attention)` returns logits [L, V]. `graph_capturer` captures decode steps. Without it, all steps run
    eagerly. `find_grammar` returns the compiled grammar of an admitted sequence. Without it, no sequence may have one.
    `states` are those of a model with recurrent layers.
    """

    def __init__(
        self,
        model: Callable[[Batch, Attention], Tensor],
        attention: Attention,
        *,
        limits: EngineLimits,
        vocab_size: int,
        eos_token_ids: list[int],
        device: Device,
        graph_capturer: GraphCapturer | None = None,
        find_grammar: Callable[[str], CompiledGrammar] | None = None,
        states: RecurrentStates | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._states = states
        self._limits = limits
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._sampling_ops = create_sampling_ops(device.torch_device)
        self.host_store = HostBlockStore()
        self._masks = RowMasks(
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            find_grammar=find_grammar or _find_no_grammar,
            threads=device.mask_threads,
        )
        self._prompt_logprob_counts: dict[int, int] = {}
        """Row -> number of likeliest tokens to return for each prompt position."""
        self._persistent_batch = PersistentBatch(
            limits.max_seqs,
            limits.max_model_len,
            limits.block_size,
            len(limits.kv_windows),
            device.torch_device,
        )
        self._graphs = DecodeGraphs(
            graph_capturer, device, self._persistent_batch, self._compute, limits.max_seqs
        )
        self.reset()

    def reset(self) -> None:
        """Free all rows and keep the KV blocks. Raises pending errors of the device."""
        self._device.record_event().synchronize()
        self._persistent_batch.clear()
        self._masks.clear()
        self._sampler = Sampler(
            self._limits.max_seqs, self._vocab_size, self._device.torch_device, self._sampling_ops
        )
        self._prompt_logprob_counts.clear()

    @property
    def attention_name(self) -> str:
        """Name of the attention backend, for the log."""
        return self._attention.name

    @property
    def pending_preparations(self) -> int:
        return self._graphs.num_pending

    @torch.inference_mode()
    def prepare_next(self) -> None:
        self._graphs.capture_next()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> StepHandle:
        """Move blocks, admit sequences, and launch the model and the sampler."""
        started_at = time.perf_counter()
        corrupt = move_blocks(plan, self._attention, self.host_store)
        for admission in plan.admissions:
            self._persistent_batch.admit(admission)
            params = admission.params
            self._sampler.admit(admission, sorted(end_token_ids(params, self._eos_token_ids)))
            self._masks.admit(admission)
            self._prompt_logprob_counts.pop(admission.row, None)
            if params.prompt_logprobs is not None:
                self._prompt_logprob_counts[admission.row] = params.prompt_logprobs
        if self._states is not None:
            self._states.load_snapshots(plan.snapshot_loads)
        self._persistent_batch.append_blocks(plan.block_appends)
        if plan.admissions or plan.block_appends:
            self._attention.ensure_block(highest_block(plan))
        if not plan.rows:
            return CompletedStep(StepResult([], corrupt_blocks=corrupt))
        masks = self._masks.start(
            [row for row, samples in zip(plan.rows, plan.sample_flags, strict=True) if samples]
        )
        spans = self._prompt_spans(plan)
        captured = None if spans else self._graphs.find_captured(plan)
        if captured is None:
            packed = self._persistent_batch.pack_step(plan, _flat_tokens(spans))
            inputs = DeviceInputs(self._device.to_device(packed.buffer), packed.shape)
            batch = self._persistent_batch.gather_batch(inputs)
            if self._states is not None:
                batch = self._states.attach(batch, plan)
            launched_at, ready = time.perf_counter(), self._device.record_event()
            logits = self._compute(batch)
        else:
            packed, inputs = (
                self._persistent_batch.pack_padded_step(plan, captured.size),
                captured.inputs,
            )
            launched_at, ready = time.perf_counter(), self._device.record_event()
            logits = self._graphs.replay(captured, packed)
        computed = self._device.record_event()
        prompt_logprobs = self._prompt_logprobs(plan, packed, logits, spans)
        mask_batch = None if masks is None else masks.result()
        token_masks = None
        if mask_batch is not None:
            words = self._device.to_device(torch.from_numpy(mask_batch.words))
            token_masks = TokenMasks(mask_batch.index, words)
        sampled = self._sample(packed, inputs, logits, token_masks)
        tokens = None if sampled is None else self._device.to_host(sampled.tokens)
        done = self._device.record_event()
        if masks is not None and tokens is not None:
            self._masks.record_sampled(masks, partial(_wait_for_tokens, tokens, done))
        return _PendingStep(
            plan=plan,
            tokens=tokens,
            logprobs={} if sampled is None else sampled.logprobs,
            prompt_logprobs=prompt_logprobs,
            corrupt=corrupt,
            events=(ready, computed, done),
            launch_s=launched_at - started_at,
            masks=mask_batch,
            mask_wait_s=0.0 if masks is None else masks.wait_s,
        )

    def _compute(self, batch: Batch) -> Tensor:
        return self._model(batch, self._attention)

    def _sample(
        self,
        packed: PackedStep,
        inputs: DeviceInputs,
        logits: Tensor,
        masks: TokenMasks | None,
    ) -> SamplerOutput | None:
        """Sample tokens for the chunks that need one, and append them to the persistent batch."""
        count = len(packed.sample_index)
        if not count:
            return None
        if count != len(packed.logit_index):
            selected = torch.from_numpy(np.searchsorted(packed.logit_index, packed.sample_index))
            logits = logits[self._device.to_device(selected)]
        rows, positions = map(torch.from_numpy, (packed.sample_rows, packed.sample_positions))
        sampled = self._sampler(logits[:count], rows, positions, masks)
        self._persistent_batch.append_tokens(inputs, sampled.tokens)
        return sampled

    def _prompt_spans(self, plan: StepPlan) -> PromptSpans:
        if not self._prompt_logprob_counts:
            return {}
        spans, flat = {}, 0
        for chunk, (row, start, count) in enumerate(
            zip(plan.rows, plan.starts, plan.counts, strict=True)
        ):
            last = min(start + count, int(self._persistent_batch.prompt_lens[row]) - 1)
            if row in self._prompt_logprob_counts and last > start:
                spans[chunk] = (flat, start, last - start)
            flat += count
        return spans

    def _prompt_logprobs(
        self, plan: StepPlan, packed: PackedStep, logits: Tensor, spans: PromptSpans
    ) -> dict[int, list[Logprob]]:
        """Compute for each span the log-probabilities of the tokens that follow its positions."""
        logprobs: dict[int, list[Logprob]] = {}
        for chunk, (flat, start, count) in spans.items():
            row = plan.rows[chunk]
            first = int(np.searchsorted(packed.logit_index, flat))
            next_tokens = self._persistent_batch.tokens[row, start + 1 : start + 1 + count]
            logprobs[chunk] = self._sampler.compute_logprobs(
                logits[first : first + count], next_tokens, self._prompt_logprob_counts[row]
            )
        return logprobs


def move_blocks(plan: StepPlan, attention: Attention, host_store: HostBlockStore) -> list[int]:
    """Offload, copy and restore blocks, and return the blocks whose restored data is corrupt."""
    for block, slot in plan.block_offloads:
        host_store.save(slot, attention.read_block(block))
    if plan.block_copies:
        attention.copy_blocks(plan.block_copies)
    corrupt = []
    for slot, block in plan.block_restores:
        data = host_store.pop(slot)
        if data is None:
            corrupt.append(block)
        else:
            attention.write_block(block, data)
    return corrupt


def _flat_tokens(spans: PromptSpans) -> NDArray[np.int64] | None:
    """Return the indices of the flat tokens of all spans."""
    if not spans:
        return None
    return np.concatenate([np.arange(first, first + count) for first, _, count in spans.values()])


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """Handle of a step that is already done."""

    step_result: StepResult

    def result(self) -> StepResult:
        return self.step_result


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingStep:
    """Handle of a step whose tokens are being copied to the host."""

    plan: StepPlan
    tokens: Tensor | None
    """[C] int64, in host memory, complete after the last event. Negative where logits were not finite."""
    logprobs: dict[int, Logprob]
    """Index into `tokens` -> log-probabilities."""
    prompt_logprobs: dict[int, list[Logprob]]
    corrupt: list[int]
    events: tuple[DeviceEvent, DeviceEvent, DeviceEvent]
    """Events after the input copy, after the logits, and after sampling and the token copy."""
    launch_s: float
    masks: MaskBatch | None
    mask_wait_s: float

    def result(self) -> StepResult:
        ready, computed, done = self.events
        done.synchronize()
        sampled = [] if self.tokens is None else self.tokens.tolist()
        sample_flags = self.plan.sample_flags
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
        masks = self.masks
        if masks is not None:
            for index, reason in masks.failures.items():
                failed[chunks[index]] = SequenceFailure(reason, DEAD_END_CODE)
        return StepResult(
            tokens,
            {chunks[i]: logprob for i, logprob in self.logprobs.items()},
            self.prompt_logprobs,
            failed,
            self.corrupt,
            StepDurations(
                self.launch_s,
                computed.seconds_since(ready),
                done.seconds_since(computed),
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


def highest_block(plan: StepPlan) -> int:
    """Return the highest KV block that rows get in this step."""
    admitted = (
        block
        for admission in plan.admissions
        for table in admission.block_tables
        for block in table
    )
    return max(chain(admitted, (block for *_, block in plan.block_appends)), default=0)
