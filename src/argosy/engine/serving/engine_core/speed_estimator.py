"""Measured speed of the engine, from which routers predict a request's completion time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from argosy.policy import EwmaRate, OnlineLinearFit

if TYPE_CHECKING:
    from argosy.engine.scheduling import StepDurations, StepPlan

MIN_PREFILL_TOKENS = 64
"""Steps with fewer prompt tokens are ignored, because their fixed cost dominates."""
PREFILL_HALF_LIFE_TOKENS = 8192.0
DECODE_HALF_LIFE_STEPS = 64.0


class SpeedEstimator:
    """Estimates the prefill rate in tokens per second, and the decode step time by the number of sequences."""

    def __init__(self) -> None:
        self._prefill_rate = EwmaRate(PREFILL_HALF_LIFE_TOKENS)
        self._decode_fit = OnlineLinearFit(DECODE_HALF_LIFE_STEPS)

    def record_step(self, plan: StepPlan, durations: StepDurations) -> None:
        """Add the measurement of one step."""
        seconds = sum(durations)
        decode_tokens = plan.counts.count(1)
        prefill_tokens = plan.total_tokens - decode_tokens
        if prefill_tokens >= MIN_PREFILL_TOKENS:
            self._prefill_rate.add(prefill_tokens, seconds)
        elif decode_tokens and not prefill_tokens:
            self._decode_fit.add(decode_tokens, seconds)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second in steps with prefill, whatever else they compute. 0 means not measured yet."""
        return self._prefill_rate.units_per_s

    def inter_token_s(self, sequences: int) -> float:
        """Return the seconds between tokens of each of `sequences` running sequences. 0 means not measured yet."""
        return self._decode_fit.predict(sequences)
