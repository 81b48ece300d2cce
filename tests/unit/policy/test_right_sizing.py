"""Advice on the number of replicas, and the cost that a month will have."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import SizeVerdict, advise_size, forecast_month

STEP_S = 900
DAY = 96  # steps


@pytest.mark.parametrize(
    ("replicas", "concurrency", "verdict", "advised"),
    [
        (6, [20.0] * DAY + [0.5] * 7, SizeVerdict.OVERSIZED, 4),
        (4, [20.0] * DAY + [0.5] * 8, SizeVerdict.IDLE, 0),
        (6, [20.0] * DAY + [0.5] * 4 + [None] + [0.5] * 4, SizeVerdict.OVERSIZED, 4),
        (4, [20.0] * DAY + [30.0], SizeVerdict.FITS, 4),
        (4, [20.0] * 95, SizeVerdict.UNKNOWN, 4),
        (4, [70.0], SizeVerdict.UNDERSIZED, 8),
        (1, [15.0], SizeVerdict.UNDERSIZED, 2),
        (1, [1.0] * DAY, SizeVerdict.FITS, 1),
        (2, [2.0] * DAY, SizeVerdict.FITS, 2),
        (2, [], SizeVerdict.UNKNOWN, 2),
    ],
)
def test_advice_follows_the_busiest_step_and_the_latest_hours(
    replicas: int, concurrency: list[float | None], verdict: SizeVerdict, advised: int
) -> None:
    advice = advise_size(replicas, 16 * replicas, concurrency, STEP_S)
    assert (advice.verdict, advice.advised_replicas) == (verdict, advised)


@given(st.integers(1, 50), st.lists(st.none() | st.floats(0, 2000), max_size=200))
def test_advised_replicas_have_room_for_the_busiest_step(
    replicas: int, concurrency: list[float | None]
) -> None:
    advice = advise_size(replicas, 16 * replicas, concurrency, STEP_S)
    peak = max((value for value in concurrency if value is not None), default=0.0)
    match advice.verdict:
        case SizeVerdict.OVERSIZED:
            assert 2 <= advice.advised_replicas < replicas
            assert peak <= (advice.advised_replicas - 1) * 16 * 0.6 * 1.000001
        case SizeVerdict.UNDERSIZED:
            assert advice.advised_replicas > replicas
        case SizeVerdict.IDLE:
            assert advice.advised_replicas == 0
            assert advice.idle_s >= 2 * 3600
        case _:
            assert advice.advised_replicas == replicas


def test_month_is_forecast_from_complete_days() -> None:
    now = datetime(2026, 2, 20, 12, tzinfo=UTC).timestamp()
    today = int(now // 86_400)
    days = {today - age: 100 for age in range(1, 25)} | {today: 7}
    # 19 days of February and half of the 20th are over; 8.5 are left.
    assert forecast_month(days, now) == (1907, 1907 + 850)
    assert forecast_month({today: 7}, now) == (7, 7)
