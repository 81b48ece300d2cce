"""Estimate of a response's length as the 90th percentile of earlier responses, tracked in one number per caller.

A longer response multiplies the estimate by `STEP_UP`, a shorter one multiplies it by `STEP_DOWN`.
"""

from __future__ import annotations

from collections.abc import Hashable

STEP_UP = 1.5
STEP_DOWN = 0.9559480784229751
"""Factor that balances `STEP_UP` when one response in ten is longer than the estimate: `STEP_UP` ** (-1 / 9)."""
MAX_CALLERS = 10_000
"""Callers with a remembered estimate; beyond that, the least recently observed one is dropped."""


class OutputLengthEstimator:
    """Estimates of output tokens by caller and model."""

    def __init__(self) -> None:
        self._lengths: dict[Hashable, float] = {}

    def estimate(self, caller_key: Hashable, max_tokens: int | None, default_tokens: int) -> int:
        """Return the output tokens that a response will rarely exceed.

        Args:
            caller_key: Caller and model.
            max_tokens: Token limit of the request, which also limits the estimate.
            default_tokens: Estimate for a caller without observations.
        """
        length = self._lengths.get(caller_key, default_tokens)
        return max_tokens if max_tokens is not None and max_tokens <= length else round(length)

    def observe(self, caller_key: Hashable, tokens: int, default_tokens: int) -> None:
        """Record a response that ended after `tokens`, by itself or at its token limit."""
        length = self._lengths.pop(caller_key, float(default_tokens))
        self._lengths[caller_key] = max(1.0, length * (STEP_UP if tokens > length else STEP_DOWN))
        if len(self._lengths) > MAX_CALLERS:
            del self._lengths[next(iter(self._lengths))]
