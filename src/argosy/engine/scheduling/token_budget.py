"""Limits of the tokens in a step: a budget that shrinks when memory runs out, and a guard of the time to first token.

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
from argosy.policy import LOWEST_TIER, OUTPUT_TOKEN_WEIGHT

RECOVERY_STEPS = 256
"""Successful steps after which a reduced budget doubles."""
MAX_RECOVERY_STEPS = RECOVERY_STEPS << 8


class TokenBudget:
    """Maximum number of tokens in one step. Deterministic.

    A budget that grew and then proves too large again recovers half as fast from then on. The work that each failure
    repeats is therefore small compared with the work between two failures.
    """

    def __init__(self, max_tokens: int) -> None:
        self.tokens = max_tokens
        """Current budget, at least 1."""
        self._max_tokens = max_tokens
        self._recovery_steps = RECOVERY_STEPS
        self._successful_steps = 0
        self._has_grown = False
        """Whether the budget has grown since the last failure."""

    @property
    def is_reduced(self) -> bool:
        """Whether the budget is below its maximum, or was until recently, so that `record_success` has an effect."""
        return self.tokens < self._max_tokens or self._has_grown

    def record_out_of_memory(self, step_tokens: int) -> None:
        """Reduce the budget to half of a step that ran out of memory."""
        if self._has_grown:
            self._recovery_steps = min(2 * self._recovery_steps, MAX_RECOVERY_STEPS)
        self._has_grown = False
        self._successful_steps = 0
        self.tokens = max(1, min(self.tokens, step_tokens) // 2)

    def record_success(self) -> None:
        """Record a step that succeeded. Double the budget after enough of them."""
        self._successful_steps += 1
        if self._successful_steps < self._recovery_steps:
            return
        self._successful_steps = 0
        if self.tokens < self._max_tokens:
            self.tokens = min(2 * self.tokens, self._max_tokens)
            self._has_grown = True
        else:
            self._recovery_steps = RECOVERY_STEPS
            self._has_grown = False


YIELD_INTERVAL_STEPS = 8
"""Number of steps per yield. In the long run, lower tiers yield at most one step in this many."""
MAX_BURST_YIELDS = 4
"""Maximum number of yields that can be saved, and thus of successive yields."""
MAX_ADDED_FRACTION = 0.25
"""Fraction by which lower tiers may lengthen a step without having to yield."""
MIN_BATCH_TOKENS = 8
"""Prompt tokens of batches that each step may have beside sequences of other tiers, so that these prompts end."""

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

    def skip_steps(self, steps: int) -> None:
        """Count steps in which all tiers take part."""
        self._credit_steps = min(
            self._credit_steps + steps, MAX_BURST_YIELDS * YIELD_INTERVAL_STEPS
        )

    def lowest_admitted_tier(
        self, running: list[Sequence], candidate: AdmissionCandidate | None, max_prefill_tokens: int
    ) -> int:
        """Return the lowest tier that takes part in the next step, or `NEVER` if all tiers do.

        `running` is sorted by tier. A step has at most `max_prefill_tokens` prefill tokens.
        """
        self.skip_steps(1)
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

    def max_batch_tokens(self, running: list[Sequence]) -> int:
        """Return the prompt tokens of batches in a step with these sequences, so that they lengthen it by little."""
        online = bisect_right(running, LOWEST_TIER, key=_tier_key)
        if not online:
            return NEVER
        step_tokens = max(self._ridge_tokens, online)
        return max(MIN_BATCH_TOKENS, int(MAX_ADDED_FRACTION * step_tokens))


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
