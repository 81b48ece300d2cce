"""Slots reserved for higher tiers: few, only while those tiers are active, and never all of a replica's slots."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import lowest_admissible_tier, no_reservation_active

NEVER = -math.inf
LONG_AGO = -1000.0


def test_all_slots_are_open_without_higher_tiers() -> None:
    assert lowest_admissible_tier([1] * 3, 64, [0, 63, 0], [NEVER, 0.0, NEVER], 0.0) == 2
    assert lowest_admissible_tier([1] * 3, 64, [0, 0, 63], [LONG_AGO, NEVER, 0.0], 0.0) == 2
    assert lowest_admissible_tier([0] * 3, 64, [0, 64, 0], [0.0, 0.0, 0.0], 0.0) == -1


def test_an_eighth_is_reserved_for_each_recently_active_higher_tier() -> None:
    assert lowest_admissible_tier([8] * 3, 64, [0, 56, 0], [0.0, 0.0, NEVER], 1.0) == 0
    assert lowest_admissible_tier([9] * 3, 64, [0, 55, 0], [0.0, 0.0, NEVER], 1.0) == 2
    assert lowest_admissible_tier([16] * 3, 64, [8, 20, 0], [0.0, 0.0, 0.0], 1.0) == 1
    assert lowest_admissible_tier([17] * 3, 64, [8, 20, 0], [0.0, 0.0, 0.0], 1.0) == 2


def test_no_reservation_for_a_tier_with_half_of_the_slots() -> None:
    assert lowest_admissible_tier([1] * 3, 64, [32, 31, 0], [0.0, 0.0, NEVER], 0.0) == 1
    assert lowest_admissible_tier([4] * 3, 64, [30, 30, 0], [0.0, 0.0, NEVER], 0.0) == 1
    assert lowest_admissible_tier([2] * 3, 64, [30, 32, 0], [0.0, 0.0, NEVER], 0.0) == 0
    assert lowest_admissible_tier([4] * 3, 64, [40, 20, 0], [0.0, 0.0, 0.0], 0.0) == 1


@given(st.integers(1, 300), st.tuples(*[st.integers(0, 100)] * 3), st.integers(0, 300))
def test_more_free_slots_never_exclude_a_tier_and_idle_replica_admits_all(
    slots: int, running: tuple[int, int, int], free: int
) -> None:
    last_arrivals = [0.0, 0.0, 0.0]
    assert lowest_admissible_tier([slots] * 3, slots, [0, 0, 0], last_arrivals, 0.0) == 2
    admitted = lowest_admissible_tier([free] * 3, slots, running, last_arrivals, 0.0)
    for tier in range(3):
        without_higher = [NEVER if higher < tier else 0.0 for higher in range(3)]
        assert no_reservation_active(tier, without_higher, 0.0)
        assert (
            lowest_admissible_tier([free] * 3, slots, running, without_higher, 0.0) >= tier
        ) == (free > 0)
    assert not no_reservation_active(2, [NEVER, 0.0, NEVER], 0.0)
    assert admitted <= lowest_admissible_tier([free + 1] * 3, slots, running, last_arrivals, 0.0)
    assert (admitted == -1) == (free == 0)
