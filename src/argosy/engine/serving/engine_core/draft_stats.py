"""Counters of drafts since the start of a core, and the seconds that they save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from argosy.engine.scheduling import MAX_DRAFT_TOKENS
from argosy.engine.serving.core_messages import Delta


class DraftStats:
    """Counters by the drafter's name, and seconds of all sequences.

    A step that takes S seconds would take W without drafts. A sequence with a accepted drafts in it saves a W - (S - W)
    seconds: it would have waited for a more steps, and has waited longer for this one.
    """

    def __init__(self) -> None:
        self.drafts: Counter[str] = Counter()
        """Steps of a sequence with drafts."""
        self.draft_tokens: Counter[str] = Counter()
        self.accepted_tokens: Counter[str] = Counter()
        self.accepted_by_position: dict[str, list[int]] = {}
        """Accepted drafts by the drafter's name and by their position among the drafts of a step."""
        self._gain_s = self._cost_s = 0.0
        self._counters: dict[str, Any] | None = None
        """Copies of the counters. None after they have changed."""

    def record_window(self, drafter: str, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts of a sequence in a step."""
        self.drafts[drafter] += 1
        self.draft_tokens[drafter] += num_drafts
        self.accepted_tokens[drafter] += num_accepted
        by_position = self.accepted_by_position.setdefault(drafter, [0] * MAX_DRAFT_TOKENS)
        for position in range(num_accepted):
            by_position[position] += 1
        self._counters = None

    def record_time(self, deltas: Iterable[Delta], step_s: float, without_drafts_s: float) -> None:
        """Add the seconds that a step's drafts save to its deltas and to the sums."""
        cost_s = step_s - without_drafts_s
        for delta in deltas:
            if delta.tokens:
                gain_s = delta.accepted_drafts * without_drafts_s
                delta.draft_saved_s = gain_s - cost_s
                self._gain_s += gain_s
                self._cost_s += cost_s

    @property
    def totals(self) -> dict[str, Any]:
        """Fields of `CoreStats`. Later counts do not change them."""
        if self._counters is None:
            self._counters = {
                "drafts_total": self.drafts.copy(),
                "draft_tokens_total": self.draft_tokens.copy(),
                "accepted_draft_tokens_total": self.accepted_tokens.copy(),
                "accepted_by_position_total": {
                    name: counts.copy() for name, counts in self.accepted_by_position.items()
                },
            }
        return self._counters | {
            "draft_gain_s_total": self._gain_s,
            "draft_cost_s_total": self._cost_s,
        }
