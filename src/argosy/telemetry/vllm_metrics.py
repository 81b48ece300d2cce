"""Collector that exposes a replica's metrics under the names of vLLM 0.33, for tools that expect them.

Only names and labels differ. Types, units and buckets are those of vLLM, with finer buckets where a fast engine needs
them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_VLLM_NAMES = {
    "argosy_requests_running": "num_requests_running",
    "argosy_requests_waiting": "num_requests_waiting",
    "argosy_kv_usage_ratio": "kv_cache_usage_perc",
    "argosy_kv_config_info": "cache_config_info",
    "argosy_prefix_query_tokens": "prefix_cache_queries",
    "argosy_prefix_hit_tokens": "prefix_cache_hits",
    "argosy_preemptions": "num_preemptions",
    "argosy_prompt_tokens": "prompt_tokens",
    "argosy_generation_tokens": "generation_tokens",
    "argosy_sequences_finished": "request_success",
    "argosy_time_to_first_token_seconds": "time_to_first_token_seconds",
    "argosy_inter_token_latency_seconds": "inter_token_latency_seconds",
    "argosy_time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "argosy_request_duration_seconds": "e2e_request_latency_seconds",
    "argosy_request_queue_seconds": "request_queue_time_seconds",
    "argosy_request_inference_seconds": "request_inference_time_seconds",
    "argosy_request_prefill_seconds": "request_prefill_time_seconds",
    "argosy_request_decode_seconds": "request_decode_time_seconds",
    "argosy_request_prompt_tokens": "request_prompt_tokens",
    "argosy_request_generation_tokens": "request_generation_tokens",
    "argosy_request_max_tokens": "request_params_max_tokens",
    "argosy_request_choices": "request_params_n",
    "argosy_step_tokens": "iteration_tokens_total",
    "argosy_engine_sleep_state": "engine_sleep_state",
    "argosy_drafts": "spec_decode_num_drafts",
    "argosy_draft_tokens": "spec_decode_num_draft_tokens",
    "argosy_accepted_draft_tokens": "spec_decode_num_accepted_tokens",
    "argosy_accepted_draft_tokens_per_position": "spec_decode_num_accepted_tokens_per_pos",
}
_VLLM_LABELS = {
    "model": "model_name",
    "finish_reason": "finished_reason",
    "num_blocks": "num_gpu_blocks",
}
_VLLM_FINISH_REASONS = {"cancelled": "abort"}


class VllmMetricsCollector(Collector):
    """Collector that renames the metrics of another one to vLLM's names and adds the label `engine="0"`."""

    def __init__(self, source: Collector) -> None:
        self._source = source
        self.lora_requests: tuple[str, str, str] | None = None
        """Number of adapters that may share a step, and the names of those that run and wait. None without adapters."""

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that vLLM has too, renamed."""
        for family in self._source.collect():
            if family.name in _VLLM_NAMES:
                yield _rename_family(family, "vllm:" + _VLLM_NAMES[family.name])
        if self.lora_requests is not None:
            limit, running, waiting = self.lora_requests
            labels = {
                "max_lora": limit,
                "running_lora_adapters": running,
                "waiting_lora_adapters": waiting,
            }
            info = Metric("vllm:lora_requests_info", "Time of the last report.", "gauge")
            info.add_sample(info.name, labels, time.time())
            yield info


def _rename_family(family: Metric, name: str) -> Metric:
    renamed = Metric(name, family.documentation, family.type)
    renamed.samples = [
        Sample(
            name + sample.name.removeprefix(family.name),
            _rename_labels(sample.labels),
            sample.value,
            sample.timestamp,
            sample.exemplar,
        )
        for sample in family.samples
    ]
    return renamed


def _rename_labels(labels: dict[str, str]) -> dict[str, str]:
    renamed = {_VLLM_LABELS.get(label, label): value for label, value in labels.items()}
    if "finished_reason" in renamed:
        reason = renamed["finished_reason"]
        renamed["finished_reason"] = _VLLM_FINISH_REASONS.get(reason, reason)
    return renamed | {"engine": "0"}
