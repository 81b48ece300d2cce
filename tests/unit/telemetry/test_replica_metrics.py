"""The metrics on their own: what is observed is what is shown, under both sets of names."""

from __future__ import annotations

from argosy.engine.serving.core_messages import CoreStats
from argosy.telemetry import ReplicaMetrics, SequenceTimes

TIMES = SequenceTimes(
    arrived_at=10.0,
    submitted_at=10.1,
    queued_s=0.4,
    first_token_at=11.0,
    last_token_at=13.0,
    ended_at=13.5,
)


def shown(text: bytes) -> dict[str, float]:
    lines = (line for line in text.decode().splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_phases_of_a_sequence() -> None:
    metrics = ReplicaMetrics("m")
    metrics.record_sequence_end("stop", TIMES, prompt_tokens=7, output_tokens=5, max_tokens=9)
    now = shown(metrics.exposition())
    label = '{model="m"}'
    assert now["argosy_request_duration_seconds_sum" + label] == 3.5
    assert now["argosy_request_queue_seconds_sum" + label] == 0.4
    assert now["argosy_request_prefill_seconds_sum" + label] == 0.5
    assert now["argosy_request_decode_seconds_sum" + label] == 2.0
    assert now["argosy_time_per_output_token_seconds_sum" + label] == 0.5
    assert now['argosy_sequences_finished_total{finish_reason="stop",model="m"}'] == 1
    theirs = shown(metrics.vllm_exposition())
    assert theirs['vllm:request_decode_time_seconds_sum{engine="0",model_name="m"}'] == 2.0
    assert theirs['vllm:request_prompt_tokens_sum{engine="0",model_name="m"}'] == 7


def test_a_sequence_that_never_ran_has_no_phases() -> None:
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
    now = shown(metrics.exposition())
    assert now['argosy_request_duration_seconds_count{model="m"}'] == 1
    assert now['argosy_request_queue_seconds_count{model="m"}'] == 0
    theirs = shown(metrics.vllm_exposition())
    reason = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"}'
    assert theirs[reason] == 1


def test_block_states_add_up() -> None:
    metrics = ReplicaMetrics("m")
    metrics.update_stats(CoreStats(blocks_total=100, blocks_used=30, blocks_cached=50), ready=True)
    now = shown(metrics.exposition())
    states = {
        s: now[f'argosy_kv_blocks{{model="m",state="{s}"}}'] for s in ("used", "cached", "free")
    }
    assert states == {"used": 30, "cached": 50, "free": 20}
    assert now['argosy_kv_usage_ratio{model="m"}'] == 0.3


def test_counters_go_on_when_the_core_starts_again() -> None:
    metrics = ReplicaMetrics("m")
    for total in (10, 15, 4):
        metrics.update_stats(CoreStats(preemptions_total=total), ready=True)
    assert shown(metrics.exposition())['argosy_preemptions_total{model="m"}'] == 19


def test_the_phases_of_steps_are_counters() -> None:
    metrics = ReplicaMetrics("m")
    for plan_s in (1.0, 1.5, 0.25):  # the core starts again before the last
        metrics.update_stats(CoreStats(phase_s_total={"plan": plan_s, "compute": 2.0}), ready=True)
    now = shown(metrics.exposition())
    assert now['argosy_step_seconds_total{model="m",phase="plan"}'] == 1.75
    assert now['argosy_step_seconds_total{model="m",phase="compute"}'] == 2.0


def test_no_name_has_a_colon_and_every_theirs_has_one() -> None:
    metrics = ReplicaMetrics("m")
    assert not any(":" in name.split("{")[0] for name in shown(metrics.exposition()))
    theirs = shown(metrics.vllm_exposition())
    assert theirs
    assert all(name.startswith("vllm:") for name in theirs)
