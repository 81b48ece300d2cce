"""Quota meters: a sliding window keeps its limit in any interval of its length; days and months follow the calendar."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

from hypothesis import example, given
from hypothesis import strategies as st

from argosy.policy import (
    CalendarPeriod,
    ClockOffset,
    ConcurrencyMeter,
    LeaseGrant,
    SlidingWindow,
    WindowLease,
    calendar_bounds,
)

SECONDS = st.sampled_from([1.0, 60.0, 3600.0])
PAUSES = st.sampled_from([0.0, 0.5, 1.5, 29.5, 59.0, 59.5, 60.5]) | st.floats(0, 40)
"""Pauses in sixtieths of a window. Units that expire too early are missing in the last sixtieth."""
STEPS = st.lists(st.tuples(PAUSES, st.integers(0, 12)), max_size=60)
LIMIT = st.integers(1, 20)
DATES = st.datetimes(datetime(1971, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001 - hypothesis takes naive bounds
EPSILON_S = 1e-6
DAY_S = 86_400.0
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC).timestamp()


@given(st.lists(st.tuples(st.integers(0, 240), st.integers(0, 12)), max_size=20), SECONDS)
def test_usage_counts_for_the_window_length_and_little_longer(
    steps: list[tuple[int, int]], seconds: float
) -> None:
    window, uses, now = SlidingWindow(100, seconds), list[tuple[int, int]](), 2400
    for pause, units in [*steps, *[(1, 0)] * 250]:
        now += pause
        at = (now + 0.5) * seconds / 240  # never on the boundary of two slots
        window.add(units, at)
        uses.append((now, units))
        assert window.used >= sum(units for then, units in uses if then > now - 240)
        assert window.used <= sum(units for then, units in uses if then > now - 244)
        assert window.remaining(at) == 100 - window.used


@given(STEPS, LIMIT, LIMIT, SECONDS)
def test_wait_is_exactly_as_long_as_needed(
    steps: list[tuple[float, int]], limit: int, requested: int, seconds: float
) -> None:
    window, now = SlidingWindow(limit, seconds), 1000.0
    for pause, units in steps:
        now += pause * seconds / 60
        window.add(min(units, window.remaining(now)), now)
    wait = window.wait_s(requested, now)
    if requested > limit:
        assert wait == math.inf
    else:
        assert wait <= seconds * 61 / 60
        assert wait == 0.0 or window.remaining(now + wait - EPSILON_S) < requested
        assert window.remaining(now + wait + EPSILON_S) >= requested


@given(st.lists(st.tuples(PAUSES, st.integers(0, 2), st.booleans()), max_size=60), SECONDS)
def test_reset_is_exactly_when_all_units_are_free(
    steps: list[tuple[float, int, bool]], seconds: float
) -> None:
    window, now = SlidingWindow(1000, seconds), 1000.0
    for pause, units, refunded in steps:
        now += pause * seconds / 60
        slot = window.add(units, now)
        if refunded:
            assert window.adjust(slot, -units, now)
    reset = window.reset_s(now)
    assert reset == 0.0 or window.remaining(now + reset - EPSILON_S) < 1000
    assert window.remaining(now + reset + EPSILON_S) == 1000


@given(st.lists(st.tuples(st.floats(0, 400), st.integers(0, 60)), max_size=60))
def test_seeded_window_expires_usage_gradually_and_never_early(
    steps: list[tuple[float, int]],
) -> None:
    now, uses = 10_000.0, list[tuple[float, int]]()
    for pause, units in steps:
        now += pause
        uses.append((now, units))
    window = SlidingWindow(10**6, 3600.0)
    seed_points = window.seed_points(now)
    sums = [sum(units for at, units in uses if at >= moment) for moment in seed_points]
    usage = [more - less for more, less in zip(sums, [*sums[1:], 0], strict=True)]
    window.add(1, now)  # while the ledger is read
    uses.append((now, 1))
    window.seed(zip([*seed_points[1:], now], usage, strict=True), now)
    assert not window.needs_seed
    for later in range(0, 5000, 50):
        window.remaining(now + later)
        since = now + later - 3600.0
        assert window.used >= sum(units for at, units in uses if at > since)
        assert window.used <= sum(units for at, units in uses if at > since - 600.0 - 120.0)
    assert window.used == 0


def test_clock_that_steps_back_frees_no_units() -> None:
    window = SlidingWindow(10, 60.0)
    window.add(6, 1000.0)
    slot = window.add(3, 500.0)
    assert window.remaining(500.0) == 1
    assert window.adjust(slot, -3, 500.0)
    assert window.remaining(1000.0) == 4
    assert window.remaining(1062.0) == 10
    assert not window.adjust(slot, -3, 1062.0)
    assert window.remaining(1062.0) == 10


@given(DATES)
def test_day_and_month_are_calendar_periods(moment: datetime) -> None:
    now = moment.timestamp()
    day, following = (datetime.fromtimestamp(at, UTC) for at in calendar_bounds("day", now))
    assert day <= moment < following == day + timedelta(days=1)
    assert (day.hour, day.minute, day.second, day.microsecond) == (0, 0, 0, 0)
    first, next_first = (datetime.fromtimestamp(at, UTC) for at in calendar_bounds("month", now))
    assert first <= moment < next_first
    assert (first.day, next_first.day, first.hour, next_first.hour) == (1, 1, 0, 0)
    assert first.month == moment.month != next_first.month


def test_daily_budget_renews_at_midnight_and_late_refunds_are_ignored() -> None:
    midnight = datetime(2026, 11, 22, tzinfo=UTC).timestamp()
    budget = CalendarPeriod(100, "day")
    assert budget.needs_seed
    assert budget.reset_s(midnight - 100.0) == 0.0
    budget.seed([(midnight - 100.0, 20)], midnight - 100.0)
    assert not budget.needs_seed
    yesterday = budget.add(70, midnight - 60.0)
    wait_times = [budget.wait_s(units, midnight - 1.0) for units in (10, 11, 100, 101)]
    assert wait_times == [0.0, 1.0, 1.0, math.inf]
    assert budget.reset_s(midnight - 1.0) == 1.0
    assert budget.remaining(midnight) == 100
    assert not budget.adjust(yesterday, -70, midnight)
    today = budget.add(10, midnight + 1.0)
    assert budget.adjust(today, -4, midnight + 2.0)
    assert budget.used == 6
    assert budget.seed_points(midnight + 2.0) == (midnight,)


@example(
    [(-3600.0, 3600.0, 1, 0), (-50_400.0, 3600.0, 0, 0), (DAY_S, 3600.0, 1, 0), (-DAY_S, 0.0, 0, 0)]
)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, -900.0, 900.0, -3600.0, 7200.0, -DAY_S, DAY_S, -50_400.0]),
            st.floats(0, 3 * 3600),
            st.integers(0, 9),
            st.integers(0, 4),
        ),
        max_size=40,
    )
)
def test_day_follows_the_wall_clock_and_counts_all_usage_once(
    steps: list[tuple[float, float, int, int]],
) -> None:
    """A step sets the clock, lets time pass, and reserves units of which it returns some later."""
    clock, now, day = ClockOffset(), NOON, -1.0
    budget = CalendarPeriod(10**6, "day", clock)
    used_by_day: dict[float, int] = {}
    last_day: tuple[float, int] | None = None
    for step_s, pause_s, units, returned in steps:
        now += pause_s
        clock.offset_s -= step_s
        today, tomorrow = calendar_bounds("day", now - clock.offset_s)
        if today > day:
            last_day, day = (day, used_by_day.get(day, 0)), today
            used_by_day[day] = 0
        elif today < day:  # what was used in the later day was used in this one
            known = last_day[1] if last_day is not None and last_day[0] == today else 0
            used_by_day[today] = known + used_by_day[day]
            last_day, day = None, today
        slot = budget.add(units, now)
        assert budget.adjust(slot, -min(returned, units), now)
        used_by_day[day] += units - min(returned, units)
        assert budget.used == used_by_day[day]
        assert budget.wait_s(10**6, now) == (
            tomorrow - (now - clock.offset_s) if budget.used else 0
        )


def test_budget_of_a_clock_that_was_ahead_counts_the_true_day() -> None:
    """The ledger has what the day used before; what this gateway used since its start counts once."""
    clock, now = ClockOffset(), NOON + 14 * 3600.0
    budget = CalendarPeriod(100, "day", clock)
    started_at = budget.seed_points(now)[0]
    budget.seed([(now, 0)], now)
    slot = budget.add(7, now)
    clock.offset_s = 14 * 3600.0  # the clock is put right
    assert budget.wait_s(100, now) == 12 * 3600.0
    assert budget.needs_seed
    points = [at - clock.offset_s for at in budget.seed_points(now)]
    assert points == [NOON - 12 * 3600.0, started_at]
    budget.seed([(budget.seed_points(now)[1], 20), (now, 7)], now)
    assert budget.used == 27
    assert budget.adjust(slot, -3, now)
    assert budget.used == 24
    assert budget.remaining(now + 12 * 3600.0) == 100


def test_shared_budget_owes_the_true_day_what_a_wrong_day_used() -> None:
    clock, now = ClockOffset(), NOON + 14 * 3600.0
    budget = WindowLease("budget", CalendarPeriod(100, "day", clock))
    request = budget.build_request(now)
    budget.apply_grant(request, LeaseGrant(10, request.slot, 10, 0.0, 0.0, known=True), now, now)
    budget.add(7, now)
    clock.offset_s = 14 * 3600.0
    assert budget.wait_s(100, now) == 12 * 3600.0
    today = NOON - 12 * 3600.0
    request = budget.build_request(now)
    assert (budget.name, request.slot, request.owed) == (f"budget:{today:.0f}", today, ((0.0, 7),))


def test_seed_of_a_past_period_is_ignored() -> None:
    midnight = datetime(2026, 12, 1, tzinfo=UTC).timestamp()
    for budget in (
        CalendarPeriod(100, "month"),
        WindowLease("budget", CalendarPeriod(100, "month")),
    ):
        (since,) = budget.seed_points(midnight - 0.1)
        assert since == datetime(2026, 11, 1, tzinfo=UTC).timestamp()
        assert budget.remaining(midnight + 0.1) in {0, 100}  # while the ledger is read
        budget.seed([(midnight - 0.1, 90)], midnight + 0.1)
        if isinstance(budget, WindowLease):
            budget.request_units(1)
            assert budget.build_request(midnight + 0.2).seeds == ()
        else:
            assert budget.remaining(midnight + 0.2) == 100


def test_concurrency_slots_are_freed_when_requests_end() -> None:
    meter = ConcurrencyMeter(2)
    slot = meter.add(1, 0.0)
    meter.add(1, 0.0)
    assert (meter.remaining(0.0), meter.wait_s(2, 0.0), meter.reset_s(0.0)) == (0, 0.0, 0.0)
    meter.adjust(slot, -1, 0.0)
    assert (meter.remaining(0.0), meter.wait_s(3, 0.0)) == (1, math.inf)
