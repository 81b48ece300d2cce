"""The gateway's metrics: what is counted is what is shown, and no tenant can make them grow without bound."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from argosy.policy import ReplicaStatus
from argosy.telemetry import GatewayGauges, GatewayMetrics, QuotaBackendGauges, ReplicaGauges
from argosy.telemetry.gateway_metrics import MAX_TENANT_LABELS

READING = GatewayGauges(
    in_flight=3,
    fast_path_streams=2,
    queue_depths={"m": 2},
    replicas=[ReplicaGauges("m", "http://a", ReplicaStatus.EJECTED, 1)],
    usage_pending_records=7,
    usage_unpersisted_records=5,
    store_up=True,
    quota_backend=QuotaBackendGauges(is_connected=True, degraded_allowed=3, degraded_rejected=2),
)


def shown(metrics: GatewayMetrics, reading: GatewayGauges = READING) -> dict[str, float]:
    lines = metrics.exposition(reading).decode().splitlines()
    told = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in told}


def end(metrics: GatewayMetrics, tenant: str) -> None:
    used = {"input_tokens": 5, "cached_tokens": 2, "output_tokens": 3, "nano_dollars": 10**9}
    metrics.record_request_end("m", tenant, "completed", 1.5, **used)


def some(metrics: GatewayMetrics) -> None:
    metrics.record_http_response("/v1/completions", 200)
    metrics.record_first_token("m", 0.5)
    metrics.record_inter_token_gaps("m", [0.01, 0.02])
    metrics.record_inter_token_gaps("m", [])
    metrics.record_queue_wait("m", 0.25)
    metrics.record_retry("m")
    metrics.record_failover("m")
    metrics.record_error("m", "rate_limit_exceeded")
    metrics.record_limit_rejection("m", "tokens")
    end(metrics, "t")


def test_what_is_counted_is_shown() -> None:
    metrics = GatewayMetrics()
    some(metrics)
    now = {name.removeprefix("argosy_gateway_"): value for name, value in shown(metrics).items()}
    assert now['requests_total{model="m",status="completed",tenant="t"}'] == 1
    assert now['tokens_total{kind="cached",model="m",tenant="t"}'] == 2
    assert now['cost_dollars_total{model="m",tenant="t"}'] == 1
    assert now['inter_token_latency_seconds_count{model="m"}'] == 2
    assert now['inter_token_latency_seconds_sum{model="m"}'] == 0.03
    assert now['inter_token_latency_seconds_bucket{le="0.01",model="m"}'] == 1
    assert now['inter_token_latency_seconds_bucket{le="0.025",model="m"}'] == 2
    assert now['time_to_first_token_seconds_bucket{le="+Inf",model="m"}'] == 1
    assert now['request_errors_total{code="rate_limit_exceeded",model="m"}'] == 1
    assert now['limit_rejections_total{model="m",unit="tokens"}'] == 1
    assert now['replica_status{model="m",replica="http://a",status="ejected"}'] == 1
    assert now['replica_status{model="m",replica="http://a",status="ready"}'] == 0
    assert now['queue_depth{model="m"}'] == 2
    assert now["fast_path_streams"] == 2
    assert now["usage_pending_records"] == 7
    assert now["usage_unpersisted_records"] == 5
    assert now["store_up"] == 1


def test_what_is_shared_is_shown_where_there_is_any() -> None:
    alone = shown(GatewayMetrics(), GatewayGauges())
    assert not [name for name in alone if "quota" in name or "store" in name]
    told = {name: value for name, value in shown(GatewayMetrics()).items() if "quota" in name}
    assert told == {
        "argosy_gateway_quota_store_up": 1,
        'argosy_gateway_quota_degraded_decisions_total{outcome="allowed"}': 3,
        'argosy_gateway_quota_degraded_decisions_total{outcome="rejected"}': 2,
    }


def test_tenants_beyond_the_bound_are_counted_together() -> None:
    metrics = GatewayMetrics()
    for number in range(MAX_TENANT_LABELS + 50):
        end(metrics, f"tenant {number}")
    families = text_string_to_metric_families(metrics.exposition(READING).decode())
    (ended,) = (f for f in families if f.name == "argosy_gateway_requests")
    assert len(ended.samples) == MAX_TENANT_LABELS + 1
    (other,) = (s for s in ended.samples if s.labels["tenant"] == "other")
    assert other.value == 50


def test_promtool_is_content() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    metrics = GatewayMetrics()
    some(metrics)
    done = subprocess.run(
        [promtool, "check", "metrics"],
        input=metrics.exposition(READING),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert not done.stderr.strip(), done.stderr.decode()
