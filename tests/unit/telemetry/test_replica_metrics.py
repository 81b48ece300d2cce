"""Replica metrics: observed values are exported under Argosy's names and under those of vLLM."""

from __future__ import annotations

from argosy.telemetry import CoreStats, ReplicaMetrics, SequenceTimes

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


def test_names_have_the_vllm_prefix_only_in_the_vllm_exposition() -> None:
    metrics = ReplicaMetrics("m")
    assert not any(":" in name.split("{")[0] for name in exported_values(metrics.exposition()))
    vllm_values = exported_values(metrics.vllm_exposition())
    assert vllm_values
    assert all(name.startswith("vllm:") for name in vllm_values)
