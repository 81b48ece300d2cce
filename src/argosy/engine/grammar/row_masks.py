"""Masks of the constrained rows of a batch, which a thread fills while the model computes.

The mask of a step depends on the tokens of the previous step, which may still be on their way from the device. The
thread waits for them, advances the constraints, and fills the masks. The model needs no mask, so the device computes
meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from argosy.engine.grammar.compiler import CompiledGrammar
from argosy.engine.grammar.token_constraint import TokenConstraint, is_constrained
from argosy.engine.grammar.token_mask import count_mask_words, has_bit
from argosy.engine.scheduling import AdmittedSequence


@dataclass(frozen=True, slots=True)
class MaskBatch:
    """Masks of the constrained rows of one step."""

    index: NDArray[np.int64]
    """[M], ascending indices into the step's samples."""
    words: NDArray[np.int32]
    """[M, W], the mask of each of them, see `token_mask`."""
    failures: dict[int, str]
    """Index into the step's samples -> why no token can be sampled. The mask of such a row has no effect."""
    fill_s: float
    """Seconds that the thread spent, without waiting for the previous step."""


class ConstrainedSample(NamedTuple):
    """Sample of a constrained sequence, and the drafts after which the step samples more tokens for it."""

    sample_index: int
    """Index into the step's samples. Those after the drafts follow it."""
    constraint: TokenConstraint
    drafts: Sequence[int] = ()


class _SampledTokens(NamedTuple):
    """Tokens that a step samples for constrained sequences."""

    samples: list[ConstrainedSample]
    get_tokens: Callable[[], Sequence[int]]
    """Waits for the step, and returns its tokens."""


@dataclass(slots=True)
class PendingMasks:
    """Masks of one step that are being filled."""

    samples: list[ConstrainedSample]
    _job: Future[MaskBatch]
    wait_s: float = field(default=0.0, init=False)
    """Seconds that `result` waited."""

    def result(self) -> MaskBatch:
        """Wait for the masks."""
        started_at = time.perf_counter()
        masks = self._job.result()
        self.wait_s = time.perf_counter() - started_at
        return masks


class RowMasks:
    """Constraints of the rows of a batch. Not thread-safe: use it from the thread that runs the steps."""

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_token_ids: list[int],
        find_grammar: Callable[[str], CompiledGrammar],
        threads: int,
    ) -> None:
        """Create the masks of an empty batch.

        Args:
            vocab_size: Number of logits.
            eos_token_ids: End-of-sequence tokens of the model.
            find_grammar: Returns the compiled grammar of a text, which must be available.
            threads: Threads that compute the masks of one step.
        """
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._find_grammar = find_grammar
        self._threads = threads
        self._constraints: dict[int, TokenConstraint] = {}
        """Row -> constraint of its latest sequence."""
        self._replays: list[tuple[TokenConstraint, list[int]]] = []
        """New constraints, and the output that their sequences have already."""
        self._sampled: list[_SampledTokens] = []
        """Sampled tokens that the constraints have not accepted yet, oldest first."""
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._mask_executor: LLExecutor | None = None
        self._job: Future[MaskBatch] | None = None

    def admit(self, admission: AdmittedSequence) -> None:
        """Set the constraint of a row for a sequence that joins the batch, with the output that it has already."""
        params, row = admission.params, admission.row
        self._constraints.pop(row, None)
        if not is_constrained(params):
            return
        constraint = self._constraints[row] = TokenConstraint(
            params,
            vocab_size=self._vocab_size,
            grammar=self._find_grammar(params.grammar) if params.grammar else None,
            eos_token_ids=self._eos_token_ids,
        )
        output = admission.tokens[admission.prompt_len :]
        if output:
            self._replays.append((constraint, output))

    def start(
        self, rows: Sequence[int], drafts: Sequence[list[int]] | None = None
    ) -> PendingMasks | None:
        """Start to fill the masks of the step that samples a token for each of `rows`. None if no row has a mask.

        For `rows[i]`, the step also samples a token after each of `drafts[i]`.
        """
        if not self._constraints:
            return None
        firsts: Sequence[int] = range(len(rows))
        if drafts is not None:
            firsts = list(accumulate((1 + len(each) for each in drafts), initial=0))
        samples = [
            ConstrainedSample(firsts[number], constraint, () if drafts is None else drafts[number])
            for number, row in enumerate(rows)
            if (constraint := self._constraints.get(row)) is not None
        ]
        if not samples:
            return None
        self._job = self._worker.submit(self._fill, self._replays, self._sampled, samples)
        self._replays, self._sampled = [], []
        return PendingMasks(samples, self._job)

    def record_sampled(self, masks: PendingMasks, get_tokens: Callable[[], Sequence[int]]) -> None:
        """Record the tokens that a step with `masks` samples. `get_tokens` waits for the step, in another thread."""
        self._sampled.append(_SampledTokens(masks.samples, get_tokens))

    def record_windows(self, masks: PendingMasks, tokens: Sequence[int]) -> None:
        """Record the tokens of a step with drafts and `masks`. A negative one, and those after it, are not valid.

        Without drafts, it ends the sequence. Otherwise the sequence goes on after the token before it.
        """
        for index, constraint, drafts in masks.samples:
            window = tokens[index : index + 1 + len(drafts)]
            valid = [token for token in window if token >= 0 or not drafts]
            self._replays.append((constraint, valid))

    def find_forced_tokens(self, row: int) -> list[int]:
        """Return tokens that a row's grammar forces. Call it between two steps, none of which is in flight."""
        constraint = self._constraints.get(row)
        if constraint is None:
            return []
        _advance(self._replays, self._sampled)
        self._replays, self._sampled = [], []
        return constraint.find_forced_tokens()

    def keep_rows(self, rows: set[int]) -> None:
        """Remove the constraints of all other rows, whose sequences have ended. Call it between two steps."""
        self._constraints = {row: c for row, c in self._constraints.items() if row in rows}
        kept = set(map(id, self._constraints.values()))
        self._replays = [replay for replay in self._replays if id(replay[0]) in kept]
        self._sampled = [
            step._replace(samples=[each for each in step.samples if id(each.constraint) in kept])
            for step in self._sampled
        ]

    def clear(self) -> None:
        """Remove all constraints, after the masks in progress are done or have failed."""
        if self._job is not None:
            self._job.exception()
            self._job = None
        self._constraints, self._replays, self._sampled = {}, [], []

    def _fill(
        self,
        replays: list[tuple[TokenConstraint, list[int]]],
        sampled: list[_SampledTokens],
        samples: list[ConstrainedSample],
    ) -> MaskBatch:
        """Advance the constraints by the sampled tokens, and fill the masks. Runs in the worker thread."""
        started_at = _advance(replays, sampled)
        index = [
            sample.sample_index + offset
            for sample in samples
            for offset in range(1 + len(sample.drafts))
        ]
        words = np.zeros((len(index), count_mask_words(self._vocab_size)), np.int32)
        failures: dict[int, str] = {}
        positions = {sample_index: position for position, sample_index in enumerate(index)}
        while samples:
            self._fill_words(
                words, [(sample.constraint, positions[sample.sample_index]) for sample in samples]
            )
            failures |= {i: c.failure for i, c, _ in samples if c.failure is not None}
            samples = [
                _accept_draft(sample)
                for sample in samples
                if sample.drafts
                and sample.constraint.failure is None
                and has_bit(words[positions[sample.sample_index]], sample.drafts[0])
            ]
        return MaskBatch(
            np.array(index, np.int64), words, failures, time.perf_counter() - started_at
        )

    def _fill_words(
        self, words: NDArray[np.int32], constraints: list[tuple[TokenConstraint, int]]
    ) -> None:
        """Fill the mask of each constraint, in the row of `words` with the given position."""
        matchers = [
            (matcher, position)
            for constraint, position in constraints
            if (matcher := constraint.active_matcher) is not None
        ]
        if matchers:
            if self._mask_executor is None:
                self._mask_executor = LLExecutor(self._threads)
            fill_next_token_bitmask_par(self._mask_executor, matchers, words)
        for constraint, position in constraints:
            matcher = constraint.active_matcher
            if matcher is not None and matcher.is_error():
                _fill_after_failure(constraint, words[position])
            constraint.complete_row(words[position])


def _advance(
    replays: list[tuple[TokenConstraint, list[int]]], sampled: list[_SampledTokens]
) -> float:
    """Wait for sampled tokens, and advance the constraints. Returns the time after the wait."""
    known_tokens = [step.get_tokens() for step in sampled]
    started_at = time.perf_counter()
    for constraint, output in replays:
        constraint.accept(output)
    for step, tokens in zip(sampled, known_tokens, strict=True):
        for sample in step.samples:
            sample.constraint.accept([tokens[sample.sample_index]])
    return started_at


def _accept_draft(sample: ConstrainedSample) -> ConstrainedSample:
    """Return the sample after the first draft, which the sample's mask allows.

    If the mask does not allow it, no later sample is valid, and their masks stay zero without effect.
    """
    constraint = sample.constraint.fork()
    constraint.accept(sample.drafts[:1])
    return ConstrainedSample(sample.sample_index + 1, constraint, sample.drafts[1:])


def _fill_after_failure(constraint: TokenConstraint, row: NDArray[np.int32]) -> None:
    """Fill the row of a constraint whose matcher has failed, or set its `failure`."""
    matcher = constraint.replace_failed_matcher()
    if matcher is None:
        return
    fill_next_token_bitmask(matcher, row[None])
    if matcher.is_error():
        constraint.replace_failed_matcher()
