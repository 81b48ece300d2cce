"""Data types that describe how one kind of backend differs from the others, and where it publishes its KV events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from argosy.deployment import BackendKind, KvEventAddress
from argosy.protocol import MAX_COUNT, Endpoint

T = TypeVar("T")
_WILDCARD_PREFIX = "tcp://*:"
CHAT_PATH = b"/v1/chat/completions"
COMPLETION_PATH = b"/v1/completions"
ARGOSY_FIELDS = frozenset(
    {
        *("resume", "timeout_s", "session_id", "cache_salt", "priority", "clamp_max_tokens"),
        "speculation",
    }
)
"""Request fields of Argosy. Most other servers do not know them or give them another meaning."""
PRIVILEGED_FIELDS = frozenset(
    {
        # Argosy's own, which is named as ignored where the server refuses a conversation that is too long.
        "truncation",
        # Identity of the request. Two requests with one id would be mixed up or cancel each other.
        "request_id",
        "rid",
        "session_params",
        # Source and target of KV block transfers, and the rank or slot that computes.
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
        # Other models than the requested one: fallbacks (OpenRouter, LiteLLM), or adapters by name or path.
        "models",
        "fallbacks",
        "lora",
        "lora_path",
        "lora_request",
        "adapter_id",
        # Code that the engine would run.
        "custom_logit_processor",
        "logits_processors",
    }
)
"""Request fields by which the components of a fleet control an engine. The gateway drops them from client requests.

Native replicas know none of them.
"""
INCOMPLETE_FINISH_REASONS = frozenset({"abort", "error", "cancelled", "timeout"})
"""Finish reasons of responses that a server did not complete, because it shuts down, failed or ran out of time."""


@dataclass(frozen=True, slots=True)
class ReportSource(Generic[T]):
    """Path at which a server reports its load, or where it publishes KV cache events, and the parser of the report."""

    path: bytes
    parse: Callable[[bytes], T]
    """Parser of the response body. Raises ValueError or msgspec.DecodeError for an unexpected body."""


@dataclass(frozen=True, slots=True)
class KvEventPorts:
    """Ports for KV cache events on the server's own host. A host that the report names is ignored."""

    events_port: int
    replay_port: int | None = None

    def to_address(self, server: Endpoint) -> KvEventAddress:
        """Return the address of the ports on the host of `server`."""
        replay = None if self.replay_port is None else f"{_WILDCARD_PREFIX}{self.replay_port}"
        return KvEventAddress(
            endpoint=f"{_WILDCARD_PREFIX}{self.events_port}", replay=replay
        ).resolve_host(server)


class _VllmPublisher(msgspec.Struct):
    endpoint: str
    replay_endpoint: str | None = None


def parse_vllm_sources(body: bytes) -> KvEventPorts | None:
    """Parse `/kv_event_sources` of vLLM, which has one source per data-parallel rank.

    Returns:
        The ports; None for several ranks, because the gateway cannot choose the rank of a request.
    """
    sources = list(msgspec.json.decode(body, type=dict[str, _VllmPublisher]).values())
    if len(sources) != 1 or not sources[0].endpoint.startswith("tcp://"):
        return None
    replay = sources[0].replay_endpoint
    return KvEventPorts(
        _parse_port(sources[0].endpoint), None if replay is None else _parse_port(replay)
    )


class _SglangKvEvents(msgspec.Struct):
    endpoint_port_base: int
    dp_size: int = 1


class _SglangServerInfo(msgspec.Struct):
    kv_events: _SglangKvEvents | None = None


def parse_sglang_info(body: bytes) -> KvEventPorts | None:
    """Parse `/server_info` of SGLang, which does not report a replay port. Returns None for several ranks."""
    config = msgspec.json.decode(body, type=_SglangServerInfo).kv_events
    return (
        None if config is None or config.dp_size != 1 else KvEventPorts(config.endpoint_port_base)
    )


def _parse_port(address: str) -> int:
    return int(address.rpartition(":")[2])


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Load of a server as it reports it. A field is None if the server does not report it.

    Raises:
        ValueError: A count is negative or above `MAX_COUNT`.
    """

    running: int | None = None
    """Requests being computed."""
    waiting: int | None = None
    """Requests in the server's queue."""
    kv_used: float | None = None
    """Used part of the KV cache, 0 to 1."""
    capacity: int | None = None
    """Maximum number of requests computed at once."""
    kv_capacity_tokens: int | None = None
    """Capacity of the KV cache in tokens."""

    def __post_init__(self) -> None:
        counts = (self.running, self.waiting, self.capacity, self.kv_capacity_tokens)
        if not all(0 <= count <= MAX_COUNT for count in counts if count is not None):
            raise ValueError(f"the load report has a count below 0 or above {MAX_COUNT}")


@dataclass(frozen=True, slots=True)
class BackendAdapter:
    """Differences of one kind of server from others with an OpenAI-compatible API."""

    kind: BackendKind
    health_path: bytes = b"/health"
    load_sources: tuple[ReportSource[LoadReport], ...] = ()
    """Load reports, best first. A server may have been started without some of them."""
    kv_event_source: ReportSource[KvEventPorts | None] | None = None
    """Report of where the server publishes its KV cache events. Without the report or ports in it there are none."""
    is_native: bool = False
    """Whether the server is an Argosy replica, whose streams carry resume metadata and which accepts `resume`."""
    token_id_paths: frozenset[bytes] = frozenset()
    """Paths whose streams carry token ids if the request has `return_token_ids`."""
    prefill_paths: frozenset[bytes] = frozenset()
    """Paths whose responses the server can continue after a given text."""
    prefill_flags: dict[str, bool] = field(default_factory=dict)
    """Fields of a chat request that ask the server to continue the last message."""
    include_stop_field: str = ""
    """Field that asks the server to keep stop strings in its text, so that it holds no text back; empty if none."""
    has_stream_usage: bool = True
    """Whether the server supports `stream_options.include_usage`."""
    has_continuous_usage: bool = False
    """Whether the server supports `stream_options.continuous_usage_stats`."""
    has_per_choice_usage: bool = False
    """Whether each choice of a stream reports its own usage, and a whole response only that of the first choice."""
    has_token_timings: bool = False
    """Whether each event reports the number of output tokens if the request has `timings_per_token`."""
    priority_sign: int = 0
    """Sign of `priority` in request bodies: 1 if lower values run first, -1 if higher values do, 0 if unsupported."""
    unsupported_fields: frozenset[str] = ARGOSY_FIELDS
    """Request fields that the server does not know or gives another meaning. The gateway drops them."""
    default_completion_tokens: int | None = None
    """`max_tokens` that the server assumes for a completion without one; None if it assumes no limit."""
    adapter_load_path: bytes = b""
    """Path of the call that loads an adapter by name and path; empty if the server has none."""
    adapter_unload_path: bytes = b""
    """Path of the call that unloads an adapter by name."""
    adapter_field: str = "model"
    """Field of a request that names the adapter."""
    client_error_markers: tuple[str, ...] = ()
    """Parts of the messages of 500 responses that the request caused, so that it would fail on every replica."""
