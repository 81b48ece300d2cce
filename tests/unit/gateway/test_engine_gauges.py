"""Gauges of a replica's engine, which come from the totals of its load reports."""

from __future__ import annotations

import math

import pytest
from tests.support.load_reports import load_report

from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.gateway.series_collector import UNKNOWN_ENGINE, EngineGauges
from argosy.gateway.upstream.upstream import Upstream
from argosy.protocol import parse_endpoint


def test_rates_cover_the_time_between_two_reports() -> None:
    replica = ReplicaEndpoint("r", "argosy", "m", Upstream(parse_endpoint("http://localhost:1")))
    gauges = EngineGauges()

    def read(at: float, step: int, preemptions: int, compute_s: float) -> list[float]:
        phases = {"plan": 0.001 * step, "compute": compute_s}
        report = load_report(
            step=step,
            kv_blocks_used=5,
            kv_blocks_cached=3,
            preemptions_total=preemptions,
            phase_s_total=phases,
        )
        replica.on_native_load(report, at)
        gauges.begin()
        return list(gauges.read(replica))

    unknown = math.nan
    assert gauges.read(replica) == UNKNOWN_ENGINE, "it has not reported yet"
    for reading, expected in (
        (read(10.0, 100, 4, 1.0), [unknown, unknown, unknown]),
        (read(12.0, 120, 7, 1.4), [1.5, 0.001, 0.02]),
        (read(13.0, 120, 7, 1.4), [0.0, unknown, unknown]),
        (read(14.0, 3, 0, 0.1), [unknown, unknown, unknown]),
        (read(15.0, 4, 0, 0.2), [0.0, 0.001, 0.1]),
    ):
        blocks, (preemptions, plan_s, launch_s, compute_s, *_) = reading[:2], reading[2:]
        assert blocks == [5, 3]
        assert math.isnan(launch_s), "a phase that is not reported"
        assert [preemptions, plan_s, compute_s] == pytest.approx(expected, nan_ok=True)
