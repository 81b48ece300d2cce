"""The seats of a replica among gateways that know of each other by its reports: in use, not crowded, even, in order."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.policy import slot_share

COUNTS = st.dictionaries(st.integers(0, 4), st.integers(0, 40), max_size=3)


class World:
    """Gateways that always want more, each in one tier, and what they have at a replica."""

    def __init__(self, seats: int, tiers: list[int], seed: int) -> None:
        self.seats = seats
        self.tiers = tiers
        self.there = [0] * len(tiers)
        self._draws = random.Random(seed)

    def fill(self, gateway: int) -> None:
        """A report comes to a gateway, and it sends what it may."""
        others = [
            {tier: count}
            for number, (tier, count) in enumerate(zip(self.tiers, self.there, strict=True))
            if number != gateway and count
        ]
        most = slot_share(self.seats, others, self.tiers[gateway])
        self.there[gateway] = max(self.there[gateway], most)

    def turn(self) -> None:
        """An answer ends; its gateway knows at once, the others hear of it, one after the other."""
        running = Counter({number: count for number, count in enumerate(self.there) if count})
        if running:
            (ended,) = self._draws.sample(list(running), 1, counts=list(running.values()))
            self.there[ended] -= 1
            self.fill(ended)
        for gateway in self._draws.sample(range(len(self.tiers)), len(self.tiers)):
            self.fill(gateway)


@settings(max_examples=200)
@given(
    seats=st.integers(1, 40),
    tiers=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    seed=st.integers(0, 2**32),
)
def test_all_seats_are_in_use_hardly_any_twice_and_come_to_be_even(
    seats: int, tiers: list[int], seed: int
) -> None:
    world = World(seats, tiers, seed)
    most = seats + max(1, seats // 4) + len(tiers) - 1
    for _ in range(60 * seats):
        world.turn()
        assert seats <= sum(world.there) <= most
    highest = [world.there[n] for n, tier in enumerate(tiers) if tier == min(tiers)]
    assert sum(highest) >= seats
    assert max(highest) - min(highest) <= max(2, len(highest))
    assert sum(world.there) == sum(highest)


def test_one_alone_has_all_and_idle_gateways_cost_nothing() -> None:
    assert [slot_share(8, [], tier) for tier in range(3)] == [8, 8, 8]
    assert [slot_share(8, [{1: 1}], tier) for tier in range(3)] == [8, 7, 7]


def test_who_comes_late_need_not_wait_for_an_answer_to_end() -> None:
    assert slot_share(64, [{1: 64}], 1) == 16
    assert slot_share(8, [{1: 8}], 1) == 2
    assert slot_share(1, [{1: 1}, {1: 1}, {1: 1}], 1) == 1


def test_a_higher_tier_goes_before_and_a_lower_one_makes_way() -> None:
    assert slot_share(8, [{2: 8}], 0) == 2
    assert slot_share(8, [{0: 2, 2: 8}], 2) == 0
    assert slot_share(8, [{0: 8}], 2) == 0


@given(seats=st.integers(1, 300), others=st.lists(COUNTS, max_size=5))
def test_no_tier_has_fewer_than_a_lower_one(seats: int, others: list[dict[int, int]]) -> None:
    parts = [slot_share(seats, others, tier) for tier in range(3)]
    assert parts == sorted(parts, reverse=True)
    assert all(0 <= most <= seats for most in parts)


@given(st.lists(st.dictionaries(st.integers(), st.integers(0)), max_size=3))
def test_nonsense_is_worth_no_more_than_the_seats(others: list[dict[int, int]]) -> None:
    assert 0 <= slot_share(8, others, 1) <= 8
