"""Counters: no interval of a window's length ever holds more than the limit; a day and a month are the calendar's."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import Concurrency, Lease, Period, Window, period

STEPS = st.lists(st.tuples(st.floats(0, 40), st.integers(0, 60)), max_size=60)
MOMENTS = st.datetimes(datetime(1971, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001 - hypothesis wants them so


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
        assert wait == math.inf
    else:
        assert wait <= 61.0
        assert wait == 0.0 or window.room(now + wait / 2) < asked
        assert window.room(now + wait + 1e-6) >= asked


def test_everything_is_free_again_after_the_reset() -> None:
    window = Window(10, 60.0)
    window.add(7, 100.0)
    assert window.room(100.0 + window.reset_s(100.0) + 1e-6) == 10
    assert Window(10, 60.0).reset_s(5.0) == 0.0


@given(STEPS)
def test_a_window_that_is_told_what_was_used_forgets_it_as_gradually_and_never_sooner(
    steps: list[tuple[float, int]],
) -> None:
    first, now, uses = Window(10**6, 3600.0), 10_000.0, list[tuple[float, int]]()
    for pause, units in steps:
        now += pause
        first.add(units, now)
        uses.append((now, units))
    second = Window(10**6, 3600.0)
    moments = second.since(now)
    sums = [sum(units for at, units in uses if at >= moment) for moment in moments]
    parts = [more - less for more, less in zip(sums, [*sums[1:], 0], strict=True)]
    second.recall(zip([*moments[1:], now], parts, strict=True), now)
    for later in range(0, 5000, 50):
        there = first.room(now + later) - second.room(now + later)
        assert there >= 0
        assert second.used <= sum(
            units for at, units in uses if at > now + later - 3600.0 * 7 / 6 - 120.0
        )
    assert second.used == 0


def test_a_clock_that_goes_back_frees_nothing_and_stops_nothing() -> None:
    window = Window(10, 60.0)
    window.add(6, 1000.0)
    slot = window.add(3, 500.0)
    assert window.room(500.0) == 1
    assert window.correct(slot, -3, 500.0)
    assert window.room(1000.0) == 4
    assert window.room(1062.0) == 10


@given(MOMENTS)
def test_a_day_and_a_month_are_those_of_the_calendar(moment: datetime) -> None:
    now = moment.timestamp()
    day, following = (datetime.fromtimestamp(at, UTC) for at in period("day", now))
    assert day <= moment < following == day + timedelta(days=1)
    assert (day.hour, day.minute, day.second, day.microsecond) == (0, 0, 0, 0)
    first, next_first = (datetime.fromtimestamp(at, UTC) for at in period("month", now))
    assert first <= moment < next_first
    assert (first.day, next_first.day, first.hour, next_first.hour) == (1, 1, 0, 0)
    assert first.month == moment.month != next_first.month


def test_a_budget_is_renewed_at_midnight_and_what_is_given_back_later_is_yesterdays() -> None:
    midnight = datetime(2026, 11, 22, tzinfo=UTC).timestamp()
    budget = Period(100, "day")
    budget.recall([(midnight - 100.0, 20)], midnight - 100.0)
    assert budget.unknown is False
    yesterday = budget.add(70, midnight - 60.0)
    assert budget.room(midnight - 1.0) == 100 - 70
    assert budget.wait_s(31, midnight - 1.0) == 1.0
    assert budget.wait_s(101, midnight - 1.0) == math.inf
    assert budget.room(midnight) == 100
    assert not budget.correct(yesterday, -70, midnight)
    today = budget.add(10, midnight + 1.0)
    assert budget.correct(today, -4, midnight + 2.0)
    assert budget.used == 6
    assert budget.since(midnight + 2.0) == (midnight,)


def test_what_was_used_yesterday_is_not_counted_today_when_it_is_told_only_then() -> None:
    midnight = datetime(2026, 12, 1, tzinfo=UTC).timestamp()
    for budget in (Period(100, "month"), Lease("budget", Period(100, "month"))):
        (since,) = budget.since(midnight - 0.1)
        assert since == datetime(2026, 11, 1, tzinfo=UTC).timestamp()
        assert budget.room(midnight + 0.1) in {0, 100}  # somebody asks while the ledger is read
        budget.recall([(midnight - 0.1, 90)], midnight + 0.1)
        if isinstance(budget, Lease):
            budget.want(1)
            assert budget.ask(midnight + 0.2).seeds == ()
        else:
            assert budget.room(midnight + 0.2) == 100


def test_what_was_given_back_is_free_at_once() -> None:
    window = Window(10, 60.0)
    window.recall([(40.0, 0), (50.0, 0), (100.0, 0)], 100.0)
    assert window.reset_s(100.0) == 0.0
    used, given_back = window.add(3, 100.0), window.add(4, 110.0)
    assert window.correct(given_back, -4, 111.0)
    assert window.reset_s(111.0) == 50.0
    assert window.correct(used, -3, 112.0)
    assert window.reset_s(112.0) == 0.0


def test_what_runs_at_a_time_comes_back_as_it_ends() -> None:
    places = Concurrency(2)
    slot = places.add(1, 0.0)
    places.add(1, 0.0)
    assert (places.room(0.0), places.wait_s(1, 0.0)) == (0, 0.0)
    places.correct(slot, -1, 0.0)
    assert (places.room(0.0), places.wait_s(3, 0.0)) == (1, math.inf)
