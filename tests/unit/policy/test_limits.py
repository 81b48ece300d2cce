"""Limits: no interval of a window's length ever holds more than the limit, and nothing is lost or counted twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import Concurrency, Refusal, Reservation, Scope, Window, reserve

STEPS = st.lists(st.tuples(st.floats(0, 40), st.integers(0, 60)), max_size=60)


@given(STEPS, st.integers(1, 100))
def test_no_interval_of_the_windows_length_holds_more_than_the_limit(
    steps: list[tuple[float, int]], limit: int
) -> None:
    window, now, uses = Window(limit, 60.0), 1000.0, list[tuple[float, int]]()
    for pause, units in steps:
        now += pause
        if units <= window.room(now):
            window.add(units, now)
            uses.append((now, units))
    for end, _ in uses:
        assert sum(units for at, units in uses if end - 60.0 < at <= end) <= limit


@given(STEPS, st.integers(1, 100), st.integers(1, 100))
def test_after_the_wait_there_is_room_and_a_moment_before_there_was_not(
    steps: list[tuple[float, int]], limit: int, asked: int
) -> None:
    window, now = Window(limit, 60.0), 1000.0
    for pause, units in steps:
        now += pause
        window.add(min(units, max(0, window.room(now))), now)
    wait = window.wait_s(asked, now)
    if asked > limit:
        assert wait == float("inf")
    else:
        assert wait <= 61.0
        assert wait == 0.0 or window.room(now + wait / 2) < asked
        assert window.room(now + wait + 1e-6) >= asked


def test_everything_is_free_again_after_the_reset() -> None:
    window = Window(10, 60.0)
    window.add(7, 100.0)
    assert window.room(100.0 + window.reset_s(100.0) + 1e-6) == 10
    assert Window(10, 60.0).reset_s(5.0) == 0.0


def scope(tokens: int, requests: int = 10, slots: int = 10) -> Scope:
    return Scope(
        "acme",
        requests=[Window(requests, 60.0)],
        tokens=[Window(tokens, 60.0)],
        concurrency=Concurrency(slots),
    )


def test_all_scopes_are_reserved_or_none() -> None:
    wide, narrow = scope(1000), scope(50)
    refusal = reserve([wide, narrow], 100, 0, 0.0)
    assert isinstance(refusal, Refusal)
    assert (refusal.kind, refusal.limit, refusal.asked) == ("tokens", 50, 100)
    assert wide.tokens[0].used == wide.requests[0].used == 0
    assert wide.concurrency is not None
    assert wide.concurrency.used == 0


def test_what_was_not_used_comes_back_at_the_end_and_an_abandoned_request_costs_nothing() -> None:
    limits = scope(100)
    held = reserve([limits], 80, 0, 0.0)
    assert isinstance(held, Reservation)
    assert isinstance(reserve([limits], 30, 0, 0.0), Refusal)
    held.settle(20, 0, 1.0)
    held.settle(90, 0, 1.0)
    assert (limits.tokens[0].used, limits.requests[0].used) == (20, 1)
    other = reserve([limits], 80, 0, 1.0)
    assert isinstance(other, Reservation)
    other.abandon(2.0)
    assert (limits.tokens[0].used, limits.requests[0].used) == (20, 1)


def test_one_at_a_time_means_one_at_a_time() -> None:
    limits = scope(100, slots=1)
    held = reserve([limits], 1, 0, 0.0)
    assert isinstance(held, Reservation)
    refusal = reserve([limits], 1, 0, 0.0)
    assert isinstance(refusal, Refusal)
    assert refusal.kind == "concurrency"
    held.settle(1, 0, 0.0)
    assert isinstance(reserve([limits], 1, 0, 0.0), Reservation)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), max_size=80), st.integers(1, 60))
def test_streams_that_stop_at_the_first_refusal_pass_a_limit_by_a_chunk_each_at_most(
    chunks: list[tuple[int, int]], limit: int
) -> None:
    limits, streams, used = scope(limit), dict[int, Reservation](), dict[int, int]()
    for stream, size in chunks:
        if stream not in streams:
            held = reserve([limits], 2, 0, 0.0)
            if isinstance(held, Refusal):
                continue
            streams[stream], used[stream] = held, 0
        if used[stream] < 0:
            continue  # stopped
        refused = streams[stream].charge(used[stream] + size, 0, 0.0)
        used[stream] = -1 if refused else used[stream] + size
    assert limits.tokens[0].used <= limit + 9 * len(streams)


@given(
    st.lists(
        st.tuples(st.integers(0, 200), st.integers(0, 300), st.floats(0, 100), st.booleans()),
        max_size=30,
    )
)
def test_in_the_end_what_is_counted_is_what_was_used(
    requests: list[tuple[int, int, float, bool]],
) -> None:
    limits, now = scope(10**9, requests=10**9), 0.0
    total = count = 0
    for estimate, used, lasts, dropped in requests:
        held = reserve([limits], estimate, 0, now)
        assert isinstance(held, Reservation)
        if dropped:
            held.abandon(now)
            continue
        held.charge(used // 2, 0, now)
        held.settle(used, 0, now + lasts / 1000)
        total, count = total + used, count + 1
    assert limits.tokens[0].used == total
    assert limits.requests[0].used == count
    assert limits.concurrency is not None
    assert limits.concurrency.used == 0
