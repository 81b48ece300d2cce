"""When lower tiers stand back: a higher tier's first token is due, and their work would make it come late.

A step takes as long as all that is in it. So a step that computes what a first token still lacks is left to its
tier and those above, if the others would add much. They lose that step and no other: what they would have
computed in it is computed in the next one, at the price of one more pass over the weights. So they stand back only
where their own work takes longer than such a pass, and seldom: in any n steps at most `BURST + n / EACH` times.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from argosy.engine.scheduling.sequence import NEVER
from argosy.policy import OUTPUT_TOKEN_WEIGHT

if TYPE_CHECKING:
    from argosy.engine.scheduling.sequence import Sequence

YIELD_INTERVAL_STEPS = 8
"""In the long run, lower tiers stand back in one step of so many."""
MAX_BURST_YIELDS = 4
"""So many times can be saved up; they may then stand back so often in a row."""
MAX_ADDED_FRACTION = 0.25
"""They do so where they would make the step longer by more than this part."""

_tier = attrgetter("tier")


class AdmissionCandidate(NamedTuple):
    """Of a sequence that can join in this step, while somebody of a lower tier runs."""

    tier: int
    tokens: int
    """That have to be computed for its first one."""


class TtftGuard:
    """Which tiers take part in each step. Pure: equal calls give equal answers."""

    def __init__(self, ridge_tokens: int) -> None:
        """`ridge_tokens`: computing so many takes as long as a pass over the weights."""
        self._ridge_tokens = ridge_tokens
        self._credit_steps = MAX_BURST_YIELDS * YIELD_INTERVAL_STEPS
        """Steps made, less `EACH` for each in which somebody stood back."""

    def lowest_admitted_tier(
        self, running: list[Sequence], candidate: AdmissionCandidate | None, max_prefill_tokens: int
    ) -> int:
        """The lowest tier that takes part in the next step; NEVER: all do.

        `running` is sorted by tier; a step has at most `most` tokens of prefills.
        """
        self._credit_steps = min(self._credit_steps + 1, MAX_BURST_YIELDS * YIELD_INTERVAL_STEPS)
        if self._credit_steps < YIELD_INTERVAL_STEPS:
            return NEVER
        tier = _highest_due_tier(running)
        tokens = 0
        if candidate is not None and candidate.tier <= tier:
            tier, tokens = candidate
        if tier == NEVER:
            return NEVER
        cut = bisect_right(running, tier, key=_tier)
        due = _step_cost(running[:cut], max_prefill_tokens) + min(tokens, max_prefill_tokens)
        if _step_cost(running[cut:], max_prefill_tokens) <= max(
            self._ridge_tokens, MAX_ADDED_FRACTION * due
        ):
            return NEVER
        self._credit_steps -= YIELD_INTERVAL_STEPS
        return tier


def _highest_due_tier(running: list[Sequence]) -> int:
    """The highest tier with a first token that no step computes yet; NEVER when nobody is of a lower one."""
    if not running or running[0].tier == running[-1].tier:
        return NEVER
    last = running[-1].tier
    for seq in running:
        if seq.tier == last:
            break
        if not seq.is_prefilled and seq.computed_len < len(seq.tokens):
            return seq.tier
    return NEVER


def _step_cost(seqs: list[Sequence], max_prefill_tokens: int) -> float:
    """What these add to a step, in prompt tokens."""
    lacking = [seq.length - seq.computed_len for seq in seqs]
    decodes = lacking.count(1)
    return OUTPUT_TOKEN_WEIGHT * decodes + min(max_prefill_tokens, sum(lacking) - decodes)
