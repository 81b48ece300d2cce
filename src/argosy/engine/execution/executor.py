"""Runs plans: moves blocks, launches model and sampler, and tells later what they gave."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from argosy.engine.execution.decode_graphs import DecodeGraphs
from argosy.engine.execution.host_block_store import HostStore
from argosy.engine.execution.persistent_batch import Inputs, SequenceTable
from argosy.engine.execution.sampler import Sampled, Sampler
from argosy.engine.scheduling import Durations, Logprob, Plan, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from argosy.engine.engine_config import EngineLimits
    from argosy.engine.execution.batch import Attention, Batch
    from argosy.engine.execution.device import Device, Event, Recorder
    from argosy.engine.execution.persistent_batch import Packed

NOT_FINITE = "the model gave numbers that are not finite"
Spans = dict[int, tuple[int, int, int]]
"""Chunk -> (first flat token, its position, how many): logits that predict prompt tokens."""


class Flight(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait until it is done; an exception means that nothing of it counts. Called once."""
        ...


class Executor(Protocol):
    """Does what plans say, in the order they are launched. The twin's prices them instead."""

    def launch(self, plan: Plan) -> Flight:
        """Begin a step, be the one before done or not; an exception means that nothing of it counts."""
        ...

    def reset(self) -> None:
        """Forget all rows and steps: every running sequence will be admitted again."""
        ...

    @property
    def unprepared(self) -> int:
        """How often `prepare` has still something to do."""
        ...

    def prepare(self) -> None:
        """Do a piece of what makes later steps faster; called between two steps."""
        ...


class TorchExecutor:
    """The executor that computes. `model(batch, attention)` gives logits [L, V].

    recorder: makes graphs of decode steps; None where the device, or the model, does without.
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
        recorder: Recorder | None = None,
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
        self._table = SequenceTable(
            limits.max_seqs,
            limits.max_model_len,
            limits.block_size,
            device.torch_device,
        )
        self._graphs = DecodeGraphs(recorder, device, self._table, self._compute, limits.max_seqs)
        self.reset()

    def reset(self) -> None:
        """Free rows; KV blocks stay as they are. Raises what the device still has to complain of."""
        self._device.event().synchronize()
        self._table.forget()
        self._sampler = Sampler(self._limits.max_seqs, self._vocab, self._device.torch_device)
        self._prompt_tops.clear()

    @property
    def attention_name(self) -> str:
        """Which attention is in use, for the log."""
        return self._attention.name

    @property
    def unprepared(self) -> int:
        """See `Executor`."""
        return self._graphs.missing

    @torch.inference_mode()
    def prepare(self) -> None:
        """See `Executor`."""
        self._graphs.record()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Flight:
        """Apply the plan and launch what it computes."""
        begin = time.perf_counter()
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
        if plan.admitted or plan.placed:
            self._attention.reach(_highest_block(plan))
        if not plan.rows:
            return Landed(StepResult([], corrupt=corrupt))
        spans = self._prompt_spans(plan)
        recorded = None if spans else self._graphs.find(plan)
        if recorded is None:
            packed = self._table.pack(plan, _flat_tokens(spans))
            inputs = Inputs(self._device.to_device(packed.data), packed.shape)
            batch = self._table.gather(inputs)
            launched, ready = time.perf_counter(), self._device.event()
            logits = self._compute(batch)
        else:
            packed, inputs = self._table.pack_padded(plan, recorded.size), recorded.inputs
            launched, ready = time.perf_counter(), self._device.event()
            logits = self._graphs.launch(recorded, packed)
        computed = self._device.event()
        prompt_logprobs = self._prompt_logprobs(plan, packed, logits, spans)
        sampled = self._sample(packed, inputs, logits)
        tokens = None if sampled is None else self._device.to_host(sampled.tokens)
        return _Flight(
            plan=plan,
            tokens=tokens,
            logprobs={} if sampled is None else sampled.logprobs,
            prompt_logprobs=prompt_logprobs,
            corrupt=corrupt,
            events=(ready, computed, self._device.event()),
            launch_s=launched - begin,
        )

    def _compute(self, batch: Batch) -> Tensor:
        return self._model(batch, self._attention)

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

    def _sample(self, packed: Packed, inputs: Inputs, logits: Tensor) -> Sampled | None:
        """Tokens for the chunks that sample; the next batch finds them in the table."""
        count = len(packed.sampled)
        if not count:
            return None
        if count != len(packed.logit_index):
            picked = torch.from_numpy(np.searchsorted(packed.logit_index, packed.sampled))
            logits = logits[self._device.to_device(picked)]
        rows, positions = map(torch.from_numpy, (packed.sample_rows, packed.sample_positions))
        sampled = self._sampler(logits[:count], rows, positions)
        self._table.append(inputs, sampled.tokens)
        return sampled

    def _prompt_spans(self, plan: Plan) -> Spans:
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
        self, plan: Plan, packed: Packed, logits: Tensor, spans: Spans
    ) -> dict[int, list[Logprob]]:
        """For each span, the log-probabilities of the tokens that follow its positions."""
        found: dict[int, list[Logprob]] = {}
        for chunk, (flat, start, count) in spans.items():
            row = plan.rows[chunk]
            first = int(np.searchsorted(packed.logit_index, flat))
            following = self._table.tokens[row, start + 1 : start + 1 + count]
            found[chunk] = self._sampler.describe(
                logits[first : first + count], following, self._prompt_tops[row]
            )
        return found


def _flat_tokens(spans: Spans) -> NDArray[np.int64] | None:
    """The flat tokens of all spans."""
    if not spans:
        return None
    return np.concatenate([np.arange(first, first + count) for first, _, count in spans.values()])


@dataclass(frozen=True, slots=True)
class Landed:
    """A step that is done already."""

    given: StepResult

    def result(self) -> StepResult:
        """See `Flight`."""
        return self.given


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flight:
    """A step whose tokens are on their way to the host."""

    plan: Plan
    tokens: Tensor | None
    """[C] int64, in host memory: complete after the last event; below 0 where logits were not finite."""
    logprobs: dict[int, Logprob]
    """By index into `tokens`."""
    prompt_logprobs: dict[int, list[Logprob]]
    corrupt: list[int]
    events: tuple[Event, Event, Event]
    """Inputs there, logits computed, tokens sampled and copied."""
    launch_s: float

    def result(self) -> StepResult:
        """See `Flight`."""
        ready, computed, done = self.events
        done.synchronize()
        drawn = [] if self.tokens is None else self.tokens.tolist()
        samples = self.plan.samples
        chunks: Sequence[int] = range(len(samples))
        tokens = drawn
        if len(drawn) < len(samples):
            chunks = [chunk for chunk in chunks if samples[chunk]]
            found = dict(zip(chunks, drawn, strict=True))
            tokens = [found.get(chunk, -1) for chunk in range(len(samples))]
        failed = {}
        if drawn and min(drawn) < 0:
            failed = {
                chunk: NOT_FINITE for chunk, token in zip(chunks, drawn, strict=True) if token < 0
            }
        return StepResult(
            tokens,
            {chunks[i]: logprob for i, logprob in self.logprobs.items()},
            self.prompt_logprobs,
            failed,
            self.corrupt,
            Durations(self.launch_s, computed.since(ready), done.since(computed)),
        )


def _highest_block(plan: Plan) -> int:
    """Of those that rows get in this step."""
    admitted = (block for one in plan.admitted for block in one.blocks)
    return max(chain(admitted, (block for _, _, block in plan.placed)), default=0)
