"""Metrics of gateways and replicas: recorded values are exported, as `prometheus_client` would, or as vLLM does."""

from __future__ import annotations

from collections.abc import Iterator

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from argosy.policy import ReplicaStatus
from argosy.protocol import TokenUsage
from argosy.telemetry import (
    CoreStats,
    GatewayGauges,
    GatewayMetrics,
    QuotaBackendGauges,
    ReplicaGauges,
    ReplicaMetrics,
    SequenceTimes,
)
from argosy.telemetry.gateway_metrics import MAX_TENANT_LABELS
from argosy.telemetry.instruments import TTFT_BUCKETS, Counter, Histogram

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
TIMES = SequenceTimes(
    arrived_at=10.0,
    submitted_at=10.1,
    queued_s=0.4,
    first_token_at=11.0,
    last_token_at=13.0,
    ended_at=13.5,
)


def exported_values(text: bytes) -> dict[str, float]:
    lines = (line for line in text.decode().splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


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
        for name, value in exported_values(metrics.exposition(GAUGES)).items()
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
    values = exported_values(GatewayMetrics().exposition(GatewayGauges()))
    assert not [name for name in values if "quota" in name or "store" in name]
    values = exported_values(GatewayMetrics().exposition(GAUGES))
    quota_values = {name: value for name, value in values.items() if "quota" in name}
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


def test_phase_durations_of_a_sequence() -> None:
    metrics = ReplicaMetrics("m")
    metrics.record_sequence_end("stop", TIMES, prompt_tokens=7, output_tokens=5, max_tokens=9)
    values = exported_values(metrics.exposition())
    label = '{model="m"}'
    assert values["argosy_request_duration_seconds_sum" + label] == 3.5
    assert values["argosy_request_queue_seconds_sum" + label] == 0.4
    assert values["argosy_request_prefill_seconds_sum" + label] == 0.5
    assert values["argosy_request_decode_seconds_sum" + label] == 2.0
    assert values["argosy_time_per_output_token_seconds_sum" + label] == 0.5
    assert values['argosy_sequences_finished_total{finish_reason="stop",model="m"}'] == 1
    vllm_values = exported_values(metrics.vllm_exposition())
    assert vllm_values['vllm:request_decode_time_seconds_sum{engine="0",model_name="m"}'] == 2.0
    assert vllm_values['vllm:request_prompt_tokens_sum{engine="0",model_name="m"}'] == 7


def test_sequence_that_never_ran_has_no_phases() -> None:
    metrics = ReplicaMetrics("m")
    times = SequenceTimes(
        arrived_at=1.0,
        submitted_at=1.0,
        queued_s=None,
        first_token_at=None,
        last_token_at=None,
        ended_at=2.0,
    )
    metrics.record_sequence_end("cancelled", times, prompt_tokens=7, output_tokens=0, max_tokens=9)
    values = exported_values(metrics.exposition())
    assert values['argosy_request_duration_seconds_count{model="m"}'] == 1
    assert values['argosy_request_queue_seconds_count{model="m"}'] == 0
    vllm_values = exported_values(metrics.vllm_exposition())
    reason = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"}'
    assert vllm_values[reason] == 1


def test_block_states_add_up() -> None:
    metrics = ReplicaMetrics("m")
    metrics.update_stats(CoreStats(blocks_total=100, blocks_used=30, blocks_cached=50), ready=True)
    values = exported_values(metrics.exposition())
    states = {
        s: values[f'argosy_kv_blocks{{model="m",state="{s}"}}'] for s in ("used", "cached", "free")
    }
    assert states == {"used": 30, "cached": 50, "free": 20}
    assert values['argosy_kv_usage_ratio{model="m"}'] == 0.3


def test_counters_continue_across_core_restarts() -> None:
    metrics = ReplicaMetrics("m")
    for total in (10, 15, 4):
        metrics.update_stats(CoreStats(preemptions_total=total), ready=True)
    assert exported_values(metrics.exposition())['argosy_preemptions_total{model="m"}'] == 19


def test_step_phases_are_counters() -> None:
    metrics = ReplicaMetrics("m")
    for plan_s in (1.0, 1.5, 0.25):  # the core restarts before the last value
        metrics.update_stats(CoreStats(phase_s_total={"plan": plan_s, "compute": 2.0}), ready=True)
    values = exported_values(metrics.exposition())
    assert values['argosy_step_seconds_total{model="m",phase="plan"}'] == 1.75
    assert values['argosy_step_seconds_total{model="m",phase="compute"}'] == 2.0


def test_drafts_are_counted_by_drafter_and_position() -> None:
    metrics = ReplicaMetrics("m")
    for drafts, accepted in ((2, [2, 1]), (5, [4, 1]), (1, [1, 0])):  # the core restarts at last
        stats = CoreStats(
            drafts_total={"lookup": drafts},
            draft_tokens_total={"lookup": 2 * drafts},
            accepted_draft_tokens_total={"lookup": sum(accepted)},
            accepted_by_position_total={"lookup": accepted},
            draft_gain_s_total=0.5 * drafts,
        )
        metrics.update_stats(stats, ready=True)
    assert exported_values(metrics.exposition())['argosy_draft_gain_seconds_total{model="m"}'] == 3
    values = exported_values(metrics.vllm_exposition())
    counts = {
        name.removeprefix("vllm:spec_decode_num_"): value
        for name, value in values.items()
        if "spec_decode" in name
    }
    labels = 'drafter="lookup",engine="0",model_name="m"'
    assert counts == {
        f"drafts_total{{{labels}}}": 6,
        f"draft_tokens_total{{{labels}}}": 12,
        f"accepted_tokens_total{{{labels}}}": 6,
        f'accepted_tokens_per_pos_total{{{labels},position="0"}}': 5,
        f'accepted_tokens_per_pos_total{{{labels},position="1"}}': 1,
    }


def test_names_have_the_vllm_prefix_only_in_the_vllm_exposition() -> None:
    metrics = ReplicaMetrics("m")
    assert not any(":" in name.split("{")[0] for name in exported_values(metrics.exposition()))
    vllm_values = exported_values(metrics.vllm_exposition())
    assert vllm_values
    assert all(name.startswith("vllm:") for name in vllm_values)


# --- instruments ----------------------------------------------------------------------------------


LABELS = st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["c", 'd"\n']))
BUCKETS = st.sampled_from([TTFT_BUCKETS, (1, 2, 50, 1_000_000, 5_000_000), (0.5,)])


class SingleMetricCollector(Collector):
    def __init__(self, instrument: Counter | Histogram) -> None:
        self._instrument = instrument

    def collect(self) -> Iterator[Metric]:
        yield self._instrument.metric_family()


def exposition_lines(collector: Collector) -> list[str]:
    text = generate_latest(collector).decode()
    return sorted(line for line in text.splitlines() if "_created" not in line)


@given(st.lists(st.tuples(LABELS, st.lists(st.integers(0, 2**33), max_size=3))), BUCKETS)
def test_histogram_equals_that_of_prometheus_client(
    observed: list[tuple[tuple[str, str], list[int]]], buckets: tuple[float, ...]
) -> None:
    registry = CollectorRegistry()
    library = prometheus_client.Histogram(
        "x", "X.", ["one", "two"], buckets=buckets, registry=registry
    )
    instrument = Histogram("x", "X.", buckets, "one", "two")
    for labels, numbers in observed:
        values = [number / 1024 for number in numbers]  # whose sums are exact
        instrument.observe_many(labels, values[1:])
        for value in values[:1]:
            instrument.observe(labels, value)
        child = library.labels(*labels)
        for value in values:
            child.observe(value)
    assert exposition_lines(SingleMetricCollector(instrument)) == exposition_lines(registry)


@given(st.lists(st.tuples(LABELS, st.integers(0, 10))))
def test_counter_equals_that_of_prometheus_client(
    amounts: list[tuple[tuple[str, str], int]],
) -> None:
    registry = CollectorRegistry()
    library = prometheus_client.Counter("x", "X.", ["one", "two"], registry=registry)
    instrument = Counter("x", "X.", "one", "two")
    for labels, amount in amounts:
        instrument.add(labels, amount)
        library.labels(*labels).inc(amount)
    assert exposition_lines(SingleMetricCollector(instrument)) == exposition_lines(registry)
