"""How each kind of server tells its load: Prometheus text under its own names, or JSON."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import msgspec

from argosy.gateway.backends.backend_adapter import LoadReport


@dataclass(frozen=True, slots=True)
class PrometheusLoadParser:
    """Reads Prometheus text. Of several names the first that is there counts; older versions had others."""

    running_metrics: tuple[bytes, ...]
    waiting_metrics: tuple[bytes, ...]
    kv_used_metrics: tuple[bytes, ...] = ()
    kv_tokens_metric: bytes | None = None

    def __call__(self, text: bytes) -> LoadReport:
        """What the text says. Several engines behind one server are added up. Raises ValueError."""
        size = () if self.kv_tokens_metric is None else (self.kv_tokens_metric,)
        found = parse_metric_values(
            text, {*self.running_metrics, *self.waiting_metrics, *self.kv_used_metrics, *size}
        )
        running, waiting = (
            _first_present(found, self.running_metrics),
            _first_present(found, self.waiting_metrics),
        )
        used = _first_present(found, self.kv_used_metrics)
        if not running and not waiting:
            raise ValueError(f"there is no {self.running_metrics[0].decode()} in its metrics")
        return LoadReport(
            running=int(sum(running)),
            waiting=int(sum(waiting)),
            kv_used=sum(used) / len(used) if used else None,
            kv_capacity_tokens=int(sum(_first_present(found, size))) or None,
        )


def parse_metric_values(text: bytes, names: set[bytes]) -> dict[bytes, list[float]]:
    """The values of these metrics, one for each set of labels. What is no number is left out."""
    found: dict[bytes, list[float]] = {}
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
            found.setdefault(name, []).append(value)
    return found


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
    kv_tokens_metric=b"sglang:max_total_num_tokens",
)
TGI_METRICS = PrometheusLoadParser(
    running_metrics=(b"tgi_batch_current_size",), waiting_metrics=(b"tgi_queue_size",)
)
LMDEPLOY_METRICS = PrometheusLoadParser(
    running_metrics=(b"lmdeploy:num_requests_running",),
    waiting_metrics=(b"lmdeploy:num_requests_waiting",),
    kv_used_metrics=(b"lmdeploy:gpu_cache_usage_perc",),
)
"""Its engine's part; see `lmdeploy_metrics`."""
LLAMA_CPP_METRICS = PrometheusLoadParser(
    running_metrics=(b"llamacpp:requests_processing",),
    waiting_metrics=(b"llamacpp:requests_deferred",),
    kv_used_metrics=(b"llamacpp:kv_cache_usage_ratio",),
)


_VLLM_CACHE_PATTERN = rb'^vllm:cache_config_info(?=\{)[^\n]*?[{,]%b="(\d+)"'
_VLLM_BLOCK_COUNT_PATTERN = re.compile(_VLLM_CACHE_PATTERN % b"num_gpu_blocks", re.MULTILINE)
_VLLM_BLOCK_SIZE_PATTERN = re.compile(_VLLM_CACHE_PATTERN % b"block_size", re.MULTILINE)


def parse_vllm_metrics(text: bytes) -> LoadReport:
    """The `/metrics` of vLLM, with the size of its cache from the labels of `vllm:cache_config_info`."""
    blocks, size = _VLLM_BLOCK_COUNT_PATTERN.findall(text), _VLLM_BLOCK_SIZE_PATTERN.findall(text)
    tokens = sum(int(b) * int(s) for b, s in zip(blocks, size, strict=False))
    return replace(VLLM_METRICS(text), kv_capacity_tokens=tokens or None)


_LMDEPLOY_API_WAITING_METRIC = b"lmdeploy:num_api_requests_waiting"


def parse_lmdeploy_metrics(text: bytes) -> LoadReport:
    """The `/metrics` of LMDeploy: what waits for a handle is told apart from what waits in the engine."""
    reading = LMDEPLOY_METRICS(text)
    before = sum(
        parse_metric_values(text, {_LMDEPLOY_API_WAITING_METRIC}).get(
            _LMDEPLOY_API_WAITING_METRIC, ()
        )
    )
    return replace(reading, waiting=(reading.waiting or 0) + int(before))


class _SglangLoad(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    token_usage: float = 0.0
    max_running_requests: int = 0
    max_total_num_tokens: int = 0


class _SglangLoads(msgspec.Struct):
    loads: list[_SglangLoad]


def parse_sglang_loads(body: bytes) -> LoadReport:
    """SGLang's `/v1/loads`: one entry for each data-parallel rank."""
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
    """TensorRT-LLM's `/metrics`: the iterations since it was asked last; none means that it stands idle."""
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
    """llama.cpp's `/slots`: one for each sequence that it can run. Whoever has none waits unseen."""
    slots = msgspec.json.decode(body, type=list[_LlamaCppSlot])
    return LoadReport(running=sum(slot.is_processing for slot in slots), capacity=len(slots))
