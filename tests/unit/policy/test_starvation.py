"""Nobody waits for ever: whoever else keeps asking, at whatever rank, with whatever deadlines."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.policy import DispatchQueue, QueuedRequest, lowest_admissible_tier

ANSWER_S = 0.5
"""Between two answers that end."""


def served(seats: int, floods: Sequence[int], rare: int | None, ends: Sequence[int]) -> list[int]:
    """Who gets the seats, by tier, in ten minutes in which `floods` always wait, `rare` asks now and then.

    `ends` says which of those that run ends next.
    """
    queue, running, asked = DispatchQueue[int](), list[int](), [-math.inf] * 3
    got, now, waiting = [0, 0, 0], 0.0, [0, 0, 0]

    def push(tier: int) -> None:
        asked[tier] = now
        waiting[tier] += 1
        queue.push(QueuedRequest(0, tier, "tenant", 1.0, 100.0, now))

    for tick in range(1200):
        now = tick * ANSWER_S
        for tier in floods:
            for _ in range(seats + 20 - waiting[tier]):
                push(tier)
        if rare is not None and tick % 50 == 0:
            push(rare)
        if running:
            running.pop(ends[tick % len(ends)] % len(running))
        while True:
            busy = [running.count(tier) for tier in range(3)]
            one = queue.pop(
                now, lowest_admissible_tier([seats - len(running)] * 3, seats, busy, asked, now)
            )
            if one is None:
                break
            running.append(one.tier)
            waiting[one.tier] -= 1
            got[one.tier] += 1
    return got


SEATS = st.sampled_from([1, 2, 7, 8, 9, 16, 32, 64])
ENDS = st.lists(st.integers(0, 63), min_size=1, max_size=9)


@settings(max_examples=40, deadline=None)
@given(SEATS, ENDS)
def test_every_tier_is_served_while_all_of_them_ask_without_end(
    seats: int, ends: list[int]
) -> None:
    assert min(served(seats, (0, 1, 2), None, ends)) >= 40


@settings(max_examples=40, deadline=None)
@given(SEATS, ENDS, st.permutations([0, 1, 2]))
def test_who_asks_now_and_then_keeps_nobody_out_for_ever(
    seats: int, ends: list[int], tiers: list[int]
) -> None:
    *floods, rare = tiers
    got = served(seats, floods, rare, ends)
    assert min(got[tier] for tier in floods) >= 40
    assert got[rare] >= 8


@given(
    st.floats(0.1, 86_400.0),
    st.integers(1, 5),
)
def test_those_in_a_hurry_do_not_keep_their_tenants_others_waiting_for_ever(
    timeout_s: float, ahead: int
) -> None:
    queue, now = DispatchQueue[int](), 0.0
    queue.push(QueuedRequest(0, 1, "tenant", 1.0, 100.0, now))
    for _ in range(ahead):
        queue.push(QueuedRequest(1, 1, "tenant", 1.0, 100.0, now, now + timeout_s))
    while now <= 60.0:
        now += 1.0
        queue.push(QueuedRequest(1, 1, "tenant", 1.0, 100.0, now, now + timeout_s))
        one = queue.pop(now)
        assert one is not None
        if one.item == 0:
            break
    assert now <= 31.0 + ahead  # after those of half a minute, one a second
