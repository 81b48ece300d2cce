"""Backfill: the window beside online requests, shares of owners, and batches that may not end in time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import BackfillWindow, Backlog, BatchPace, LineShares, PoolLoad

IDLE = PoolLoad(16, 16, 0, 0, 0, 0.0)
COST = 100.0


def grow(window: BackfillWindow, load: PoolLoad, seconds: int) -> list[int]:
    return [window.update(load, float(second)) for second in range(seconds)]


def test_window_doubles_each_second_and_falls_at_once() -> None:
    window = BackfillWindow()
    assert grow(window, IDLE, 6) == [1, 2, 4, 8, 16, 16]
    busy = PoolLoad(16, 4, 0, 12, 0, 0.0)
    assert window.update(busy, 6.0) == 2  # an eighth of the slots stays free
    assert window.update(replace(busy, online_waiting=1), 6.1) == 0
    assert window.update(IDLE, 6.2) == 1


def test_window_keeps_as_many_slots_free_as_the_last_peak_used() -> None:
    window = BackfillWindow()
    grow(window, IDLE, 6)
    window.update(PoolLoad(16, 6, 0, 10, 0, 0.0), 10.0)
    calm = PoolLoad(16, 15, 0, 1, 0, 0.0)
    sizes = [window.update(calm, 11.0 + second) for second in range(80)]
    assert max(sizes[:59]) == 6  # 15 free slots without the 9 that the peak used besides
    assert sizes[-1] == 13


def test_no_line_starts_while_the_kv_cache_is_almost_full() -> None:
    window = BackfillWindow()
    grow(window, IDLE, 6)
    assert window.update(replace(IDLE, kv_usage=0.9), 6.0) == 0


@given(
    costs=st.lists(st.floats(1.0, COST), min_size=2, max_size=5),
    counts=st.lists(st.integers(1, 7), min_size=30, max_size=60),
)
def test_owners_with_lines_get_equal_tokens_within_two_quanta(
    costs: list[float], counts: list[int]
) -> None:
    shares = LineShares()
    backlogs = [
        Backlog(f"owner{number}", f"batch{number}", 0.0, 10_000, cost)
        for number, cost in enumerate(costs)
    ]
    tokens = dict.fromkeys((each.batch for each in backlogs), 0.0)
    for count in counts:
        chosen = shares.choose(backlogs, count)
        assert sum(chosen.values()) == count, "lines wait although there is room"
        for each in backlogs:
            tokens[each.batch] += chosen.get(each.batch, 0) * each.cost_tokens
    assert max(tokens.values()) - min(tokens.values()) <= 2 * max(costs)


def test_earliest_deadline_of_an_owner_comes_first() -> None:
    backlogs = [Backlog("a", "late", 9.0, 5, COST), Backlog("a", "soon", 3.0, 2, COST)]
    assert LineShares().choose(backlogs, 4) == {"soon": 2, "late": 2}
    assert LineShares().choose([], 4) == {}


@pytest.mark.parametrize(("time_left_s", "is_at_risk"), [(1000.0, False), (100.0, True)])
def test_batch_is_at_risk_once_its_pace_does_not_suffice(
    time_left_s: float, is_at_risk: bool
) -> None:
    pace = BatchPace()
    pace.record(300, 0.0)
    assert not pace.is_at_risk(time_left_s)  # too early
    pace.record(240, 60.0)
    assert pace.is_at_risk(time_left_s) == is_at_risk
