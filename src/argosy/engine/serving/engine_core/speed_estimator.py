"""How fast the engine is, measured step by step: what a router needs to foretell a request's time here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from argosy.policy import Line, Rate

if TYPE_CHECKING:
    from argosy.engine.scheduling import Durations, Plan

LEAST_PREFILL = 64
"""A step with fewer prompt tokens says more of its fixed cost than of the rate."""
PREFILL_HALF_LIFE = 8192.0
DECODE_HALF_LIFE = 64.0


class Speed:
    """Prefill in tokens a second, decodes in seconds a step by how many sequences run."""

    def __init__(self) -> None:
        self._prefill = Rate(PREFILL_HALF_LIFE)
        self._decode = Line(DECODE_HALF_LIFE)

    def add(self, plan: Plan, durations: Durations) -> None:
        """One more step."""
        seconds = sum(durations)
        decodes = plan.counts.count(1)
        prefill = plan.tokens - decodes
        if prefill >= LEAST_PREFILL:
            self._prefill.add(prefill, seconds)
        elif decodes and not prefill:
            self._decode.add(decodes, seconds)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens a second while prompts are computed, whatever else runs beside; 0: not measured."""
        return self._prefill.per_s

    def decode_s(self, sequences: int) -> float:
        """Seconds between the tokens of each of so many sequences; 0: not measured."""
        return self._decode.at(sequences)
