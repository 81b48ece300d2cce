"""Recorder, rings and archive: sums are exact at each resolution, gaps are gaps, and restarts lose nothing."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.series import (
    STEP_PHASES,
    LogHistogram,
    MinuteRow,
    Readings,
    RequestSample,
    ScopeKind,
    SeriesArchive,
    SeriesFrame,
    SeriesRecorder,
    choose_step,
    compute_metrics,
    decode_counts,
    fill_from_archive,
    merge_gateways,
    metric_names,
    percentiles,
    read_series,
    scope_kind,
)
from argosy.series.log_histogram import BUCKETS, encode_counts, merge_encoded
from argosy.series.schema import SCHEMAS

START = 1_800_000_000 - 7
"""Not the begin of a minute."""
SCOPES = ("fleet", "model:m", "replica:r", "tenant:t")
GAUGES = (2.0, 1.0, 0.5, 1.0, 3.0)
ENGINE_GAUGES = (7.0, 3.0, 0.5, 2.0, 0.25, 0.1, *(0.001,) * len(STEP_PHASES))
READINGS = Readings(
    models={"m": GAUGES},
    replicas={"r": (2.0, 3.0, 0.0, 0.5, *ENGINE_GAUGES)},
    tenants={"t": (2, 1)},
    fleet=GAUGES,
)


def sample(ttft_s: float = 0.2, tenant: str = "t", outcome: str = "completed") -> RequestSample:
    return RequestSample(
        model="m",
        tenant=tenant,
        replica="r",
        outcome=outcome,
        duration_s=2 * ttft_s,
        ttft_s=ttft_s,
        queue_s=0.01,
        input_tokens=100,
        cached_tokens=60,
        output_tokens=30,
        cost_nano_dollars=7,
    )


class Gateway:
    """A recorder that is driven by a test, and the file of its minutes."""

    def __init__(self, path: Path | None = None) -> None:
        self.recorder = SeriesRecorder()
        self.archive = None if path is None else SeriesArchive(path, keep_days=30)
        self.recorded: list[int] = []
        """Second of each request."""

    def run(
        self, seconds: range, requests: Callable[[int], int] = lambda _: 1, ttft_s: float = 0.2
    ) -> None:
        minutes: list[MinuteRow] = []
        for second in seconds:
            for _ in range(requests(second)):
                self.recorder.record_request(sample(ttft_s))
                self.recorded.append(second)
            closed = self.recorder.close_second(second, READINGS)
            minutes += [minute for minute in closed if minute is not None]
        if self.archive is not None:
            self.archive.write(minutes)

    def stop(self) -> None:
        assert self.archive is not None
        self.archive.write(self.recorder.sum_up_open_minute())
        self.archive.close()

    def read(self, scope: str, start: int, step_s: int, steps: int) -> SeriesFrame:
        histograms = SCHEMAS[scope_kind(scope)].histograms
        frame = read_series(self.recorder, scope, start, step_s, steps, histograms)
        if self.archive is not None:
            fill_from_archive(frame, scope, self.archive.read, self.recorder.last_second)
        return frame.cut(start, steps)

    def values(
        self, scope: str, metric: str, start: int, step_s: int, steps: int
    ) -> list[float | None]:
        frame = self.read(scope, start, step_s, steps)
        return compute_metrics(scope_kind(scope), [metric], frame)[metric]


def total(values: list[float | None]) -> float:
    return sum((value for value in values if value is not None), 0.0)


@pytest.fixture(scope="module")
def busy_gateway(tmp_path_factory: pytest.TempPathFactory) -> Gateway:
    """A gateway that ran for two and a half hours, with 0 to 3 requests per second."""
    gateway, rng = Gateway(tmp_path_factory.mktemp("series") / "s.sqlite"), random.Random(1)
    gateway.run(range(START, START + 9000), lambda _: rng.randrange(4))
    return gateway


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("step_s", [1, 10, 60, 300, 3600])
def test_sums_are_exact_at_each_step(busy_gateway: Gateway, scope: str, step_s: int) -> None:
    unit = max(60, step_s)
    start, end = START // unit * unit, (START + 9000) // step_s * step_s
    start = max(start, end - 2000 * step_s)
    steps = (end - start) // step_s
    values = busy_gateway.values(scope, "requests", start, step_s, steps)
    recorded = [second for second in busy_gateway.recorded if start <= second < end]
    # A range that begins within a step of a coarser ring has its share of that step.
    assert total(values) == pytest.approx(len(recorded), abs=0.1 if start < START else 100)
    if scope != "tenant:t" and step_s == 1:
        assert values[-900:] == [recorded.count(second) for second in range(end - 900, end)]


def test_metrics_of_steady_traffic_have_the_expected_values() -> None:
    gateway = Gateway()
    gateway.run(range(START, START + 300), lambda _: 2)
    end = (START + 300) // 60 * 60
    frame = gateway.read("model:m", end - 120, 60, 2)
    metrics = compute_metrics("model", metric_names("model"), frame)
    expected = {
        "requests_per_s": 2.0,
        "errors_per_s": 0.0,
        "output_tokens_per_s": 60.0,
        "cache_hit_ratio": 60 / 160,
        "cost_dollars_per_s": 14e-9,
        "running": 2.0,
        "queued": 1.0,
        "kv_usage_ratio": 0.5,
        "replicas_desired": 3.0,
        "requests": 120.0,
    }
    for name, value in expected.items():
        assert metrics[name] == [value, value], name
    for percentile in metrics["ttft_p95_s"]:
        assert percentile == pytest.approx(0.2, rel=0.1)
    assert metrics["itl_p50_s"] == [None, None]


def test_time_before_the_start_and_while_suspended_is_a_gap_and_idle_time_is_zero() -> None:
    gateway = Gateway()
    gateway.run(range(START, START + 30))
    gateway.run(range(START + 100, START + 130), lambda _: 0)
    rates = gateway.values("model:m", "requests_per_s", START - 10, 1, 140)
    assert rates[:10] == [None] * 10
    assert rates[10:40] == [1.0] * 30
    assert rates[40:110] == [None] * 70
    assert rates[110:] == [0.0] * 30
    gateway.run(range(START + 132, START + 134))  # two seconds were closed too late
    assert gateway.values("model:m", "requests", START + 129, 1, 5) == [0, 0, 0, 1, 1]
    assert gateway.values("tenant:idle", "requests_per_s", (START // 10 + 1) * 10, 10, 2) == [0, 0]


def test_restart_within_a_minute_keeps_its_requests(tmp_path: Path) -> None:
    minute = START // 60 * 60 + 60
    for seconds in (range(minute - 30, minute + 20), range(minute + 30, minute + 90)):
        gateway = Gateway(tmp_path / "s.sqlite")
        gateway.run(seconds)
        if seconds.start < minute:
            gateway.stop()
    assert gateway.values("fleet", "requests", minute - 60, 60, 2) == [30, 50]
    by_second = gateway.values("fleet", "requests", minute - 60, 1, 150)
    assert total(by_second) == pytest.approx(110)
    assert by_second[90:] == [1.0] * 60


@pytest.mark.parametrize("scope", SCOPES)
def test_years_without_minutes_take_no_memory(tmp_path: Path, scope: str) -> None:
    gateway = Gateway(tmp_path / "series.sqlite")
    gateway.run(range(START, START + 120))
    assert gateway.archive is not None
    start, end = (START - 3650 * 86400) // 86400 * 86400, START // 86400 * 86400 + 86400
    frame = SeriesFrame.empty(SCHEMAS[scope_kind(scope)], start, 86400, (end - start) // 86400, ())
    tracemalloc.start()
    fill_from_archive(frame, scope, gateway.archive.read, gateway.recorder.last_second)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert frame.values[-1, 0] > 0
    assert peak_bytes < 5 << 20


def test_archive_keeps_days_and_deletes_older_ones(tmp_path: Path) -> None:
    archive = SeriesArchive(tmp_path / "folder" / "s.sqlite", keep_days=1)
    gateway = Gateway()
    gateway.run(range(START, START + 130))
    step = gateway.recorder.scopes["fleet"].sum_up(0, START, 60)
    assert step is not None
    for hour in range(50):
        archive.write([MinuteRow("fleet", START // 3600 * 3600 + hour * 3600 + 60, step)])
    begin = START // 3600 * 3600
    frame = archive.read("fleet", begin, begin + 50 * 3600).to_frame(
        SCHEMAS["fleet"], begin, 50 * 60
    )
    kept = [index // 60 for index in (frame.covered_s > 0).nonzero()[0].tolist()]
    assert kept == list(range(25, 50))
    with pytest.raises(Exception, match="locked"):
        SeriesArchive(tmp_path / "folder" / "s.sqlite", keep_days=1)
    archive.close()


def test_gateways_are_merged_by_sum_and_what_all_see_by_mean() -> None:
    frames = []
    for ttft_s in (0.1, 0.4):
        gateway = Gateway()
        gateway.run(range(START, START + 120), ttft_s=ttft_s)
        frame = gateway.read("model:m", START // 60 * 60 + 60, 1, 60)
        schema, like = SCHEMAS["model"], (frame.start, 1, 60)
        frames.append(SeriesFrame.decode(frame.encode(schema), schema, like, schema.histograms))
        with pytest.raises(ValueError, match="same version"):
            SeriesFrame.decode(frame.encode(schema), SCHEMAS["tenant"], like, schema.histograms)
    merged = merge_gateways(frames, SCHEMAS["model"])
    metrics = compute_metrics("model", metric_names("model"), merged)
    assert metrics["requests_per_s"] == [2.0] * 60
    assert metrics["running"] == [4.0] * 60
    assert metrics["replicas_ready"] == [1.0] * 60
    assert metrics["ttft_p99_s"][0] == pytest.approx(0.4, rel=0.1)
    assert metrics["ttft_p50_s"][0] == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize(
    ("kind", "range_s", "wanted_s", "expected"),
    [
        ("fleet", 900, None, 1),
        ("fleet", 3600, None, 10),
        ("fleet", 6 * 3600, None, 60),
        ("fleet", 6 * 3600, 10, 60),
        ("fleet", 5 * 3600, 1, 10),
        ("fleet", 30 * 86400, None, 3600),
        ("tenant", 900, None, 10),
        ("tenant", 6 * 3600, None, 60),
        ("replica", 900, 60, 60),
    ],
)
def test_step_depends_on_range_and_age(
    kind: ScopeKind, range_s: int, wanted_s: int | None, expected: int
) -> None:
    assert choose_step(kind, START - range_s, START, START, wanted_s) == expected


def test_a_skipped_or_repeated_second_loses_no_request() -> None:
    gateway = Gateway()
    gateway.run(range(START, START + 10))
    gateway.run(range(START + 5, START + 8))  # the clock was set back a little
    gateway.run(range(START + 95, START + 200))
    start = START // 60 * 60
    assert total(gateway.values("model:m", "requests", start, 1, 300)) == len(gateway.recorded)
    assert total(gateway.values("model:m", "requests", start, 60, 4)) == len(
        [second for second in gateway.recorded if second < start + 240]
    )


def test_tenants_beyond_the_maximum_count_in_the_fleet_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("argosy.series.recorder.MAX_TENANTS", 2)
    gateway = Gateway()
    for tenant in ("a", "b", "c"):
        gateway.recorder.record_request(sample(tenant=tenant))
    for second in range(START, START + 20):
        list(gateway.recorder.close_second(second, Readings(fleet=GAUGES)))
    scopes = [f"tenant:{tenant}" for tenant in ("a", "b", "c")]
    step = START // 10 * 10
    assert sum(total(gateway.values(scope, "requests", step, 10, 1)) for scope in scopes) == 2
    assert total(gateway.values("fleet", "requests", step, 10, 1)) == 3


# --- log histograms: percentiles within a bucket of the exact ones, and merging by concatenation --


SECONDS = st.floats(0.0, 5000.0)
BUCKET_RATIO = 2 ** (1 / 8)


def encode(values: Sequence[float]) -> bytes:
    histogram = LogHistogram()
    for value in values:
        histogram.add(value)
    return histogram.encode()


@given(st.lists(st.floats(1e-4, 800.0), min_size=1), st.sampled_from([0.5, 0.95, 0.99]))
def test_percentile_is_within_a_bucket_of_the_exact_one(values: list[float], q: float) -> None:
    exact = float(np.quantile(values, q, method="inverted_cdf"))
    (found,) = percentiles(decode_counts([encode(values)]).cumsum(axis=1), q).tolist()
    assert exact / BUCKET_RATIO * 0.999 <= found <= exact * BUCKET_RATIO * 1.001


@pytest.mark.parametrize("draw", ["lognormal", "bimodal"])
def test_percentiles_of_many_values_are_exact_to_one_percent(draw: str) -> None:
    rng = np.random.default_rng(1)
    values = rng.lognormal(-1.0, 1.0, 50_000)
    if draw == "bimodal":
        values = np.where(rng.random(50_000) < 0.7, rng.normal(0.05, 0.005, 50_000), values)
    counts = decode_counts([encode(values.tolist())])
    for q in (0.5, 0.95, 0.99):
        assert percentiles(counts.cumsum(axis=1), q)[0] == pytest.approx(
            np.quantile(values, q), rel=0.01
        )


@given(st.lists(st.lists(SECONDS), max_size=5))
def test_merged_and_sorted_recording_count_the_same(groups: list[list[float]]) -> None:
    together = LogHistogram()
    together.add_sorted(sorted(value for group in groups for value in group))
    merged = merge_encoded([encode(group) for group in groups])
    assert (decode_counts([merged]) == decode_counts([together.encode()])).all()
    assert decode_counts([merged]).sum() == sum(map(len, groups))


def test_large_counts_and_empty_rows_survive_encoding() -> None:
    counts = decode_counts([b"", encode_counts({3: 2**26 + 5, BUCKETS - 1: 1})])
    assert counts.shape == (2, BUCKETS)
    assert counts[1, 3] == 2**26 + 5
    assert np.isnan(percentiles(counts.cumsum(axis=1), 0.5)).tolist() == [True, False]
