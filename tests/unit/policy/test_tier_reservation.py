"""Seats kept for higher tiers: so few, so long, and never so many that anybody is shut out."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import lowest_admissible_tier, no_reservation_active

NEVER = -math.inf
LONG_AGO = -1000.0


def test_without_higher_tiers_about_every_seat_is_for_everybody() -> None:
    assert lowest_admissible_tier([1] * 3, 64, [0, 63, 0], [NEVER, 0.0, NEVER], 0.0) == 2
    assert lowest_admissible_tier([1] * 3, 64, [0, 0, 63], [LONG_AGO, NEVER, 0.0], 0.0) == 2
    assert lowest_admissible_tier([0] * 3, 64, [0, 64, 0], [0.0, 0.0, 0.0], 0.0) == -1


def test_an_eighth_is_kept_for_each_higher_tier_that_has_asked_lately() -> None:
    assert lowest_admissible_tier([8] * 3, 64, [0, 56, 0], [0.0, 0.0, NEVER], 1.0) == 0
    assert lowest_admissible_tier([9] * 3, 64, [0, 55, 0], [0.0, 0.0, NEVER], 1.0) == 2
    assert lowest_admissible_tier([16] * 3, 64, [8, 20, 0], [0.0, 0.0, 0.0], 1.0) == 1
    assert lowest_admissible_tier([17] * 3, 64, [8, 20, 0], [0.0, 0.0, 0.0], 1.0) == 2


def test_a_tier_that_has_half_of_the_seats_waits_like_others() -> None:
    assert lowest_admissible_tier([1] * 3, 64, [32, 31, 0], [0.0, 0.0, NEVER], 0.0) == 1
    assert lowest_admissible_tier([4] * 3, 64, [30, 30, 0], [0.0, 0.0, NEVER], 0.0) == 1
    assert lowest_admissible_tier([2] * 3, 64, [30, 32, 0], [0.0, 0.0, NEVER], 0.0) == 0
    assert lowest_admissible_tier([4] * 3, 64, [40, 20, 0], [0.0, 0.0, 0.0], 0.0) == 1


@given(st.integers(1, 300), st.tuples(*[st.integers(0, 100)] * 3), st.integers(0, 300))
def test_more_room_never_shuts_out_and_idle_replicas_take_everybody(
    seats: int, running: tuple[int, int, int], free: int
) -> None:
    asked = [0.0, 0.0, 0.0]
    assert lowest_admissible_tier([seats] * 3, seats, [0, 0, 0], asked, 0.0) == 2
    less = lowest_admissible_tier([free] * 3, seats, running, asked, 0.0)
    for tier in range(3):
        unasked = [NEVER if higher < tier else 0.0 for higher in range(3)]
        assert no_reservation_active(tier, unasked, 0.0)
        assert (lowest_admissible_tier([free] * 3, seats, running, unasked, 0.0) >= tier) == (
            free > 0
        )
    assert not no_reservation_active(2, [NEVER, 0.0, NEVER], 0.0)
    assert less <= lowest_admissible_tier([free + 1] * 3, seats, running, asked, 0.0)
    assert (less == -1) == (free == 0)
