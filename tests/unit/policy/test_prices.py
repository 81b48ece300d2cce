"""Prices: every token is charged once, in whole nano-dollars."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import Rates
from argosy.protocol import TokenUsage

NANO = st.integers(0, 10**7)
COUNT = st.integers(0, 10**7)


@given(st.builds(Rates, NANO, NANO, NANO), COUNT, COUNT, COUNT, COUNT)
def test_every_token_is_charged_once(
    rates: Rates, uncached: int, cached: int, output: int, extra: int
) -> None:
    cost = rates.cost_nano_dollars(TokenUsage(uncached + cached, cached, output))
    assert cost == uncached * rates.input + cached * rates.cached_input + output * rates.output
    assert (
        rates.cost_nano_dollars(TokenUsage(uncached + cached, cached, output + extra))
        == cost + extra * rates.output
    )
    all_cached = TokenUsage(uncached, uncached + extra)
    assert rates.cost_nano_dollars(all_cached) == uncached * rates.cached_input
