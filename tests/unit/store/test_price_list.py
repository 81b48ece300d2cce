"""Price lists: the newest valid price applies, a tier's own price before the general one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import NO_CHARGE, Rates
from argosy.store import Price, PriceList

NANO = st.integers(0, 10**7)
PRICES = st.lists(
    st.builds(
        Price,
        model=st.sampled_from("ab"),
        tier=st.sampled_from([None, "free", "premium"]),
        input=NANO,
        cached_input=NANO,
        output=NANO,
        since=st.integers(0, 20).map(float),
    ),
    max_size=12,
    unique_by=lambda price: (price.model, price.tier, price.since),
)


@given(PRICES, st.sampled_from("abc"), st.sampled_from(["free", "premium"]), st.floats(-1, 25))
def test_newest_valid_price_applies_and_tier_price_goes_first(
    prices: list[Price], model: str, tier: str, now: float
) -> None:
    valid = [p for p in prices if p.model == model and p.since <= now]
    tier_prices = [p for p in valid if p.tier == tier]
    general_prices = [p for p in valid if p.tier is None]
    price = max(tier_prices or general_prices, key=lambda price: price.since, default=None)
    expected = NO_CHARGE if price is None else Rates(price.input, price.cached_input, price.output)
    assert PriceList(prices).rates_at(model, tier, now) == expected
