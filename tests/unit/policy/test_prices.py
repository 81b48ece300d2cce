"""Prices: the newest that holds, the tier's own before the general one, and whole numbers all the way."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import NO_CHARGE, PriceList, Rates


@dataclass(frozen=True)
class Price:
    model: str
    tier: str | None
    input: int
    cached_input: int
    output: int
    since: float


NANO = st.integers(0, 10**7)
COUNT = st.integers(0, 10**7)
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
def test_the_newest_price_that_holds_is_paid_and_the_tiers_own_goes_first(
    prices: list[Price], model: str, tier: str, now: float
) -> None:
    holding = [p for p in prices if p.model == model and p.since <= now]
    own = [p for p in holding if p.tier == tier]
    general = [p for p in holding if p.tier is None]
    paid = max(own or general, key=lambda price: price.since, default=None)
    expected = NO_CHARGE if paid is None else Rates(paid.input, paid.cached_input, paid.output)
    assert PriceList(prices).rates_at(model, tier, now) == expected


@given(st.builds(Rates, NANO, NANO, NANO), COUNT, COUNT, COUNT, COUNT)
def test_every_token_is_paid_once(
    rates: Rates, fresh: int, cached: int, output: int, more: int
) -> None:
    cost = rates.cost_nano_dollars(fresh + cached, cached, output)
    assert cost == fresh * rates.input + cached * rates.cached_input + output * rates.output
    assert (
        rates.cost_nano_dollars(fresh + cached, cached, output + more) == cost + more * rates.output
    )
    assert rates.cost_nano_dollars(fresh, fresh + more, 0) == fresh * rates.cached_input


def test_a_model_without_a_price_costs_nothing() -> None:
    assert PriceList().rates_at("any", "standard", 1.0).cost_nano_dollars(10, 2, 10) == 0
