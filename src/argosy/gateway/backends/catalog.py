"""The kinds of servers that can stand behind the gateway, each with its own dialect of the OpenAI API.

Read from vLLM 0.32, SGLang 0.5, TensorRT-LLM 1, TGI 3, LMDeploy 0.16 and llama.cpp (November 2026).
"""

from __future__ import annotations

import functools
from dataclasses import replace

from argosy.gateway.backends import load_parsers
from argosy.gateway.backends.backend_adapter import (
    BROKEN_OFF,
    CHAT_PATH,
    COMPLETION_PATH,
    OURS,
    Carry,
    Dialect,
    Kind,
    LoadSource,
)
from argosy.gateway.backends.kv_event_sources import KvSource, sglang_info, vllm_sources

BOTH = frozenset({CHAT_PATH, COMPLETION_PATH})
CHAT = frozenset({CHAT_PATH})
COMPLETION = frozenset({COMPLETION_PATH})
NONE: frozenset[bytes] = frozenset()

CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}
"""vLLM's way to say that the last message is to be carried on."""

LLAMA_CPP_MISREAD = (
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
"""llama.cpp's (`tools/server/server-common.cpp`, `common/{chat,jinja/value,jinja/runtime}.cpp`)."""

_DIALECTS = (
    Dialect("auto", health=b"/v1/models"),
    Dialect("argosy", journal=True, unknown=frozenset()),
    Dialect(
        "vllm",
        loads=(LoadSource(b"/metrics", load_parsers.vllm_metrics),),
        kv_source=KvSource(b"/kv_event_sources", vllm_sources),
        ids=BOTH,
        prefill=BOTH,
        prefill_flags=CONTINUE,
        keeps_stops="include_stop_str_in_output",
        usage_with_each=True,
        urgency=1,
        unknown=OURS - {"session_id", "cache_salt"},
        completion_tokens=16,
    ),
    Dialect(
        "sglang",
        loads=(
            LoadSource(b"/v1/loads", load_parsers.sglang_loads),
            LoadSource(b"/metrics", load_parsers.SGLANG),
        ),
        kv_source=KvSource(b"/server_info", sglang_info),
        ids=COMPLETION,
        prefill=BOTH,
        prefill_flags=CONTINUE,
        usage_with_each=True,
        urgency=-1,
        unknown=OURS - {"cache_salt"},
        completion_tokens=16,
    ),
    Dialect(
        "tensorrt-llm",
        loads=(LoadSource(b"/metrics", load_parsers.tensorrt_iterations),),
        prefill=COMPLETION,
        usage_with_each=True,
        # `CompletionOutput.finish_reason`. A gateway of ours says so of an answer whose own time was over.
        broken_off=BROKEN_OFF | {"timeout"},
    ),
    Dialect("tgi", loads=(LoadSource(b"/metrics", load_parsers.TGI),), prefill=BOTH),
    Dialect(
        "lmdeploy",
        loads=(LoadSource(b"/metrics", load_parsers.lmdeploy_metrics),),
        prefill=COMPLETION,
    ),
    Dialect(
        "llama.cpp",
        loads=(
            LoadSource(b"/slots", load_parsers.llama_cpp_slots),
            LoadSource(b"/metrics", load_parsers.LLAMA_CPP),
        ),
        prefill=BOTH,
        prefill_flags=CONTINUE,
        usage_of_each=True,
        timings=True,
        misread=LLAMA_CPP_MISREAD,
    ),
    Dialect("openai", health=b"/v1/models"),
)
DIALECTS = {dialect.kind: dialect for dialect in _DIALECTS}


@functools.cache
def dialect_of(
    kind: Kind, carry: Carry = "exact", *, usage: bool = True, urgency: bool = False
) -> Dialect:
    """The dialect of a server, as far as its configuration lets it be used."""
    whole = DIALECTS[kind]
    return replace(
        whole,
        ids=whole.ids if carry == "exact" else NONE,
        prefill=whole.prefill if carry != "none" else NONE,
        usage=whole.usage and usage,
        usage_with_each=whole.usage_with_each and usage,
        urgency=whole.urgency if urgency else 0,
    )
