"""What tokens cost, in whole nano-dollars, by model and tier."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class PriceEntry(Protocol):
    """A price as it is kept: what a model's tokens cost from a moment on."""

    @property
    def model(self) -> str:
        """Public name."""

    @property
    def tier(self) -> str | None:
        """None: for every tier that has no price of its own."""

    @property
    def input(self) -> int:
        """Nano-dollars for each token that was not cached."""

    @property
    def cached_input(self) -> int:
        """For each that was."""

    @property
    def output(self) -> int:
        """For each token of the answer."""

    @property
    def since(self) -> float:
        """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Nano-dollars a token, as one request pays them: fixed when it begins."""

    input: int
    cached_input: int
    output: int

    def cost_nano_dollars(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        """Nano-dollars; the cached tokens are among those of the input."""
        cached = min(cached_tokens, input_tokens)
        fresh = input_tokens - cached
        return fresh * self.input + cached * self.cached_input + output_tokens * self.output


NO_CHARGE = Rates(0, 0, 0)

RateHistory = tuple[list[float], list[Rates]]
"""Moments, in order, and the rates before the first of them and from each on."""
NO_RATE_HISTORY: RateHistory = ([], [NO_CHARGE])


class PriceList:
    """All prices, past and to come."""

    def __init__(self, prices: Iterable[PriceEntry] = ()) -> None:
        self._rates: dict[tuple[str, str | None], RateHistory] = {}
        for price in sorted(prices, key=lambda price: (price.tier is not None, price.since)):
            key = price.model, price.tier
            if key not in self._rates:
                # Before a tier's first price of its own, it pays what all tiers do.
                times, rates = self._rates.get((price.model, None), NO_RATE_HISTORY)
                before = bisect_left(times, price.since)
                self._rates[key] = times[:before], rates[: before + 1]
            times, rates = self._rates[key]
            times.append(price.since)
            rates.append(Rates(price.input, price.cached_input, price.output))

    def rates_at(self, model: str, tier: str, now: float) -> Rates:
        """The tier's own newest rates that hold by `now`, else those for all tiers; no price: no charge."""
        times, rates = self._rates.get((model, tier)) or self._rates.get(
            (model, None), NO_RATE_HISTORY
        )
        return rates[bisect_right(times, now)]
