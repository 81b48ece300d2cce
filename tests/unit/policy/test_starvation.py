"""No queued request starves, whatever arrives beside it, at any tier and with any deadline."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.queued_requests import NumberedRequest, queued

from argosy.policy import DispatchQueue, lowest_admissible_tier, promote_after_s

RESPONSE_INTERVAL_S = 0.5
"""Time between two responses that end."""


def served_by_tier(
    slots: int, flooding_tiers: Sequence[int], rare_tier: int | None, ended_indexes: Sequence[int]
) -> list[int]:
    """Return how many requests of each tier are served within ten minutes.

    `flooding_tiers` always have waiting requests, `rare_tier` sometimes. `ended_indexes` picks the requests that end.
    """
    queue, running, last_arrival = DispatchQueue[NumberedRequest](), list[int](), [-math.inf] * 3
    served, now, waiting = [0, 0, 0], 0.0, [0, 0, 0]

    def push(tier: int) -> None:
        last_arrival[tier] = now
        waiting[tier] += 1
        queue.push(queued(tier=tier, arrival=now))

    for tick in range(1200):
        now = tick * RESPONSE_INTERVAL_S
        for tier in flooding_tiers:
            for _ in range(slots + 20 - waiting[tier]):
                push(tier)
        if rare_tier is not None and tick % 50 == 0:
            push(rare_tier)
        if running:
            running.pop(ended_indexes[tick % len(ended_indexes)] % len(running))
        while True:
            busy = [running.count(tier) for tier in range(3)]
            dispatched = queue.pop(
                now,
                lowest_admissible_tier([slots - len(running)] * 3, slots, busy, last_arrival, now),
            )
            if dispatched is None:
                break
            running.append(dispatched.tier)
            waiting[dispatched.tier] -= 1
            served[dispatched.tier] += 1
    return served


SLOTS = st.sampled_from([1, 2, 7, 8, 9, 16, 32, 64])
ENDED_INDEXES = st.lists(st.integers(0, 63), min_size=1, max_size=9)


@settings(max_examples=15)
@given(SLOTS, ENDED_INDEXES)
def test_every_tier_is_served_while_all_are_saturated(slots: int, ended_indexes: list[int]) -> None:
    assert min(served_by_tier(slots, (0, 1, 2), None, ended_indexes)) >= 40


@settings(max_examples=15)
@given(SLOTS, ENDED_INDEXES, st.permutations([0, 1, 2]))
def test_rare_tier_neither_starves_nor_blocks_saturated_tiers(
    slots: int, ended_indexes: list[int], tiers: list[int]
) -> None:
    *flooding_tiers, rare_tier = tiers
    served = served_by_tier(slots, flooding_tiers, rare_tier, ended_indexes)
    assert min(served[tier] for tier in flooding_tiers) >= 40
    assert served[rare_tier] >= 8


@given(
    st.floats(0.1, 86_400.0),
    st.integers(1, 5),
)
def test_urgent_deadlines_do_not_starve_a_tenants_other_requests(
    timeout_s: float, earlier_requests: int
) -> None:
    queue, now = DispatchQueue[NumberedRequest](), 0.0
    queue.push(queued(arrival=now))
    for _ in range(earlier_requests):
        queue.push(queued(1, arrival=now, deadline=now + timeout_s))
    while now <= 60.0:
        now += 1.0
        queue.push(queued(1, arrival=now, deadline=now + timeout_s))
        dispatched = queue.pop(now)
        assert dispatched is not None
        if dispatched.item == 0:
            break
    assert now <= 31.0 + earlier_requests  # behind the requests of half a minute, one per second


@given(
    st.sampled_from([1, 2]),
    st.floats(0.5, 3600.0),
    st.integers(4, 200),
    st.integers(0, 7),
)
def test_request_of_a_lower_tier_is_served_before_its_wait_ends(
    tier: int, max_wait_s: float, turns: int, earlier_turns: int
) -> None:
    """Requests of the highest tier always wait, and `turns` slots become free within the longest wait."""
    assert promote_after_s(tier, max_wait_s) <= max_wait_s / 2
    queue = DispatchQueue[NumberedRequest](max_wait_s)
    for turn in range(-earlier_turns, turns + 1):
        now = max_wait_s * turn / turns
        queue.push(queued(tier=0, tenant="flood", arrival=now))
        if turn == 0:
            queue.push(queued(1, tier=tier, tenant="patient", arrival=now))
        dispatched = queue.pop(now)
        assert dispatched is not None
        if dispatched.item == 1:
            break
    assert now < max_wait_s


@given(st.floats(1.0, 59.0))
def test_urgent_deadlines_do_not_outlast_a_short_wait(max_wait_s: float) -> None:
    queue = DispatchQueue[NumberedRequest](max_wait_s)
    queue.push(queued())
    for turn in range(1, 9):
        now = max_wait_s * turn / 8
        queue.push(queued(1, arrival=now, deadline=now + max_wait_s / 8))
        dispatched = queue.pop(now)
        assert dispatched is not None
        if dispatched.item == 0:
            break
    assert now < max_wait_s
