"""Parsers of the load reports of each backend: Prometheus text with its own metric names, or JSON."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import msgspec

from argosy.gateway.backends.backend_adapter import LoadReport


@dataclass(frozen=True, slots=True)
class PrometheusLoadParser:
    """Parser of Prometheus text.

    Each value has a list of metric names, since older versions used others. The first name that is present counts.
    """

    running_metrics: tuple[bytes, ...]
    waiting_metrics: tuple[bytes, ...]
    kv_used_metrics: tuple[bytes, ...] = ()
    kv_tokens_metrics: tuple[bytes, ...] = ()

    def __call__(self, text: bytes) -> LoadReport:
        """Return the load in `text`. The counts of several engines behind one server are added up.

        Raises:
            ValueError: The text has neither running nor waiting requests.
        """
        values = parse_metric_values(
            text,
            {
                *self.running_metrics,
                *self.waiting_metrics,
                *self.kv_used_metrics,
                *self.kv_tokens_metrics,
            },
        )
        running, waiting = (
            _first_present(values, self.running_metrics),
            _first_present(values, self.waiting_metrics),
        )
        used = _first_present(values, self.kv_used_metrics)
        if not running and not waiting:
            raise ValueError(f"metric {self.running_metrics[0].decode()} is missing")
        return LoadReport(
            running=int(sum(running)),
            waiting=int(sum(waiting)),
            kv_used=sum(used) / len(used) if used else None,
            kv_capacity_tokens=int(sum(_first_present(values, self.kv_tokens_metrics))) or None,
        )


def parse_metric_values(text: bytes, names: set[bytes]) -> dict[bytes, list[float]]:
    """Return the values of the metrics `names`, one for each set of labels. Values that are no number are skipped."""
    values: dict[bytes, list[float]] = {}
    for line in text.split(b"\n"):
        name = line.partition(b"{")[0].partition(b" ")[0]
        if name not in names:
            continue
        rest = line.rpartition(b"}")[2] if b"{" in line else line[len(name) :]
        try:
            value = float(rest.split()[0])
        except (ValueError, IndexError):
            continue
        if math.isfinite(value):
            values.setdefault(name, []).append(value)
    return values


def _first_present(values: dict[bytes, list[float]], names: tuple[bytes, ...]) -> list[float]:
    return next((values[name] for name in names if name in values), [])


VLLM_METRICS = PrometheusLoadParser(
    running_metrics=(b"vllm:num_requests_running",),
    waiting_metrics=(b"vllm:num_requests_waiting",),
    kv_used_metrics=(b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"),
)
SGLANG_METRICS = PrometheusLoadParser(
    running_metrics=(b"sglang:num_running_reqs",),
    waiting_metrics=(b"sglang:num_queue_reqs",),
    kv_used_metrics=(b"sglang:token_usage",),
    kv_tokens_metrics=(b"sglang:max_total_num_tokens",),
)
TGI_METRICS = PrometheusLoadParser(
    running_metrics=(b"tgi_batch_current_size",), waiting_metrics=(b"tgi_queue_size",)
)
LMDEPLOY_METRICS = PrometheusLoadParser(
    running_metrics=(b"lmdeploy:num_requests_running",),
    waiting_metrics=(b"lmdeploy:num_requests_waiting",),
    kv_used_metrics=(b"lmdeploy:gpu_cache_usage_perc",),
)
"""Metrics of LMDeploy's engine; `parse_lmdeploy_metrics` adds those of its API server."""
LLAMA_CPP_METRICS = PrometheusLoadParser(
    running_metrics=(b"llamacpp:requests_processing",),
    waiting_metrics=(b"llamacpp:requests_deferred",),
    kv_used_metrics=(b"llamacpp:kv_cache_usage_ratio",),
)


_VLLM_CACHE_PATTERN = rb'^vllm:cache_config_info(?=\{)[^\n]*?[{,]%b="(\d+)"'
_VLLM_BLOCK_COUNT_PATTERN = re.compile(_VLLM_CACHE_PATTERN % b"num_gpu_blocks", re.MULTILINE)
_VLLM_BLOCK_SIZE_PATTERN = re.compile(_VLLM_CACHE_PATTERN % b"block_size", re.MULTILINE)


def parse_vllm_metrics(text: bytes) -> LoadReport:
    """Parse `/metrics` of vLLM. The size of the KV cache comes from the labels of `vllm:cache_config_info`."""
    counts, sizes = _VLLM_BLOCK_COUNT_PATTERN.findall(text), _VLLM_BLOCK_SIZE_PATTERN.findall(text)
    tokens = sum(int(count) * int(size) for count, size in zip(counts, sizes, strict=False))
    return replace(VLLM_METRICS(text), kv_capacity_tokens=tokens or None)


_LMDEPLOY_API_WAITING_METRIC = b"lmdeploy:num_api_requests_waiting"


def parse_lmdeploy_metrics(text: bytes) -> LoadReport:
    """Parse `/metrics` of LMDeploy. Requests that wait for an engine handle have a metric of their own."""
    report = LMDEPLOY_METRICS(text)
    api_waiting = sum(
        parse_metric_values(text, {_LMDEPLOY_API_WAITING_METRIC}).get(
            _LMDEPLOY_API_WAITING_METRIC, ()
        )
    )
    return replace(report, waiting=(report.waiting or 0) + int(api_waiting))


class _SglangLoad(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    token_usage: float = 0.0
    max_running_requests: int = 0
    max_total_num_tokens: int = 0


class _SglangLoads(msgspec.Struct):
    loads: list[_SglangLoad]


def parse_sglang_loads(body: bytes) -> LoadReport:
    """Parse `/v1/loads` of SGLang, which has one entry per data-parallel rank."""
    loads = msgspec.json.decode(body, type=_SglangLoads).loads
    return LoadReport(
        running=sum(load.num_running_reqs for load in loads),
        waiting=sum(load.num_waiting_reqs for load in loads),
        kv_used=sum(load.token_usage for load in loads) / max(1, len(loads)),
        capacity=sum(load.max_running_requests for load in loads) or None,
        kv_capacity_tokens=sum(load.max_total_num_tokens for load in loads) or None,
    )


class _TensorrtKvCacheStats(msgspec.Struct, rename="camel"):
    used_num_blocks: int = 0
    max_num_blocks: int = 0
    tokens_per_block: int = 0


class _TensorrtIteration(msgspec.Struct, rename="camel"):
    num_active_requests: int = 0
    num_queued_requests: int = 0
    max_num_active_requests: int = 0
    kv_cache_stats: _TensorrtKvCacheStats | None = None


def parse_tensorrt_iterations(body: bytes) -> LoadReport:
    """Parse `/metrics` of TensorRT-LLM: the iterations since the last request. An idle engine reports none."""
    iterations = msgspec.json.decode(body, type=list[_TensorrtIteration])
    if not iterations:
        return LoadReport(running=0, waiting=0)
    last = iterations[-1]
    kv = last.kv_cache_stats
    return LoadReport(
        running=last.num_active_requests,
        waiting=last.num_queued_requests,
        kv_used=kv.used_num_blocks / kv.max_num_blocks if kv and kv.max_num_blocks else None,
        capacity=last.max_num_active_requests or None,
        kv_capacity_tokens=kv.max_num_blocks * kv.tokens_per_block or None if kv else None,
    )


class _LlamaCppSlot(msgspec.Struct):
    is_processing: bool


def parse_llama_cpp_slots(body: bytes) -> LoadReport:
    """Parse `/slots` of llama.cpp, one per sequence that can run. Requests that wait for a slot are not reported."""
    slots = msgspec.json.decode(body, type=list[_LlamaCppSlot])
    return LoadReport(running=sum(slot.is_processing for slot in slots), capacity=len(slots))
