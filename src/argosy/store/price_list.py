"""Token prices by model and tier over time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from argosy.policy import NO_CHARGE, Rates
from argosy.store.records import Price

RateHistory = tuple[list[float], list[Rates]]
"""Times of change in ascending order, and the rates before the first change and after each."""
NO_RATE_HISTORY: RateHistory = ([], [NO_CHARGE])


class PriceList:
    """All past, present and future prices."""

    def __init__(self, prices: Iterable[Price] = ()) -> None:
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
