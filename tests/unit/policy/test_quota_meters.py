"""Counters: no interval of a window's length ever holds more than the limit; a day and a month are the calendar's."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import (
    CalendarPeriod,
    ConcurrencyMeter,
    SlidingWindow,
    WindowLease,
    calendar_bounds,
)

SECONDS = st.sampled_from([1.0, 60.0, 3600.0])
PAUSE = st.sampled_from([0.0, 0.5, 1.5, 29.5, 59.0, 59.5, 60.5]) | st.floats(0, 40)
"""Sixtieths of a window: what is forgotten a moment too soon is missed in the last of them."""
STEPS = st.lists(st.tuples(PAUSE, st.integers(0, 12)), max_size=60)
LIMIT = st.integers(1, 20)
MOMENTS = st.datetimes(datetime(1971, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001 - hypothesis wants them so
SHORTLY_S = 1e-6


@given(st.lists(st.tuples(st.integers(0, 240), st.integers(0, 12)), max_size=20), SECONDS)
def test_what_was_used_counts_for_the_windows_length_and_hardly_longer(
    steps: list[tuple[int, int]], seconds: float
) -> None:
    """So no interval of that length holds more than the limit."""
    window, uses, now = SlidingWindow(100, seconds), list[tuple[int, int]](), 2400
    for pause, units in [*steps, *[(1, 0)] * 250]:
        now += pause
        at = (now + 0.5) * seconds / 240  # never where two slots meet
        window.add(units, at)
        uses.append((now, units))
        assert window.used >= sum(units for then, units in uses if then > now - 240)
        assert window.used <= sum(units for then, units in uses if then > now - 244)
        assert window.remaining(at) == 100 - window.used


@given(STEPS, LIMIT, LIMIT, SECONDS)
def test_after_the_wait_there_is_room_and_a_moment_before_there_was_not(
    steps: list[tuple[float, int]], limit: int, asked: int, seconds: float
) -> None:
    window, now = SlidingWindow(limit, seconds), 1000.0
    for pause, units in steps:
        now += pause * seconds / 60
        window.add(min(units, window.remaining(now)), now)
    wait = window.wait_s(asked, now)
    if asked > limit:
        assert wait == math.inf
    else:
        assert wait <= seconds * 61 / 60
        assert wait == 0.0 or window.remaining(now + wait - SHORTLY_S) < asked
        assert window.remaining(now + wait + SHORTLY_S) >= asked


@given(st.lists(st.tuples(PAUSE, st.integers(0, 2), st.booleans()), max_size=60), SECONDS)
def test_everything_is_free_again_after_the_reset_and_a_moment_before_it_was_not(
    steps: list[tuple[float, int, bool]], seconds: float
) -> None:
    window, now = SlidingWindow(1000, seconds), 1000.0
    for pause, units, given_back in steps:
        now += pause * seconds / 60
        slot = window.add(units, now)
        if given_back:
            assert window.adjust(slot, -units, now)
    reset = window.reset_s(now)
    assert reset == 0.0 or window.remaining(now + reset - SHORTLY_S) < 1000
    assert window.remaining(now + reset + SHORTLY_S) == 1000


@given(st.lists(st.tuples(st.floats(0, 400), st.integers(0, 60)), max_size=60))
def test_a_window_that_is_told_what_was_used_forgets_it_as_gradually_and_never_sooner(
    steps: list[tuple[float, int]],
) -> None:
    now, uses = 10_000.0, list[tuple[float, int]]()
    for pause, units in steps:
        now += pause
        uses.append((now, units))
    window = SlidingWindow(10**6, 3600.0)
    moments = window.seed_points(now)
    sums = [sum(units for at, units in uses if at >= moment) for moment in moments]
    parts = [more - less for more, less in zip(sums, [*sums[1:], 0], strict=True)]
    window.add(1, now)  # while the ledger is read
    uses.append((now, 1))
    window.seed(zip([*moments[1:], now], parts, strict=True), now)
    assert not window.needs_seed
    for later in range(0, 5000, 50):
        window.remaining(now + later)
        since = now + later - 3600.0
        assert window.used >= sum(units for at, units in uses if at > since)
        assert window.used <= sum(units for at, units in uses if at > since - 600.0 - 120.0)
    assert window.used == 0


def test_a_clock_that_goes_back_frees_nothing_and_stops_nothing() -> None:
    window = SlidingWindow(10, 60.0)
    window.add(6, 1000.0)
    slot = window.add(3, 500.0)
    assert window.remaining(500.0) == 1
    assert window.adjust(slot, -3, 500.0)
    assert window.remaining(1000.0) == 4
    assert window.remaining(1062.0) == 10
    assert not window.adjust(slot, -3, 1062.0)
    assert window.remaining(1062.0) == 10


@given(MOMENTS)
def test_a_day_and_a_month_are_those_of_the_calendar(moment: datetime) -> None:
    now = moment.timestamp()
    day, following = (datetime.fromtimestamp(at, UTC) for at in calendar_bounds("day", now))
    assert day <= moment < following == day + timedelta(days=1)
    assert (day.hour, day.minute, day.second, day.microsecond) == (0, 0, 0, 0)
    first, next_first = (datetime.fromtimestamp(at, UTC) for at in calendar_bounds("month", now))
    assert first <= moment < next_first
    assert (first.day, next_first.day, first.hour, next_first.hour) == (1, 1, 0, 0)
    assert first.month == moment.month != next_first.month


def test_a_budget_is_renewed_at_midnight_and_what_is_given_back_later_is_yesterdays() -> None:
    midnight = datetime(2026, 11, 22, tzinfo=UTC).timestamp()
    budget = CalendarPeriod(100, "day")
    assert budget.needs_seed
    assert budget.reset_s(midnight - 100.0) == 0.0
    budget.seed([(midnight - 100.0, 20)], midnight - 100.0)
    assert not budget.needs_seed
    yesterday = budget.add(70, midnight - 60.0)
    waits = [budget.wait_s(units, midnight - 1.0) for units in (10, 11, 100, 101)]
    assert waits == [0.0, 1.0, 1.0, math.inf]
    assert budget.reset_s(midnight - 1.0) == 1.0
    assert budget.remaining(midnight) == 100
    assert not budget.adjust(yesterday, -70, midnight)
    today = budget.add(10, midnight + 1.0)
    assert budget.adjust(today, -4, midnight + 2.0)
    assert budget.used == 6
    assert budget.seed_points(midnight + 2.0) == (midnight,)


def test_what_was_used_yesterday_is_not_counted_today_when_it_is_told_only_then() -> None:
    midnight = datetime(2026, 12, 1, tzinfo=UTC).timestamp()
    for budget in (
        CalendarPeriod(100, "month"),
        WindowLease("budget", CalendarPeriod(100, "month")),
    ):
        (since,) = budget.seed_points(midnight - 0.1)
        assert since == datetime(2026, 11, 1, tzinfo=UTC).timestamp()
        assert budget.remaining(midnight + 0.1) in {
            0,
            100,
        }  # somebody asks while the ledger is read
        budget.seed([(midnight - 0.1, 90)], midnight + 0.1)
        if isinstance(budget, WindowLease):
            budget.request_units(1)
            assert budget.build_request(midnight + 0.2).seeds == ()
        else:
            assert budget.remaining(midnight + 0.2) == 100


def test_what_was_given_back_is_free_at_once() -> None:
    window = SlidingWindow(10, 60.0)
    window.seed([(40.0, 0), (50.0, 0), (100.0, 0)], 100.0)
    assert window.reset_s(100.0) == 0.0
    used, given_back = window.add(3, 100.0), window.add(4, 110.0)
    assert window.adjust(given_back, -4, 111.0)
    assert window.reset_s(111.0) == 50.0
    assert window.adjust(used, -3, 112.0)
    assert window.reset_s(112.0) == 0.0


def test_what_runs_at_a_time_comes_back_as_it_ends() -> None:
    places = ConcurrencyMeter(2)
    slot = places.add(1, 0.0)
    places.add(1, 0.0)
    assert (places.remaining(0.0), places.wait_s(2, 0.0), places.reset_s(0.0)) == (0, 0.0, 0.0)
    places.adjust(slot, -1, 0.0)
    assert (places.remaining(0.0), places.wait_s(3, 0.0)) == (1, math.inf)
