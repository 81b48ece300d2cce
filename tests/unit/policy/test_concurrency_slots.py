"""Slot shares of gateways that know of each other from a replica's reports, and slots reserved for higher tiers.

Shares use all slots with little excess, and fairly. Reservations are few, only while those tiers are active, and never
all of a replica's slots.
"""

from __future__ import annotations

import math
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.policy import lowest_admissible_tier, no_reservation_active, slot_share

COUNTS = st.dictionaries(st.integers(0, 4), st.integers(0, 40), max_size=3)


class ReplicaWithGateways:
    """A replica and its saturated gateways, each of one tier, with the number of requests that each runs."""

    def __init__(self, slots: int, tiers: list[int], seed: int) -> None:
        self.slots = slots
        self.tiers = tiers
        self.running = [0] * len(tiers)
        self._draws = random.Random(seed)

    def report_to(self, gateway: int) -> None:
        """Deliver a report to a gateway, which fills its share."""
        others = [
            {tier: count}
            for number, (tier, count) in enumerate(zip(self.tiers, self.running, strict=True))
            if number != gateway and count
        ]
        max_concurrency = slot_share(self.slots, others, self.tiers[gateway])
        self.running[gateway] = max(self.running[gateway], max_concurrency)

    def finish_one(self) -> None:
        """End one request. Its gateway knows at once, the others by reports in random order."""
        busy = Counter({number: count for number, count in enumerate(self.running) if count})
        if busy:
            (ended,) = self._draws.sample(list(busy), 1, counts=list(busy.values()))
            self.running[ended] -= 1
            self.report_to(ended)
        for gateway in self._draws.sample(range(len(self.tiers)), len(self.tiers)):
            self.report_to(gateway)


@settings(max_examples=20)
@given(
    slots=st.integers(1, 40),
    tiers=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    seed=st.integers(0, 2**32),
)
def test_slots_are_all_used_with_little_excess_and_converge_to_equal_shares(
    slots: int, tiers: list[int], seed: int
) -> None:
    replica = ReplicaWithGateways(slots, tiers, seed)
    max_concurrency = slots + max(1, slots // 4) + len(tiers) - 1
    for _ in range(60 * slots):
        replica.finish_one()
        assert slots <= sum(replica.running) <= max_concurrency
    highest_tier = [replica.running[n] for n, tier in enumerate(tiers) if tier == min(tiers)]
    assert sum(highest_tier) >= slots
    assert max(highest_tier) - min(highest_tier) <= max(2, len(highest_tier))
    assert sum(replica.running) == sum(highest_tier)


def test_lone_gateway_gets_all_slots_and_idle_gateways_reserve_none() -> None:
    assert [slot_share(8, [], tier) for tier in range(3)] == [8, 8, 8]
    assert [slot_share(8, [{1: 1}], tier) for tier in range(3)] == [8, 7, 7]


def test_late_gateway_gets_a_share_at_once() -> None:
    assert slot_share(64, [{1: 64}], 1) == 16
    assert slot_share(8, [{1: 8}], 1) == 2
    assert slot_share(1, [{1: 1}, {1: 1}, {1: 1}], 1) == 1


def test_higher_tier_goes_first_and_lower_tier_yields() -> None:
    assert slot_share(8, [{2: 8}], 0) == 2
    assert slot_share(8, [{0: 2, 2: 8}], 2) == 0
    assert slot_share(8, [{0: 8}], 2) == 0


@given(slots=st.integers(1, 300), others=st.lists(COUNTS, max_size=5))
def test_share_never_grows_towards_lower_tiers(slots: int, others: list[dict[int, int]]) -> None:
    shares = [slot_share(slots, others, tier) for tier in range(3)]
    assert shares == sorted(shares, reverse=True)
    assert all(0 <= max_concurrency <= slots for max_concurrency in shares)


@given(st.lists(st.dictionaries(st.integers(), st.integers(0)), max_size=3))
def test_invalid_counts_never_exceed_the_slots(others: list[dict[int, int]]) -> None:
    assert 0 <= slot_share(8, others, 1) <= 8


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
