"""Gateway metrics: recorded values are exported, and tenants cannot create labels without bound."""

from __future__ import annotations

import subprocess

from prometheus_client.parser import text_string_to_metric_families
from tests.support.services import find_program

from argosy.policy import ReplicaStatus
from argosy.protocol import TokenUsage
from argosy.telemetry import GatewayGauges, GatewayMetrics, QuotaBackendGauges, ReplicaGauges
from argosy.telemetry.gateway_metrics import MAX_TENANT_LABELS

GAUGES = GatewayGauges(
    in_flight=3,
    fast_path_streams=2,
    queue_depths={"m": 2},
    replicas=[ReplicaGauges("m", "http://a", ReplicaStatus.EJECTED, 1)],
    usage_pending_records=7,
    usage_unpersisted_records=5,
    store_up=True,
    quota_backend=QuotaBackendGauges(is_connected=True, degraded_allowed=3, degraded_rejected=2),
)


def exported_values(metrics: GatewayMetrics, gauges: GatewayGauges = GAUGES) -> dict[str, float]:
    lines = metrics.exposition(gauges).decode().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in samples}


def end_request(metrics: GatewayMetrics, tenant: str) -> None:
    metrics.record_request_end("m", tenant, "completed", 1.5, TokenUsage(7, 2, 3), 10**9)


def record_everything(metrics: GatewayMetrics) -> None:
    metrics.http_requests.add(("/v1/completions", "200"))
    metrics.ttft.observe(("m",), 0.5)
    metrics.itl.observe_many(("m",), [0.01, 0.02])
    metrics.queue.observe(("m",), 0.25)
    metrics.retries.add(("m",))
    metrics.failovers.add(("m",))
    metrics.record_error("m", "rate_limit_exceeded")
    metrics.limit_rejections.add(("m", "tokens"))
    end_request(metrics, "t")


def test_recorded_values_are_exported() -> None:
    metrics = GatewayMetrics()
    record_everything(metrics)
    values = {
        name.removeprefix("argosy_gateway_"): value
        for name, value in exported_values(metrics).items()
    }
    assert values['requests_total{model="m",status="completed",tenant="t"}'] == 1
    assert values['tokens_total{kind="cached",model="m",tenant="t"}'] == 2
    assert values['cost_dollars_total{model="m",tenant="t"}'] == 1
    assert values['inter_token_latency_seconds_count{model="m"}'] == 2
    assert values['inter_token_latency_seconds_sum{model="m"}'] == 0.03
    assert values['inter_token_latency_seconds_bucket{le="0.01",model="m"}'] == 1
    assert values['inter_token_latency_seconds_bucket{le="0.025",model="m"}'] == 2
    assert values['time_to_first_token_seconds_bucket{le="+Inf",model="m"}'] == 1
    assert values['request_errors_total{code="rate_limit_exceeded",model="m"}'] == 1
    assert values['limit_rejections_total{model="m",unit="tokens"}'] == 1
    assert values['replica_status{model="m",replica="http://a",status="ejected"}'] == 1
    assert values['replica_status{model="m",replica="http://a",status="ready"}'] == 0
    assert values['queue_depth{model="m"}'] == 2
    assert values["fast_path_streams"] == 2
    assert values["usage_pending_records"] == 7
    assert values["usage_unpersisted_records"] == 5
    assert values["store_up"] == 1


def test_quota_and_store_metrics_exist_only_if_configured() -> None:
    values = exported_values(GatewayMetrics(), GatewayGauges())
    assert not [name for name in values if "quota" in name or "store" in name]
    quota_values = {
        name: value for name, value in exported_values(GatewayMetrics()).items() if "quota" in name
    }
    assert quota_values == {
        "argosy_gateway_quota_store_up": 1,
        'argosy_gateway_quota_degraded_decisions_total{outcome="allowed"}': 3,
        'argosy_gateway_quota_degraded_decisions_total{outcome="rejected"}': 2,
    }


def test_tenants_beyond_the_bound_share_one_label() -> None:
    metrics = GatewayMetrics()
    for number in range(MAX_TENANT_LABELS + 50):
        end_request(metrics, f"tenant {number}")
    families = text_string_to_metric_families(metrics.exposition(GAUGES).decode())
    (requests,) = (f for f in families if f.name == "argosy_gateway_requests")
    assert len(requests.samples) == MAX_TENANT_LABELS + 1
    (other,) = (s for s in requests.samples if s.labels["tenant"] == "other")
    assert other.value == 50


def test_promtool_accepts_the_exposition() -> None:
    promtool = find_program("promtool", "prometheus")
    metrics = GatewayMetrics()
    record_everything(metrics)
    process = subprocess.run(
        [promtool, "check", "metrics"],
        input=metrics.exposition(GAUGES),
        capture_output=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr.decode()
    assert not process.stderr.strip(), process.stderr.decode()
