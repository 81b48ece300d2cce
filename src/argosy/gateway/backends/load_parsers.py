"""How each kind of server tells its load: Prometheus text under its own names, or JSON."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import msgspec

from argosy.gateway.backends.backend_adapter import Reading


@dataclass(frozen=True, slots=True)
class Gauges:
    """Reads Prometheus text. Of several names the first that is there counts; older versions had others."""

    running: tuple[bytes, ...]
    waiting: tuple[bytes, ...]
    kv_used: tuple[bytes, ...] = ()
    kv_tokens: bytes | None = None

    def __call__(self, text: bytes) -> Reading:
        """What the text says. Several engines behind one server are added up. Raises ValueError."""
        size = () if self.kv_tokens is None else (self.kv_tokens,)
        found = values(text, {*self.running, *self.waiting, *self.kv_used, *size})
        running, waiting = _first(found, self.running), _first(found, self.waiting)
        used = _first(found, self.kv_used)
        if not running and not waiting:
            raise ValueError(f"there is no {self.running[0].decode()} in its metrics")
        return Reading(
            running=int(sum(running)),
            waiting=int(sum(waiting)),
            kv_used=sum(used) / len(used) if used else None,
            kv_tokens=int(sum(_first(found, size))) or None,
        )


def values(text: bytes, names: set[bytes]) -> dict[bytes, list[float]]:
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


def _first(found: dict[bytes, list[float]], names: tuple[bytes, ...]) -> list[float]:
    return next((found[name] for name in names if name in found), [])


VLLM = Gauges(
    running=(b"vllm:num_requests_running",),
    waiting=(b"vllm:num_requests_waiting",),
    kv_used=(b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"),
)
SGLANG = Gauges(
    running=(b"sglang:num_running_reqs",),
    waiting=(b"sglang:num_queue_reqs",),
    kv_used=(b"sglang:token_usage",),
    kv_tokens=b"sglang:max_total_num_tokens",
)
TGI = Gauges(running=(b"tgi_batch_current_size",), waiting=(b"tgi_queue_size",))
LMDEPLOY = Gauges(
    running=(b"lmdeploy:num_requests_running",),
    waiting=(b"lmdeploy:num_requests_waiting",),
    kv_used=(b"lmdeploy:gpu_cache_usage_perc",),
)
"""Its engine's part; see `lmdeploy_metrics`."""
LLAMA_CPP = Gauges(
    running=(b"llamacpp:requests_processing",),
    waiting=(b"llamacpp:requests_deferred",),
    kv_used=(b"llamacpp:kv_cache_usage_ratio",),
)


_VLLM_CACHE = rb'^vllm:cache_config_info(?=\{)[^\n]*?[{,]%b="(\d+)"'
_VLLM_BLOCKS = re.compile(_VLLM_CACHE % b"num_gpu_blocks", re.MULTILINE)
_VLLM_BLOCK_SIZE = re.compile(_VLLM_CACHE % b"block_size", re.MULTILINE)


def vllm_metrics(text: bytes) -> Reading:
    """The `/metrics` of vLLM, with the size of its cache from the labels of `vllm:cache_config_info`."""
    blocks, size = _VLLM_BLOCKS.findall(text), _VLLM_BLOCK_SIZE.findall(text)
    tokens = sum(int(b) * int(s) for b, s in zip(blocks, size, strict=False))
    return replace(VLLM(text), kv_tokens=tokens or None)


_LMDEPLOY_API_WAITING = b"lmdeploy:num_api_requests_waiting"


def lmdeploy_metrics(text: bytes) -> Reading:
    """The `/metrics` of LMDeploy: what waits for a handle is told apart from what waits in the engine."""
    reading = LMDEPLOY(text)
    before = sum(values(text, {_LMDEPLOY_API_WAITING}).get(_LMDEPLOY_API_WAITING, ()))
    return replace(reading, waiting=(reading.waiting or 0) + int(before))


class _SglangLoad(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    token_usage: float = 0.0
    max_running_requests: int = 0
    max_total_num_tokens: int = 0


class _SglangLoads(msgspec.Struct):
    loads: list[_SglangLoad]


def sglang_loads(body: bytes) -> Reading:
    """SGLang's `/v1/loads`: one entry for each data-parallel rank."""
    loads = msgspec.json.decode(body, type=_SglangLoads).loads
    return Reading(
        running=sum(load.num_running_reqs for load in loads),
        waiting=sum(load.num_waiting_reqs for load in loads),
        kv_used=sum(load.token_usage for load in loads) / max(1, len(loads)),
        capacity=sum(load.max_running_requests for load in loads) or None,
        kv_tokens=sum(load.max_total_num_tokens for load in loads) or None,
    )


class _KvCacheStats(msgspec.Struct, rename="camel"):
    used_num_blocks: int = 0
    max_num_blocks: int = 0
    tokens_per_block: int = 0


class _Iteration(msgspec.Struct, rename="camel"):
    num_active_requests: int = 0
    num_queued_requests: int = 0
    max_num_active_requests: int = 0
    kv_cache_stats: _KvCacheStats | None = None


def tensorrt_iterations(body: bytes) -> Reading:
    """TensorRT-LLM's `/metrics`: the iterations since it was asked last; none means that it stands idle."""
    iterations = msgspec.json.decode(body, type=list[_Iteration])
    if not iterations:
        return Reading(running=0, waiting=0)
    last = iterations[-1]
    kv = last.kv_cache_stats
    return Reading(
        running=last.num_active_requests,
        waiting=last.num_queued_requests,
        kv_used=kv.used_num_blocks / kv.max_num_blocks if kv and kv.max_num_blocks else None,
        capacity=last.max_num_active_requests or None,
        kv_tokens=kv.max_num_blocks * kv.tokens_per_block or None if kv else None,
    )


class _Slot(msgspec.Struct):
    is_processing: bool


def llama_cpp_slots(body: bytes) -> Reading:
    """llama.cpp's `/slots`: one for each sequence that it can run. Whoever has none waits unseen."""
    slots = msgspec.json.decode(body, type=list[_Slot])
    return Reading(running=sum(slot.is_processing for slot in slots), capacity=len(slots))
