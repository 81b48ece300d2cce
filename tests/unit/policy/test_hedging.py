"""Second attempts keep to their budget and out of everybody's way, whatever comes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import Hedging
from argosy.policy.hedging import HEDGE_RATIO, HEDGE_RESERVE, MIN_FREE_FRACTION

SEATS = 40


def take(hedging: Hedging, now: float = 0.0) -> bool:
    """With all the room there could be."""
    return hedging.try_acquire(now, queued=0, free_slots=SEATS, total_slots=SEATS, saturation=0.0)


@given(st.lists(st.booleans(), max_size=300))
def test_they_never_exceed_the_share_and_the_reserve(events: list[bool]) -> None:
    hedging, requests, hedges = Hedging(1.0), 0, 0
    for stuck in events:
        if stuck:
            hedges += take(hedging)
        else:
            hedging.record_request(0.0)
            requests += 1
        assert hedges <= HEDGE_RESERVE + HEDGE_RATIO * requests


@given(
    st.integers(0, 3),
    st.integers(0, SEATS),
    st.sampled_from((0.0, 0.01, 1.0)),
)
def test_they_go_only_where_there_is_room_to_spare_and_refusals_cost_nothing(
    waiting: int, free: int, saturated: float
) -> None:
    hedging = Hedging(1.0)
    spare = waiting == 0 and saturated == 0.0 and free >= MIN_FREE_FRACTION * SEATS
    asked = hedging.try_acquire(
        0.0, queued=waiting, free_slots=free, total_slots=SEATS, saturation=saturated
    )
    assert asked == spare
    assert sum(take(hedging) for _ in range(5)) == HEDGE_RESERVE - spare


@given(st.floats(0.01, 1e6))
def test_a_pool_without_seats_gets_none(now: float) -> None:
    assert not Hedging(1.0).try_acquire(now, queued=0, free_slots=0, total_slots=0, saturation=0.0)


def test_the_budget_comes_back_with_time() -> None:
    hedging = Hedging(1.0)
    assert [take(hedging, now) for now in (0.0, 0.0, 1.0, 1000.0)] == [True, True, False, True]


def test_one_in_twenty_requests_may_be_sent_twice_and_one_free_seat_in_four_is_enough() -> None:
    hedging = Hedging(1.0)
    for _ in range(100):
        hedging.record_request(0.0)
    took = [
        hedging.try_acquire(0.0, queued=0, free_slots=1, total_slots=seats, saturation=0.0)
        for seats in (*[4] * 7, 5, 4)
    ]
    assert took == [*[True] * 7, False, False]
