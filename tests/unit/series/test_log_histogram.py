"""Log histograms: percentiles within a bucket of the exact ones, and merging by concatenation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.series import LogHistogram, decode_counts, percentiles
from argosy.series.log_histogram import BUCKETS, encode_counts, merge_encoded

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
