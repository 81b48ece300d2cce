"""Guard of the time to first token (TTFT), which keeps lower tiers out of steps that would delay a higher tier.

The duration of a step grows with all its tokens. If a step computes the remaining prompt of a higher tier's sequence,
and lower tiers would lengthen it much, the lower tiers yield that step. Their work moves to the next step, at the cost
of one more pass over the weights. They therefore yield only if their own work takes longer than such a pass. In any n
steps they yield at most `MAX_BURST_YIELDS + n / YIELD_INTERVAL_STEPS` times.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter
from typing import NamedTuple

from argosy.engine.scheduling.sequence import NEVER, Sequence
from argosy.policy import OUTPUT_TOKEN_WEIGHT

YIELD_INTERVAL_STEPS = 8
"""Number of steps per yield. In the long run, lower tiers yield at most one step in this many."""
MAX_BURST_YIELDS = 4
"""Maximum number of yields that can be saved, and thus of successive yields."""
MAX_ADDED_FRACTION = 0.25
"""Fraction by which lower tiers may lengthen a step without having to yield."""

_tier_key = attrgetter("tier")


class AdmissionCandidate(NamedTuple):
    """Sequence that can join in this step while sequences of lower tiers run."""

    tier: int
    tokens: int
    """Number of tokens to compute before its first output token."""


class TtftGuard:
    """Selects the tiers that take part in each step. Deterministic."""

    def __init__(self, ridge_tokens: int) -> None:
        """Create a guard. Computing `ridge_tokens` tokens takes as long as one pass over the weights."""
        self._ridge_tokens = ridge_tokens
        self._credit_steps = MAX_BURST_YIELDS * YIELD_INTERVAL_STEPS
        """Steps made, minus `YIELD_INTERVAL_STEPS` for each yield."""

    def lowest_admitted_tier(
        self, running: list[Sequence], candidate: AdmissionCandidate | None, max_prefill_tokens: int
    ) -> int:
        """Return the lowest tier that takes part in the next step, or `NEVER` if all tiers do.

        `running` is sorted by tier. A step has at most `max_prefill_tokens` prefill tokens.
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
        split = bisect_right(running, tier, key=_tier_key)
        due_cost = _step_cost(running[:split], max_prefill_tokens) + min(tokens, max_prefill_tokens)
        if _step_cost(running[split:], max_prefill_tokens) <= max(
            self._ridge_tokens, MAX_ADDED_FRACTION * due_cost
        ):
            return NEVER
        self._credit_steps -= YIELD_INTERVAL_STEPS
        return tier


def _highest_due_tier(running: list[Sequence]) -> int:
    """Return the highest tier with a first token that no step computes yet, or `NEVER` if no lower tier runs."""
    if not running or running[0].tier == running[-1].tier:
        return NEVER
    lowest_tier = running[-1].tier
    for seq in running:
        if seq.tier == lowest_tier:
            break
        if not seq.is_prefilled and seq.computed_len < len(seq.tokens):
            return seq.tier
    return NEVER


def _step_cost(seqs: list[Sequence], max_prefill_tokens: int) -> float:
    """Return the cost that these sequences add to a step, in prompt tokens."""
    remaining = [seq.length - seq.computed_len for seq in seqs]
    num_decodes = remaining.count(1)
    return OUTPUT_TOKEN_WEIGHT * num_decodes + min(max_prefill_tokens, sum(remaining) - num_decodes)
