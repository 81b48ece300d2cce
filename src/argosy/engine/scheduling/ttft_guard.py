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
from argosy.policy import OUTPUT_PRICE

if TYPE_CHECKING:
    from argosy.engine.scheduling.sequence import Sequence

EACH = 8
"""In the long run, lower tiers stand back in one step of so many."""
BURST = 4
"""So many times can be saved up; they may then stand back so often in a row."""
MUCH = 0.25
"""They do so where they would make the step longer by more than this part."""

_tier = attrgetter("tier")


class Newcomer(NamedTuple):
    """Of a sequence that can join in this step, while somebody of a lower tier runs."""

    tier: int
    tokens: int
    """That have to be computed for its first one."""


class FirstTokens:
    """Which tiers take part in each step. Pure: equal calls give equal answers."""

    def __init__(self, ridge_tokens: int) -> None:
        """`ridge_tokens`: computing so many takes as long as a pass over the weights."""
        self._ridge_tokens = ridge_tokens
        self._saved = BURST * EACH
        """Steps made, less `EACH` for each in which somebody stood back."""

    def lowest_tier(self, running: list[Sequence], newcomer: Newcomer | None, most: int) -> int:
        """The lowest tier that takes part in the next step; NEVER: all do.

        `running` is sorted by tier; a step has at most `most` tokens of prefills.
        """
        self._saved = min(self._saved + 1, BURST * EACH)
        if self._saved < EACH:
            return NEVER
        tier = _due(running)
        tokens = 0
        if newcomer is not None and newcomer.tier <= tier:
            tier, tokens = newcomer
        if tier == NEVER:
            return NEVER
        cut = bisect_right(running, tier, key=_tier)
        due = _work(running[:cut], most) + min(tokens, most)
        if _work(running[cut:], most) <= max(self._ridge_tokens, MUCH * due):
            return NEVER
        self._saved -= EACH
        return tier


def _due(running: list[Sequence]) -> int:
    """The highest tier with a first token that no step computes yet; NEVER when nobody is of a lower one."""
    if not running or running[0].tier == running[-1].tier:
        return NEVER
    last = running[-1].tier
    for seq in running:
        if seq.tier == last:
            break
        if not seq.prefilled and seq.computed < len(seq.tokens):
            return seq.tier
    return NEVER


def _work(seqs: list[Sequence], most: int) -> float:
    """What these add to a step, in prompt tokens."""
    lacking = [seq.length - seq.computed for seq in seqs]
    decodes = lacking.count(1)
    return OUTPUT_PRICE * decodes + min(most, sum(lacking) - decodes)
