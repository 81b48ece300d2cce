"""Token prices by model and tier over time, in whole nano-dollars."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from argosy.protocol import TokenUsage


class PriceEntry(Protocol):
    """Stored price of a model's tokens, valid from a point in time."""

    @property
    def model(self) -> str:
        """Public name of the model."""

    @property
    def tier(self) -> str | None:
        """Tier; None for every tier that has no price of its own."""

    @property
    def input(self) -> int:
        """Nano-dollars per input token that was not cached."""

    @property
    def cached_input(self) -> int:
        """Nano-dollars per cached input token."""

    @property
    def output(self) -> int:
        """Nano-dollars per output token."""

    @property
    def since(self) -> float:
        """Start of validity in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Nano-dollars per token that one request pays; fixed when the request begins."""

    input: int
    cached_input: int
    output: int

    def cost_nano_dollars(self, usage: TokenUsage) -> int:
        """Return the cost in nano-dollars."""
        uncached = usage.uncached_tokens
        cached = usage.prompt_tokens - uncached
        return (
            uncached * self.input + cached * self.cached_input + usage.output_tokens * self.output
        )


NO_CHARGE = Rates(0, 0, 0)

RateHistory = tuple[list[float], list[Rates]]
"""Times of change in ascending order, and the rates before the first change and after each."""
NO_RATE_HISTORY: RateHistory = ([], [NO_CHARGE])


class PriceList:
    """All past, present and future prices."""

    def __init__(self, prices: Iterable[PriceEntry] = ()) -> None:
        self._rates: dict[tuple[str, str | None], RateHistory] = {}
        for price in sorted(prices, key=lambda price: (price.tier is not None, price.since)):
            key = price.model, price.tier
            if key not in self._rates:
                # Before its own first price, a tier pays the price for all tiers.
                times, rates = self._rates.get((price.model, None), NO_RATE_HISTORY)
                count_before = bisect_left(times, price.since)
                self._rates[key] = times[:count_before], rates[: count_before + 1]
            times, rates = self._rates[key]
            times.append(price.since)
            rates.append(Rates(price.input, price.cached_input, price.output))

    def rates_at(self, model: str, tier: str, now: float) -> Rates:
        """Return the newest rates of the tier that are valid at `now`.

        A tier without own prices pays the rates for all tiers. Without any price the tokens are free.
        """
        times, rates = self._rates.get((model, tier)) or self._rates.get(
            (model, None), NO_RATE_HISTORY
        )
        return rates[bisect_right(times, now)]
