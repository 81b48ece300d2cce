"""Speculative decoding of one core: asks the drafters between two steps, and counts what the steps accept."""

from __future__ import annotations

import collections.abc
from collections import Counter

import structlog

from argosy.engine.execution.drafting import Drafter
from argosy.engine.scheduling import Sequence, StepPlan, StepResult

MAX_DRAFT_TOKENS = 4
"""Maximum number of drafts of a sequence in one step."""

log = structlog.get_logger(__name__)


class Speculation:
    """Drafters in the order in which they are asked, and counters since the start by the drafter's name."""

    def __init__(self, drafters: collections.abc.Iterable[Drafter], vocab_size: int) -> None:
        self.drafters = list(drafters)
        self.drafts: Counter[str] = Counter()
        """Steps of a sequence with drafts."""
        self.draft_tokens: Counter[str] = Counter()
        self.accepted_tokens: Counter[str] = Counter()
        self.accepted_by_position: Counter[int] = Counter()
        """Accepted drafts by their position among the drafts of a step, from 0."""
        self._vocab_size = vocab_size
        self._drafter_by_row: dict[int, str] = {}
        """Row -> name of the drafter of its latest drafts."""

    def propose(self, running: collections.abc.Iterable[Sequence]) -> dict[Sequence, list[int]]:
        """Return drafts of the running sequences. The first drafter that has any for a sequence gives all of them.

        A drafter that raises is not asked again.
        """
        candidates = [seq for seq in running if seq.is_prefilled and seq.can_draft]
        proposed: dict[Sequence, list[int]] = {}
        for drafter in tuple(self.drafters):
            if not candidates:
                break
            try:
                drafts = drafter.propose(candidates, [MAX_DRAFT_TOKENS] * len(candidates))
                self._add_drafts(proposed, drafter.name, candidates, drafts)
            except Exception:
                log.exception("drafter_failed", drafter=drafter.name)
                self.drafters.remove(drafter)
            candidates = [seq for seq in candidates if seq not in proposed]
        return proposed

    def _add_drafts(
        self,
        proposed: dict[Sequence, list[int]],
        name: str,
        candidates: list[Sequence],
        drafts: list[list[int]],
    ) -> None:
        """Add drafts up to the first one that is no token of the model."""
        for seq, tokens in zip(candidates, drafts, strict=True):
            valid = tokens[:MAX_DRAFT_TOKENS]
            for index, token in enumerate(valid):
                if not 0 <= token < self._vocab_size:
                    valid = valid[:index]
                    break
            if valid:
                proposed[seq] = valid
                self._drafter_by_row[seq.row] = name

    def record_step(self, plan: StepPlan, result: StepResult) -> None:
        """Count the drafts of a step, and those among them that were accepted."""
        for chunk, drafts in plan.draft_tokens.items():
            name = self._drafter_by_row[plan.rows[chunk]]
            num_accepted = max(0, len(result.windows[chunk]) - 1)
            self.drafts[name] += 1
            self.draft_tokens[name] += len(drafts)
            self.accepted_tokens[name] += num_accepted
            self.accepted_by_position.update(range(num_accepted))

    def release(self, request_id: str) -> None:
        """Forget a request that has ended."""
        for drafter in self.drafters:
            drafter.release(request_id)
