"""What tells one kind of upstream server from another, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from argosy.gateway.backends.kv_event_sources import KvEventSource
from argosy.protocol import MAX_COUNT

BackendKind = Literal[
    "auto",
    "argosy",
    "vllm",
    "sglang",
    "tensorrt-llm",
    "tgi",
    "lmdeploy",
    "llama.cpp",
    "openai",
]
"""`auto`: not known yet, the server is asked. `openai`: any other server or hosted API that speaks it."""

ResumeMode = Literal["exact", "prefill", "none"]
"""How a stream that broke may be carried on, at most: from its token ids, from its text, or not at all."""

CHAT_PATH = b"/v1/chat/completions"
COMPLETION_PATH = b"/v1/completions"

ARGOSY_FIELDS = frozenset({"resume", "timeout_s", "session_id", "cache_salt", "priority"})
"""Fields of a body that this gateway and its own replicas read; few others know them, or mean the same."""

PRIVILEGED_FIELDS = frozenset(
    {
        # Whose request it is: two of one id would be taken for one another, or end each other.
        "request_id",
        "rid",
        "session_params",
        # From where KV blocks are fetched, whom they are given, and which rank or slot computes.
        "kv_transfer_params",
        "ec_transfer_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "disaggregated_params",
        "migration_request",
        "with_cache",
        "preserve_cache",
        "kv_cache_retention_config",
        "data_parallel_rank",
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
        "id_slot",
        # Another model than the one that was asked for: in its place (OpenRouter, LiteLLM), or an adapter, by its name
        # or from a path.
        "models",
        "fallbacks",
        "lora",
        "lora_path",
        "lora_request",
        "adapter_id",
        # Code.
        "custom_logit_processor",
        "logits_processors",
    }
)
"""Fields by which the parts of a fleet speak with an engine: what they say is not for clients to say, so they are left
out. Our own replicas know none of them."""


INCOMPLETE_FINISH_REASONS = frozenset({"abort", "error", "cancelled"})
"""Finish reasons of answers that a server did not bring to their end: it shuts down, or its engine died."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a server says of its load; None where it does not say. Raises ValueError for what is no count."""

    running: int | None = None
    """Requests being computed."""
    waiting: int | None = None
    kv_used: float | None = None
    """Part of its KV cache, 0 to 1."""
    capacity: int | None = None
    """Requests that it computes at once, at most."""
    kv_capacity_tokens: int | None = None
    """Tokens that its KV cache holds."""

    def __post_init__(self) -> None:
        told = (self.running, self.waiting, self.capacity, self.kv_capacity_tokens)
        if not all(0 <= count <= MAX_COUNT for count in told if count is not None):
            raise ValueError(f"its load has a number below 0 or above {MAX_COUNT}")


@dataclass(frozen=True, slots=True)
class LoadSource:
    """Where a server tells its load, and how that is read."""

    path: bytes
    parse: Callable[[bytes], LoadReport]
    """Raises ValueError or msgspec.DecodeError when it is not what was expected."""


@dataclass(frozen=True, slots=True)
class BackendAdapter:
    """One kind of server. All speak the OpenAI API; this is how they differ."""

    kind: BackendKind
    health_path: bytes = b"/health"
    load_sources: tuple[LoadSource, ...] = ()
    """Best first; a server may have been started without some of them."""
    kv_event_source: KvEventSource | None = None
    """Where it says that it publishes its KV cache events; None: it publishes none that are read here."""
    is_native: bool = False
    """Its streams carry our journal and `resume` carries them on: our own replica."""
    token_id_paths: frozenset[bytes] = frozenset()
    """Paths whose streams tell token ids when asked with `return_token_ids`."""
    prefill_paths: frozenset[bytes] = frozenset()
    """Paths whose answers it can carry on after a given text."""
    prefill_flags: dict[str, bool] = field(default_factory=dict)
    """Fields of a chat that ask for that."""
    include_stop_field: str = ""
    """Field with which it leaves stop strings in its text, and so holds none of it back; empty: there is none."""
    has_stream_usage: bool = True
    """It takes `stream_options.include_usage`."""
    has_continuous_usage: bool = False
    """It takes `stream_options.continuous_usage_stats` too."""
    has_per_choice_usage: bool = False
    """Of several choices each tells its own usage, and a whole answer that of the first."""
    has_token_timings: bool = False
    """It tells with each event how many tokens it has made, when asked with `timings_per_token`."""
    priority_sign: int = 0
    """Sign of `priority` in its bodies: 1 where a lower one goes first, -1 a higher one; 0: it goes by none."""
    unsupported_fields: frozenset[str] = ARGOSY_FIELDS
    """Fields that are left out of bodies, because it does not know them or means something else by them."""
    default_completion_tokens: int | None = None
    """`max_tokens` of a completion that does not say; None: no limit."""
    incomplete_finish_reasons: frozenset[str] = INCOMPLETE_FINISH_REASONS
    """Finish reasons of answers that are none."""
    client_error_markers: tuple[str, ...] = ()
    """What is said in answers with 500 that are the request's own fault: it could not be read, and would be nowhere."""
