"""Adapters of the supported backends, which differ in their variant of the OpenAI API, and detection of a backend.

Taken from the sources of vLLM 0.32, SGLang 0.5, TensorRT-LLM 1, TGI 3, LMDeploy 0.16 and llama.cpp (November 2026).
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from argosy.deployment import BackendKind, ResumeMode
from argosy.gateway.backends import load_parsers
from argosy.gateway.backends.backend_adapter import (
    ARGOSY_FIELDS,
    CHAT_PATH,
    COMPLETION_PATH,
    BackendAdapter,
    ReportSource,
    parse_sglang_info,
    parse_vllm_sources,
)

BOTH_PATHS = frozenset({CHAT_PATH, COMPLETION_PATH})
COMPLETION_ONLY = frozenset({COMPLETION_PATH})
NO_PATHS: frozenset[bytes] = frozenset()

CONTINUE_FINAL_MESSAGE = {"continue_final_message": True, "add_generation_prompt": False}
"""vLLM's flags to continue the last message instead of starting a new one."""

LLAMA_CPP_CLIENT_ERROR_MARKERS = (
    "Failed to parse messages",
    "Failed to parse tools",
    "Jinja Exception",
    "While executing ",
    "input is not supported",
    "Failed to load image or audio file",
    "Failed to download image",
    "Invalid base64 value",
    "does not support multimodal requests",
    "Unknown reasoning format",
)
"""Messages of llama.cpp (`tools/server/server-common.cpp`, `common/{chat,jinja/value,jinja/runtime}.cpp`)."""

FetchPath = Callable[[bytes], Awaitable[tuple[int, bytes]]]
"""Function that sends a GET request and returns status and body. Raises UpstreamError."""
_KIND_BY_OWNER: dict[str, BackendKind] = {
    "vllm": "vllm",
    "sglang": "sglang",
    "tensorrt_llm": "tensorrt-llm",
    "lmdeploy": "lmdeploy",
    "llamacpp": "llama.cpp",
}
"""Backend kinds by the `owned_by` value in their model lists."""

_ADAPTERS = (
    BackendAdapter("auto", health_path=b"/v1/models"),
    BackendAdapter(
        "argosy", is_native=True, unsupported_fields=frozenset(), token_id_paths=BOTH_PATHS
    ),
    BackendAdapter(
        "vllm",
        load_sources=(ReportSource(b"/metrics", load_parsers.parse_vllm_metrics),),
        kv_event_source=ReportSource(b"/kv_event_sources", parse_vllm_sources),
        token_id_paths=BOTH_PATHS,
        prefill_paths=BOTH_PATHS,
        prefill_flags=CONTINUE_FINAL_MESSAGE,
        include_stop_field="include_stop_str_in_output",
        has_continuous_usage=True,
        priority_sign=1,
        unsupported_fields=ARGOSY_FIELDS - {"session_id", "cache_salt"},
        default_completion_tokens=16,
        adapter_load_path=b"/v1/load_lora_adapter",
        adapter_unload_path=b"/v1/unload_lora_adapter",
    ),
    BackendAdapter(
        "sglang",
        load_sources=(
            ReportSource(b"/v1/loads", load_parsers.parse_sglang_loads),
            ReportSource(b"/metrics", load_parsers.SGLANG_METRICS),
        ),
        kv_event_source=ReportSource(b"/server_info", parse_sglang_info),
        token_id_paths=COMPLETION_ONLY,
        prefill_paths=BOTH_PATHS,
        prefill_flags=CONTINUE_FINAL_MESSAGE,
        has_continuous_usage=True,
        priority_sign=-1,
        unsupported_fields=ARGOSY_FIELDS - {"cache_salt"},
        default_completion_tokens=16,
        adapter_load_path=b"/load_lora_adapter",
        adapter_unload_path=b"/unload_lora_adapter",
        adapter_field="lora_path",
    ),
    BackendAdapter(
        "tensorrt-llm",
        load_sources=(ReportSource(b"/metrics", load_parsers.parse_tensorrt_iterations),),
        prefill_paths=COMPLETION_ONLY,
        has_continuous_usage=True,
    ),
    BackendAdapter(
        "tgi",
        load_sources=(ReportSource(b"/metrics", load_parsers.TGI_METRICS),),
        prefill_paths=BOTH_PATHS,
    ),
    BackendAdapter(
        "lmdeploy",
        load_sources=(ReportSource(b"/metrics", load_parsers.parse_lmdeploy_metrics),),
        prefill_paths=COMPLETION_ONLY,
    ),
    BackendAdapter(
        "llama.cpp",
        load_sources=(
            ReportSource(b"/slots", load_parsers.parse_llama_cpp_slots),
            ReportSource(b"/metrics", load_parsers.LLAMA_CPP_METRICS),
        ),
        prefill_paths=BOTH_PATHS,
        prefill_flags=CONTINUE_FINAL_MESSAGE,
        has_per_choice_usage=True,
        has_token_timings=True,
        client_error_markers=LLAMA_CPP_CLIENT_ERROR_MARKERS,
    ),
    BackendAdapter("openai", health_path=b"/v1/models"),
)
ADAPTERS = {adapter.kind: adapter for adapter in _ADAPTERS}


@functools.cache
def get_adapter(
    kind: BackendKind,
    resume_mode: ResumeMode = "exact",
    *,
    stream_usage: bool = True,
    priority_scheduling: bool = False,
) -> BackendAdapter:
    """Return the adapter of a backend, restricted to the features that the replica's configuration allows.

    `resume_mode` is the best allowed way to resume a stream. `stream_usage` allows requests for the usage of streams.
    `priority_scheduling` means that the server was started to schedule by `priority`.
    """
    adapter = ADAPTERS[kind]
    return replace(
        adapter,
        token_id_paths=adapter.token_id_paths if resume_mode == "exact" else NO_PATHS,
        prefill_paths=adapter.prefill_paths if resume_mode != "none" else NO_PATHS,
        has_stream_usage=adapter.has_stream_usage and stream_usage,
        has_continuous_usage=adapter.has_continuous_usage and stream_usage,
        priority_sign=adapter.priority_sign if priority_scheduling else 0,
    )


class _ListedModel(msgspec.Struct):
    id: str = ""
    owned_by: str = ""
    max_model_len: int | None = None
    tasks: frozenset[str] | None = None


class _ModelListing(msgspec.Struct):
    data: list[_ListedModel] = []


@dataclass(frozen=True, slots=True)
class DetectedBackend:
    """Kind and models of a server, as it reports them."""

    kind: BackendKind
    models: dict[str, int | None]
    """Context length in tokens by model name; None if the server does not report it."""
    tasks: dict[str, frozenset[str]] = field(default_factory=dict)
    """Tasks by model name, as Argosy's replicas and gateways report them."""


async def detect_backend(fetch: FetchPath) -> DetectedBackend | None:
    """Detect the kind of a server and its models.

    Args:
        fetch: Function that fetches a path of the server.

    Returns:
        The detected backend; None if the server cannot answer yet.
    """
    status, body = await fetch(b"/v1/models")
    if status == 429 or status >= 500:
        return None
    listed = _parse_model_listing(body) if status == 200 else []
    models = {model.id: model.max_model_len or None for model in listed}
    tasks = {model.id: model.tasks for model in listed if model.tasks is not None}
    owners = {model.owned_by for model in listed}
    for owner, kind in _KIND_BY_OWNER.items():
        if owner in owners:
            return DetectedBackend(kind, models)
    if "argosy" in owners and (await fetch(b"/load"))[0] != 404:  # a gateway has no /load
        return DetectedBackend("argosy", models, tasks)
    if await _is_tgi(fetch):
        return DetectedBackend("tgi", models)
    return DetectedBackend("openai", models, tasks)


def _parse_model_listing(body: bytes) -> list[_ListedModel]:
    try:
        return msgspec.json.decode(body, type=_ModelListing).data
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []


async def _is_tgi(fetch: FetchPath) -> bool:
    """Whether the server is TGI. Its model list shows the models' authors, but only TGI has this `/info`."""
    status, body = await fetch(b"/info")
    try:
        info = msgspec.json.decode(body, type=dict[str, Any]) if status == 200 else {}
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return {"model_id", "max_total_tokens", "max_concurrent_requests"} <= info.keys()
