"""Speculative decoding of one core: asks the drafters between two steps, and counts what the steps accept."""

from __future__ import annotations

import collections.abc
from collections import Counter
from typing import Any

import structlog

from argosy.engine.execution.drafting import Draft, Drafter
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

MAX_PAUSE_STEPS = 4
"""Maximum number of steps for which no drafter is asked, after they had no drafts for any sequence."""

log = structlog.get_logger(__name__)


class Speculation:
    """Drafters in the order in which they are asked, and counters since the start by the drafter's name."""

    def __init__(
        self,
        drafters: collections.abc.Iterable[Drafter],
        *,
        vocab_size: int,
        ridge_tokens: int,
    ) -> None:
        self.drafters = list(drafters)
        self.drafts: Counter[str] = Counter()
        """Steps of a sequence with drafts."""
        self.draft_tokens: Counter[str] = Counter()
        self.accepted_tokens: Counter[str] = Counter()
        self.accepted_by_position: dict[str, list[int]] = {}
        """Accepted drafts by the drafter's name and by their position among the drafts of a step."""
        self._vocab_size = vocab_size
        self._policy = DraftLengthPolicy(ridge_tokens)
        self._histories: dict[str, DraftHistory] = {}
        """Request id -> its earlier drafts."""
        self._proposed_by_row: dict[int, DraftCandidate] = {}
        """Row -> its latest drafts."""
        self._pause_steps = 0
        """Number of steps of the latest pause. 0 while there are drafts."""
        self._pause_steps_left = 0

    def propose(self, running: collections.abc.Collection[Sequence]) -> dict[Sequence, list[int]]:
        """Return drafts of the running sequences, as many as make the next step faster.

        The first drafter that has any for a sequence gives all of them. A drafter that raises is not asked again. While
        there are no drafts for any sequence, the drafters are only asked in some steps.
        """
        if self._pause_steps_left:
            self._pause_steps_left -= 1
            return {}
        drafts = self._select_drafts(running)
        self._pause_steps = 0 if drafts else min(self._pause_steps + 1, MAX_PAUSE_STEPS)
        self._pause_steps_left = self._pause_steps
        return drafts

    def _select_drafts(
        self, running: collections.abc.Collection[Sequence]
    ) -> dict[Sequence, list[int]]:
        """Ask the drafters, and return as many of their drafts as make the next step faster."""
        decoding = [seq for seq in running if seq.is_prefilled]
        drafts: dict[Sequence, list[int]] = {}
        candidates: list[DraftCandidate] = []
        waiting = [seq for seq in decoding if seq.can_draft]
        for drafter in tuple(self.drafters):
            if not waiting:
                break
            limits = [min(MAX_DRAFT_TOKENS, seq.max_length - seq.length) for seq in waiting]
            try:
                proposed = drafter.propose(waiting, limits)
                for seq, draft in zip(waiting, proposed, strict=True):
                    tokens = self._find_valid(draft)
                    if tokens:
                        drafts[seq] = tokens
                        source = DraftSource(drafter.name, 1 << (draft.match_size.bit_length() - 1))
                        candidates.append(
                            DraftCandidate(self._find_history(seq.id), source, len(tokens))
                        )
            except Exception:
                log.exception("drafter_failed", drafter=drafter.name)
                self.drafters.remove(drafter)
            waiting = [seq for seq in waiting if seq not in drafts]
        if not drafts:
            return drafts
        prefill_tokens = sum(
            seq.length - seq.computed_len for seq in running if not seq.is_prefilled
        )
        lengths = self._policy.select_lengths(candidates, len(decoding), prefill_tokens)
        for seq, candidate, length in zip(tuple(drafts), candidates, lengths, strict=True):
            if length:
                drafts[seq] = drafts[seq][:length]
                self._proposed_by_row[seq.row] = candidate
            else:
                del drafts[seq]
        return drafts

    def _find_valid(self, draft: Draft) -> list[int]:
        """Return the drafts up to the first one that is no token of the model."""
        tokens = draft.tokens[:MAX_DRAFT_TOKENS]
        for index, token in enumerate(tokens):
            if not 0 <= token < self._vocab_size:
                return tokens[:index]
        return tokens

    def _find_history(self, request_id: str) -> DraftHistory:
        history = self._histories.get(request_id)
        if history is None:
            history = self._histories[request_id] = DraftHistory()
        return history

    def record_step(self, plan: StepPlan, result: StepResult) -> None:
        """Count the drafts of a step, and those among them that were accepted."""
        for chunk, drafts in plan.draft_tokens.items():
            history, source, _ = self._proposed_by_row[plan.rows[chunk]]
            num_accepted = max(0, len(result.windows[chunk]) - 1)
            self._policy.record_drafts(history, source, len(drafts), num_accepted)
            name = source.drafter
            self.drafts[name] += 1
            self.draft_tokens[name] += len(drafts)
            self.accepted_tokens[name] += num_accepted
            by_position = self.accepted_by_position.setdefault(name, [0] * MAX_DRAFT_TOKENS)
            for position in range(num_accepted):
                by_position[position] += 1

    def record_duration(self, plan: StepPlan, seconds: float) -> None:
        """Record the duration of a whole step, of which the work for its drafts is a part."""
        num_decodes = plan.counts.count(1) + len(plan.draft_tokens)
        if num_decodes and num_decodes + plan.num_drafts == plan.total_tokens:
            self._policy.record_step(num_decodes, plan.num_drafts, seconds)

    @property
    def totals(self) -> dict[str, dict[str, Any]]:
        """Copies of the counters, by their fields of `CoreStats`."""
        return {
            "drafts_total": self.drafts.copy(),
            "draft_tokens_total": self.draft_tokens.copy(),
            "accepted_draft_tokens_total": self.accepted_tokens.copy(),
            "accepted_by_position_total": {
                name: counts.copy() for name, counts in self.accepted_by_position.items()
            },
        }

    def release(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._histories.pop(request_id, None)
        for drafter in self.drafters:
            drafter.release(request_id)
