"""Smoothed measurements: rates weigh recent samples, latencies rise at once and decay, linear fits find their slope."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import EwmaMean, EwmaRate, OnlineLinearFit, PeakEwma

SECONDS = st.floats(0.001, 100)


@given(st.lists(st.tuples(st.integers(1, 5000), SECONDS), min_size=1, max_size=50))
def test_rate_lies_within_the_measured_rates(
    measured: list[tuple[int, float]],
) -> None:
    rate = EwmaRate(half_life_units=1000.0)
    assert rate.units_per_s == 0.0
    for units, seconds in measured:
        rate.add(units, seconds)
    rates = [units / seconds for units, seconds in measured]
    assert min(rates) * 0.999 <= rate.units_per_s <= max(rates) * 1.001


@given(st.lists(SECONDS, min_size=1, max_size=50), SECONDS)
def test_mean_lies_within_its_samples_and_follows_them(
    samples: list[float], later_sample: float
) -> None:
    mean = EwmaMean(half_life_samples=4.0, initial=samples[0])
    for sample in samples:
        mean.add(sample)
    assert min(samples) * 0.999 <= mean.value <= max(samples) * 1.001
    for _ in range(100):
        mean.add(later_sample)
    assert mean.value == pytest.approx(later_sample, rel=0.01)


@given(st.lists(st.tuples(st.floats(0, 30), SECONDS), min_size=1, max_size=50), st.floats(0, 100))
def test_peak_latency_lies_between_the_last_sample_and_the_worst(
    samples: list[tuple[float, float]], later: float
) -> None:
    latency, now, worst = PeakEwma(), 1000.0, 0.0
    for pause, seconds in samples:
        now += pause
        before = latency.value(now)
        latency.add(seconds, now)
        worst = max(worst, seconds)
        assert min(before, seconds) * 0.999 <= latency.value(now) <= worst * 1.001
        assert latency.value(now) >= seconds * 0.999
    assert latency.value(now + later) <= latency.value(now)
    assert latency.value(now + 100) < worst * 0.001


@given(
    st.floats(0, 10),
    st.floats(0, 10),
    st.lists(st.integers(1, 256), min_size=2, max_size=50, unique=True),
    st.integers(1, 300),
)
def test_linear_fit_recovers_the_line(
    intercept: float, slope: float, points: list[int], x: int
) -> None:
    line = OnlineLinearFit(half_life_points=64.0)
    assert line.predict(x) == 0.0
    for point in points:
        line.add(point, intercept + slope * point)
    assert line.predict(x) == pytest.approx(intercept + slope * x, rel=1e-3, abs=1e-3)


def test_linear_fit_never_falls_and_one_point_is_constant() -> None:
    line = OnlineLinearFit(half_life_points=64.0)
    line.add(4, 1.0)
    assert line.predict(1) == line.predict(100) == 1.0
    line.add(8, 0.5)
    assert line.predict(100) == line.predict(0) == pytest.approx(0.75, rel=0.05)


def test_linear_fit_is_never_negative() -> None:
    line = OnlineLinearFit(half_life_points=64.0)
    line.add(10, 1.0)
    line.add(20, 11.0)
    assert line.predict(15) == pytest.approx(6.0)
    assert line.predict(5) == pytest.approx(
        6.0, rel=0.02
    )  # the mean, because the line would reach zero


def test_sample_one_half_life_ago_counts_half() -> None:
    rate = EwmaRate(half_life_units=100.0)
    for units, seconds in ((1000.0, 1.0), (200.0, 1.0)):
        rate.add(units, seconds)
    assert rate.units_per_s == pytest.approx((1000.0 * 0.25 + 200.0) / 1.25)
    mean = EwmaMean(half_life_samples=2.0, initial=10.0)
    for sample in (0.0, 0.0):
        mean.add(sample)
    assert mean.value == pytest.approx(5.0)
    latency = PeakEwma(tau_s=10.0)
    latency.add(1.0, 0.0)
    latency.add(0.5, 10.0 * math.log(2))
    assert latency.value(10.0 * math.log(2)) == pytest.approx(0.75)
    line = OnlineLinearFit(half_life_points=1.0)
    for y in (4.0, 1.0):
        line.add(8, y)
    assert line.predict(8) == pytest.approx(2.0)
