"""Speculative decoding of one core: asks the drafters between two steps, and learns from what the steps accept."""

from __future__ import annotations

import collections.abc
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import structlog

from argosy.engine.execution.drafting import Drafter
from argosy.engine.scheduling import (
    MAX_DRAFT_TOKENS,
    DraftCandidate,
    DraftHistory,
    DraftLengthPolicy,
    DraftSource,
    Sequence,
    StepPlan,
    StepResult,
)
from argosy.engine.serving.core_messages import Delta
from argosy.engine.serving.engine_core.draft_stats import DraftStats

if TYPE_CHECKING:
    from argosy.engine.execution.executor.draft_model import DraftModel

ASSUMED_MATCH = 16
"""Size of a match after which drafts of texts are assumed to be accepted as often as those of a draft model."""
MAX_PAUSE_STEPS = 4
"""Maximum number of steps for which no drafter is asked, after they had no drafts for any sequence."""
MAX_DRAFTING_S, MAX_DRAFTING_S_PER_SEQUENCE = 0.002, 0.0001
"""Seconds that a call of a drafter may take, and those that it may take for each sequence beside them."""
MAX_OVERRUN_S, MAX_CALL_OVERRUN_S = 0.5, 0.2
"""Seconds beyond these after which a drafter is not asked again, and how much of them one call counts at most.

Calls that are faster than allowed make up for slower ones, such as the first one for a long prompt. A process that is
stopped for a moment disables no drafter.
"""
MAX_MASKS_S = 0.01
"""Maximum seconds of a step for the masks of drafts. A grammar has one for each of its drafts."""
MASK_WEIGHT = 1 / 8
"""Weight of a new measurement in the mean."""

_Result = TypeVar("_Result")

log = structlog.get_logger(__name__)


class Speculation:
    """Drafters in the order in which they are asked, and the policy for the number of their drafts."""

    def __init__(
        self,
        drafters: collections.abc.Iterable[Drafter],
        *,
        vocab_size: int,
        ridge_tokens: int,
        clock: Callable[[], float],
        draft_model: DraftModel | None = None,
        max_draft_tokens: int | None = None,
    ) -> None:
        self._clock = clock
        self.draft_model = draft_model
        """Drafter that is asked only for drafts that are worth the time, unlike `drafters`, which take almost none."""
        self.drafters = list(drafters)
        self._max_draft_tokens = min(max_draft_tokens or MAX_DRAFT_TOKENS, MAX_DRAFT_TOKENS)
        self.stats = DraftStats()
        self._vocab_size = vocab_size
        self._policy = DraftLengthPolicy(
            ridge_tokens, 0.0 if draft_model is None else draft_model.pass_s
        )
        self._draft_model_s = 0.0
        """Seconds of the draft model before the latest step. 0 if it was not asked."""
        self._drafting_s = 0.0
        """Seconds of all drafters before the latest step."""
        self._histories: dict[str, DraftHistory] = {}
        """Request id -> its earlier drafts."""
        self._proposed_by_row: dict[int, DraftCandidate] = {}
        """Row -> its latest drafts."""
        self._overruns_s: defaultdict[str, float] = defaultdict(float)
        """Drafter -> seconds by which its calls took longer than allowed."""
        self._mask_s = 0.0
        """Mean seconds for the mask of a token."""
        self._max_masked_drafts = MAX_DRAFT_TOKENS
        """Maximum number of drafts of a sequence with a grammar."""
        self._pause_steps = 0
        """Number of steps of the latest pause. 0 while there are drafts."""
        self._pause_steps_left = 0
        self._num_running = 0

    def propose(self, running: collections.abc.Collection[Sequence]) -> dict[Sequence, list[int]]:
        """Return drafts of the running sequences, as many as make the next step faster.

        The first drafter that has any for a sequence gives all of them, unless those of the draft model are accepted
        more often. A drafter that raises or takes too long is not asked again. While there are no drafts for any
        sequence, the drafters are only asked in some steps.
        """
        self._draft_model_s = 0.0
        if self.draft_model is not None:
            self._run_draft_model(self.draft_model, lambda model: model.catch_up(running))
        caught_up_s = self._drafting_s = self._draft_model_s
        if len(running) != self._num_running:
            self._end_pause(len(running))
        if self._pause_steps_left:
            self._pause_steps_left -= 1
            return {}
        started_at = self._clock()
        drafts = self._select_drafts(running)
        self._drafting_s += self._clock() - started_at
        has_work = bool(drafts) or self._draft_model_s > caught_up_s
        self._pause_steps = 0 if has_work else min(self._pause_steps + 1, MAX_PAUSE_STEPS)
        self._pause_steps_left = self._pause_steps
        return drafts

    def _select_drafts(
        self, running: collections.abc.Collection[Sequence]
    ) -> dict[Sequence, list[int]]:
        """Ask the drafters, and return as many of their drafts as make the next step faster."""
        decoding = [seq for seq in running if seq.is_prefilled]
        waiting = [seq for seq in decoding if seq.can_draft]
        if self._mask_s:
            num_masked = sum(bool(seq.params.grammar) for seq in waiting)
            self._max_masked_drafts = int(MAX_MASKS_S / self._mask_s / max(1, num_masked))
        drafts: dict[Sequence, list[int]] = {}
        candidates: dict[Sequence, DraftCandidate] = {}
        self._ask_drafters(waiting, drafts, candidates)
        if self.draft_model is not None:
            self._add_draft_model(waiting, self.draft_model, candidates)
        if not candidates:
            return drafts
        prefill_tokens = sum(
            seq.length - seq.computed_len for seq in running if not seq.is_prefilled
        )
        max_loss = min(self._find_history(seq).find_max_loss(seq.output_len) for seq in decoding)
        selected = self._policy.select_lengths(
            list(candidates.values()), len(decoding), prefill_tokens, max_loss
        )
        lengths = {seq: length for seq, length in zip(candidates, selected, strict=True) if length}
        if self.draft_model is not None:
            self._ask_draft_model(self.draft_model, candidates, lengths, drafts)
        for seq in lengths:
            self._proposed_by_row[seq.row] = candidates[seq]
        return {seq: drafts[seq][:length] for seq, length in lengths.items() if drafts[seq]}

    def _ask_drafters(
        self,
        waiting: list[Sequence],
        drafts: dict[Sequence, list[int]],
        candidates: dict[Sequence, DraftCandidate],
    ) -> None:
        """Add the drafts that take almost no time."""
        for drafter in tuple(self.drafters):
            if not waiting:
                break
            limits = [self._max_drafts(seq) for seq in waiting]
            started_at = self._clock()
            try:
                proposed = drafter.propose(waiting, limits)
                for seq, draft in zip(waiting, proposed, strict=True):
                    if draft.tokens and (tokens := self._find_valid(draft.tokens)):
                        drafts[seq] = tokens
                        source = DraftSource(drafter.name, 1 << (draft.match_size.bit_length() - 1))
                        candidates[seq] = DraftCandidate(
                            self._find_history(seq), source, len(tokens)
                        )
            except Exception:
                log.exception("drafter_failed", drafter=drafter.name)
                self.drafters.remove(drafter)
            else:
                self._check_duration(drafter, len(waiting), self._clock() - started_at)
            waiting = [seq for seq in waiting if seq not in drafts]

    def _check_duration(self, drafter: Drafter, num_sequences: int, seconds: float) -> None:
        """Ask a drafter no more if its calls have taken much longer than allowed."""
        name, allowed_s = drafter.name, MAX_DRAFTING_S + MAX_DRAFTING_S_PER_SEQUENCE * num_sequences
        overrun_s = self._overruns_s[name] + min(seconds - allowed_s, MAX_CALL_OVERRUN_S)
        self._overruns_s[name] = max(0.0, overrun_s)
        if overrun_s > MAX_OVERRUN_S:
            log.error("drafter_too_slow", drafter=name, seconds=seconds, allowed_s=allowed_s)
            self.drafters.remove(drafter)

    def _add_draft_model(
        self,
        waiting: list[Sequence],
        draft_model: DraftModel,
        candidates: dict[Sequence, DraftCandidate],
    ) -> None:
        """Add the draft model as a candidate, in place of others that are accepted less often."""
        source, estimate = DraftSource(draft_model.name, ASSUMED_MATCH), self._policy.estimate
        for seq in waiting:
            candidate = DraftCandidate(
                self._find_history(seq), source, self._max_drafts(seq), needs_passes=True
            )
            other = candidates.get(seq)
            if other is None or estimate(candidate) > estimate(other):
                candidates[seq] = candidate

    def _ask_draft_model(
        self,
        draft_model: DraftModel,
        candidates: dict[Sequence, DraftCandidate],
        lengths: dict[Sequence, int],
        drafts: dict[Sequence, list[int]],
    ) -> None:
        """Set the drafts of the sequences for which the draft model was selected. There may be none."""
        sequences = [seq for seq in lengths if candidates[seq].needs_passes]
        if not sequences:
            return
        limits = [lengths[seq] for seq in sequences]
        before_s = self._draft_model_s
        proposed = self._run_draft_model(
            draft_model, lambda model: model.propose(sequences, limits)
        ) or [[] for _ in sequences]
        for seq, tokens in zip(sequences, proposed, strict=True):
            drafts[seq] = self._find_valid(tokens)
        if draft_model.num_passes:
            self._policy.record_passes(draft_model.num_passes, self._draft_model_s - before_s)

    def _run_draft_model(
        self, draft_model: DraftModel, run: Callable[[DraftModel], _Result]
    ) -> _Result | None:
        """Call the draft model and measure the time. If it raises, return None, and do not call it again."""
        started_at = self._clock()
        result = None
        try:
            result = run(draft_model)
        except Exception:
            log.exception("drafter_failed", drafter=draft_model.name)
            draft_model.close()
            self.draft_model = None
        self._draft_model_s += self._clock() - started_at
        return result

    def _max_drafts(self, seq: Sequence) -> int:
        """Return the largest number of drafts that a sequence has room for."""
        limit = min(self._max_draft_tokens, seq.max_length - seq.length)
        return min(limit, self._max_masked_drafts) if seq.params.grammar else limit

    def _find_valid(self, tokens: list[int]) -> list[int]:
        """Return the drafts up to the first one that is no token of the model."""
        for index, token in enumerate(tokens[: self._max_draft_tokens]):
            if not 0 <= token < self._vocab_size:
                return tokens[:index]
        return tokens[: self._max_draft_tokens]

    def _find_history(self, seq: Sequence) -> DraftHistory:
        history = self._histories.get(seq.id)
        if history is None:
            history = self._histories[seq.id] = self._policy.create_history(seq.cache_salt)
        return history

    def record_step(self, plan: StepPlan, result: StepResult) -> None:
        """Count the drafts of a step, and those among them that were accepted."""
        if result.masked_rows:
            seconds = result.durations.mask_fill_s / result.masked_rows
            self._mask_s += MASK_WEIGHT * (seconds - self._mask_s)
        for chunk, drafts in plan.draft_tokens.items():
            history, source, _, needed_passes = self._proposed_by_row[plan.rows[chunk]]
            num_accepted = max(0, len(result.windows[chunk]) - 1)
            self._policy.record_drafts(
                history, source, len(drafts), num_accepted, needed_passes=needed_passes
            )
            self.stats.record_window(source.drafter, len(drafts), num_accepted)

    def record_duration(
        self, plan: StepPlan, seconds: float, deltas: collections.abc.Iterable[Delta]
    ) -> None:
        """Record the duration of a whole step, of which the work for its drafts is a part.

        That of the draft model is recorded by itself. The deltas get the seconds that drafts save.
        """
        num_drafts = plan.num_drafts
        num_decodes = plan.counts.count(1) + len(plan.draft_tokens)
        if num_decodes and num_decodes + num_drafts == plan.total_tokens:
            self._policy.record_step(num_decodes, num_drafts, seconds - self._draft_model_s)
        if num_drafts or self._drafting_s:
            without_drafts_s = (seconds - self._drafting_s) * self._policy.relative_cost(
                plan.total_tokens - num_drafts, plan.total_tokens
            )
            self.stats.record_time(deltas, seconds, without_drafts_s)
            for delta in deltas:
                history = self._histories.get(delta.id)
                if history is not None and without_drafts_s > 0:
                    history.saved += delta.draft_saved_s / without_drafts_s

    def _end_pause(self, num_running: int) -> None:
        """Ask the drafters in the next step, so that no text of other requests delays the drafts of a new one."""
        self._pause_steps = self._pause_steps_left = 0
        self._num_running = num_running

    def release(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._end_pause(0)
        self._histories.pop(request_id, None)
        for drafter in self.drafters:
            drafter.release(request_id)
        if self.draft_model is not None:
            self.draft_model.release(request_id)
