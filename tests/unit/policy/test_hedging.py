"""Second attempts keep to their budget and out of everybody's way, whatever comes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import Hedging
from argosy.policy.hedging import RESERVE, SHARE, SPARE

SEATS = 40


def take(hedging: Hedging, now: float = 0.0) -> bool:
    """With all the room there could be."""
    return hedging.take(now, waiting=0, free=SEATS, seats=SEATS, saturated=0.0)


@given(st.lists(st.booleans(), max_size=300))
def test_they_never_exceed_the_share_and_the_reserve(events: list[bool]) -> None:
    hedging, requests, hedges = Hedging(1.0), 0, 0
    for stuck in events:
        if stuck:
            hedges += take(hedging)
        else:
            hedging.request(0.0)
            requests += 1
        assert hedges <= RESERVE + SHARE * requests


@given(
    st.integers(0, 3),
    st.integers(0, SEATS),
    st.sampled_from((0.0, 0.01, 1.0)),
)
def test_they_go_only_where_there_is_room_to_spare_and_refusals_cost_nothing(
    waiting: int, free: int, saturated: float
) -> None:
    hedging = Hedging(1.0)
    spare = waiting == 0 and saturated == 0.0 and free >= SPARE * SEATS
    asked = hedging.take(0.0, waiting=waiting, free=free, seats=SEATS, saturated=saturated)
    assert asked == spare
    assert sum(take(hedging) for _ in range(5)) == RESERVE - spare


@given(st.floats(0.01, 1e6))
def test_a_pool_without_seats_gets_none(now: float) -> None:
    assert not Hedging(1.0).take(now, waiting=0, free=0, seats=0, saturated=0.0)


def test_the_budget_comes_back_with_time() -> None:
    hedging = Hedging(1.0)
    assert [take(hedging, now) for now in (0.0, 0.0, 1.0, 1000.0)] == [True, True, False, True]


def test_one_in_twenty_requests_may_be_sent_twice_and_one_free_seat_in_four_is_enough() -> None:
    hedging = Hedging(1.0)
    for _ in range(100):
        hedging.request(0.0)
    took = [
        hedging.take(0.0, waiting=0, free=1, seats=seats, saturated=0.0)
        for seats in (*[4] * 7, 5, 4)
    ]
    assert took == [*[True] * 7, False, False]
