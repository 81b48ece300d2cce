"""Totals and measurements of the engine's steps: constrained sampling, and speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from argosy.engine.grammar import DEAD_END_CODE
from argosy.policy import EwmaRate, OnlineLinearFit

if TYPE_CHECKING:
    from argosy.engine.scheduling import StepPlan, StepResult
    from argosy.engine.serving.core_messages import Delta

MIN_PREFILL_TOKENS = 64
"""Steps with fewer prompt tokens are ignored, because their fixed cost dominates."""
PREFILL_HALF_LIFE_TOKENS = 8192.0
DECODE_HALF_LIFE_STEPS = 64.0


@dataclass(slots=True)
class ConstraintStats:
    """Sums since the start."""

    masked_tokens: int = 0
    """Tokens sampled under a mask."""
    dead_ends: int = 0
    """Sequences that ended because no token could continue their output."""
    mask_fill_s: float = 0.0
    """Seconds that a thread spent on masks, while the device computed."""
    mask_wait_s: float = 0.0
    """Seconds for which sampling waited for masks."""

    def record_step(self, result: StepResult, deltas: list[Delta]) -> None:
        """Add the result of one step. `deltas` leave out sequences that ended in an earlier step."""
        self.masked_tokens += result.masked_rows
        if result.failures:
            self.dead_ends += sum(delta.error_code == DEAD_END_CODE for delta in deltas)
        self.mask_fill_s += result.durations.mask_fill_s
        self.mask_wait_s += result.durations.mask_wait_s


class SpeedEstimator:
    """Estimates the prefill rate in tokens per second, and the decode step time by the number of sequences."""

    def __init__(self) -> None:
        self._prefill_rate = EwmaRate(PREFILL_HALF_LIFE_TOKENS)
        self._decode_fit = OnlineLinearFit(DECODE_HALF_LIFE_STEPS)

    def record_step(self, plan: StepPlan, result: StepResult) -> None:
        """Add the measurement of one step.

        If it has drafts, the seconds between tokens are those of the step per new token of a sequence.
        """
        seconds = sum(result.durations)
        sequences = plan.counts.count(1) + len(plan.draft_tokens)
        prefill_tokens = plan.total_tokens - plan.num_drafts - sequences
        if prefill_tokens >= MIN_PREFILL_TOKENS:
            self._prefill_rate.add(prefill_tokens, seconds)
        elif sequences and not prefill_tokens:
            accepted = sum(len(tokens) - 1 for tokens in result.windows.values())
            self._decode_fit.add(sequences, seconds * sequences / max(1, sequences + accepted))

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second in steps with prefill, whatever else they compute. 0 means not measured yet."""
        return self._prefill_rate.units_per_s

    def inter_token_s(self, sequences: int) -> float:
        """Return the seconds between tokens of each of `sequences` running sequences. 0 means not measured yet."""
        return self._decode_fit.predict(sequences)
