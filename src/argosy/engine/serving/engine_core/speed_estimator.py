"""How fast the engine is, measured step by step: what a router needs to foretell a request's time here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from argosy.policy import EwmaRate, OnlineLinearFit

if TYPE_CHECKING:
    from argosy.engine.scheduling import StepDurations, StepPlan

MIN_PREFILL_TOKENS = 64
"""A step with fewer prompt tokens says more of its fixed cost than of the rate."""
PREFILL_HALF_LIFE_TOKENS = 8192.0
DECODE_HALF_LIFE_STEPS = 64.0


class SpeedEstimator:
    """Prefill in tokens a second, decodes in seconds a step by how many sequences run."""

    def __init__(self) -> None:
        self._prefill_rate = EwmaRate(PREFILL_HALF_LIFE_TOKENS)
        self._decode_fit = OnlineLinearFit(DECODE_HALF_LIFE_STEPS)

    def record_step(self, plan: StepPlan, durations: StepDurations) -> None:
        """One more step."""
        seconds = sum(durations)
        decodes = plan.counts.count(1)
        prefill = plan.total_tokens - decodes
        if prefill >= MIN_PREFILL_TOKENS:
            self._prefill_rate.add(prefill, seconds)
        elif decodes and not prefill:
            self._decode_fit.add(decodes, seconds)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens a second while prompts are computed, whatever else runs beside; 0: not measured."""
        return self._prefill_rate.units_per_s

    def inter_token_s(self, sequences: int) -> float:
        """Seconds between the tokens of each of so many sequences; 0: not measured."""
        return self._decode_fit.predict(sequences)
