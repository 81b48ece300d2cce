"""How long an answer will be, going by those before it: the 90th percentile, followed in a single number."""

from __future__ import annotations

from collections.abc import Hashable

SHARE = 0.9
UP = 1.5
DOWN = UP ** -((1 - SHARE) / SHARE)
"""In balance when one answer in ten is longer: then steps up and steps down come out even."""
MOST = 10_000
"""Of whom lengths are remembered; beyond, those forgotten first are the ones not seen for longest."""


class OutputEstimates:
    """Tokens that answers had, by who asked which model."""

    def __init__(self) -> None:
        self._lengths: dict[Hashable, float] = {}

    def expected(self, asker: Hashable, most: int | None, default: int) -> int:
        """Tokens that an answer will hardly exceed: at most `most`, and `default` where nothing is known."""
        length = self._lengths.get(asker, default)
        return most if most is not None and most <= length else round(length)

    def learn(self, asker: Hashable, tokens: int, default: int) -> None:
        """An answer came to its end after so many tokens: its own, or the most that it was allowed."""
        length = self._lengths.pop(asker, float(default))
        self._lengths[asker] = max(1.0, length * (UP if tokens > length else DOWN))
        if len(self._lengths) > MOST:
            del self._lengths[next(iter(self._lengths))]
