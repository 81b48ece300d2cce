"""How long an answer will be, going by those before it: the 90th percentile, followed in a single number."""

from __future__ import annotations

from collections.abc import Hashable

TARGET_QUANTILE = 0.9
STEP_UP = 1.5
STEP_DOWN = STEP_UP ** -((1 - TARGET_QUANTILE) / TARGET_QUANTILE)
"""In balance when one answer in ten is longer: then steps up and steps down come out even."""
MAX_CALLERS = 10_000
"""Of whom lengths are remembered; beyond, those forgotten first are the ones not seen for longest."""


class OutputLengthEstimator:
    """Tokens that answers had, by who asked which model."""

    def __init__(self) -> None:
        self._lengths: dict[Hashable, float] = {}

    def estimate(self, caller_key: Hashable, max_tokens: int | None, default_tokens: int) -> int:
        """Tokens that an answer will hardly exceed: at most `most`, and `default` where nothing is known."""
        length = self._lengths.get(caller_key, default_tokens)
        return max_tokens if max_tokens is not None and max_tokens <= length else round(length)

    def observe(self, caller_key: Hashable, tokens: int, default_tokens: int) -> None:
        """An answer came to its end after so many tokens: its own, or the most that it was allowed."""
        length = self._lengths.pop(caller_key, float(default_tokens))
        self._lengths[caller_key] = max(1.0, length * (STEP_UP if tokens > length else STEP_DOWN))
        if len(self._lengths) > MAX_CALLERS:
            del self._lengths[next(iter(self._lengths))]
