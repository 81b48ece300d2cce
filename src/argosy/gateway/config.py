"""The gateway's settings: a YAML file whose every key is known, or refused by name. Times are in seconds."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from argosy.gateway.auth import AuthConfig
from argosy.gateway.backends import BackendKind, KvEventAddress, ResumeMode
from argosy.gateway.filters import LimitsConfig
from argosy.gateway.model_routes import RouteConfig, route_name, validate_route
from argosy.gateway.pool import DiscoveryMode
from argosy.gateway.request_trace import ExplainConfig
from argosy.gateway.settings_file import decode_settings
from argosy.gateway.upstream import UpstreamTls
from argosy.http_server import TlsConfig
from argosy.policy import RoutingPolicyName
from argosy.store import IdempotencyConfig, StoreConfig

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")
_RESERVED_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection"})
"""Headers that the gateway writes itself: a second one would end a request elsewhere."""
ModelName = Annotated[str, Meta(max_length=200, pattern=r"^[^\s\x00-\x1f]([^\x00-\x1f\x7f]*\S)?$")]
PositiveFloat = Annotated[float, Meta(gt=0)]


class ReplicaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server behind a model."""

    url: str
    discover: DiscoveryMode | None = None
    """Each address that the URL's host name has is a replica of its own; the name is looked up again and again."""
    name: str | None = None
    """What metrics, explanations and the ledger call it; by default its URL. Where it is discovered: NAME@ADDRESS."""
    kind: BackendKind = "auto"
    """What it is; `auto` asks it."""
    model: str | None = None
    """What it calls the model; by default the public name."""
    max_requests: Annotated[int, Meta(ge=1)] | None = None
    """Most requests that it gets at a time; None: as many as it says that it runs, 256 where it does not say."""
    api_key_env: str | None = None
    """Environment variable that holds its key."""
    key_header: str = "authorization"
    key_prefix: str = "Bearer "
    """What is put before the key in that header."""
    headers: dict[str, str] = {}
    """Sent with every request: an organisation, a project, an API version."""
    resume_mode: ResumeMode = "exact"
    """How a stream that broke may be carried on, at most."""
    stream_usage: bool = True
    """Ask for the usage of streams; off for servers that refuse `stream_options`."""
    priority_scheduling: bool = False
    """It was started so that it computes by `priority` (vLLM: --scheduling-policy priority, SGLang:
    --enable-priority-scheduling): each request says how urgent it is."""
    kv_events: KvEventAddress | None = None
    """Where vLLM or SGLang publishes its KV cache events; None: it is asked, and those that know say so."""
    tls: UpstreamTls = UpstreamTls()


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A public model name and who answers for it."""

    name: ModelName
    aliases: tuple[ModelName, ...] = ()
    routing: RoutingPolicyName = "least-cost"
    hedge_after_s: PositiveFloat | None = None
    """Ask a second replica too when the first has given nothing of an answer for so long; None: never."""
    replicas: Annotated[list[ReplicaConfig], Meta(min_length=1)]


class Timeouts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a replica may take.

    Streams are bounded by their pauses: who no longer wants one leaves it. Our own replicas are asked for streams, too,
    where the client's whole answer can be put together from one.
    """

    connect_timeout_s: PositiveFloat = 2.0
    first_token_timeout_s: PositiveFloat = 120.0
    """From the request to a stream's first token."""
    stream_idle_timeout_s: PositiveFloat = 30.0
    """From one piece of a stream to the next."""
    non_streaming_timeout_s: PositiveFloat = 3600.0
    """For an answer that the replica sends in one piece."""
    request_timeout_s: PositiveFloat | None = None
    """For any request, from its arrival: then its answer ends with what there is, as at its own `timeout_s`."""
    failover_timeout_s: PositiveFloat = 30.0
    """How long a request waits for replicas that have died to be replaced."""


class QueueConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much may wait in front of each model, and how long."""

    max_requests: Annotated[int, Meta(ge=0)] = 5000
    max_bytes: Annotated[int, Meta(ge=0)] = 1 << 30
    timeout_s: PositiveFloat = 60.0


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    models: Annotated[list[ModelConfig], Meta(min_length=1)]
    routes: list[RouteConfig] = []
    """The first that fits a request decides which model answers it; none: the one that is asked for."""
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """0 takes a free one."""
    uds: str | None = None
    """Path of a Unix domain socket to listen on instead."""
    tls: TlsConfig | None = None
    """Listen over TLS."""
    store: StoreConfig | None = None
    """Accounts, keys, limits, prices and the ledger; None: one person, on their own machine."""
    auth: AuthConfig = AuthConfig()
    limits: LimitsConfig = LimitsConfig()
    timeouts: Timeouts = Timeouts()
    queue: QueueConfig = QueueConfig()
    idempotency: IdempotencyConfig = IdempotencyConfig()
    """The answers that are kept under the keys that clients give (`Idempotency-Key`)."""
    explain: ExplainConfig = ExplainConfig()
    max_failed_attempts: Annotated[int, Meta(ge=1, le=10)] = 4
    """So many failures that living replicas answer with (5xx), or replicas that are lost with it while it hardly gets
    on, and a request is given up."""
    body_limit_bytes: Annotated[int, Meta(ge=1)] = 32 * 1024 * 1024
    body_timeout_s: PositiveFloat = 60.0
    slow_reader_timeout_s: PositiveFloat = 30.0
    sse_keepalive_interval_s: PositiveFloat = 15.0
    max_connection_age_s: PositiveFloat = 600.0
    """About so long a client's connection is kept; then it is closed between two requests, so that clients of several
    gateways spread anew."""
    connection_idle_timeout_s: PositiveFloat = 75.0
    """So long a client's connection is kept without a request. A proxy has to keep its own for less: else it sends
    requests on connections that are being closed."""
    fast_path: Literal["auto", "off"] = "auto"
    """Streams that need no decision are passed on by native code, where a compiler is there to build it."""
    drain_deadline_s: Annotated[float, Meta(ge=0)] = 30.0
    drain_keepalive_s: Annotated[float, Meta(ge=0)] = 1.0
    """So long a connection of a gateway that leaves waits for a request that may be on its way."""
    log_format: Literal["json", "console"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"


def load_config(path: Path) -> GatewayConfig:
    """Read the file. Raises ValueError, naming the file and the key."""
    try:
        config = decode_settings(path.read_bytes(), GatewayConfig)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    names = [name for model in config.models for name in (model.name, *model.aliases)]
    _reject_duplicates(path, "the model name", names)
    for model in config.models:
        _check_replicas(path, model)
    _check_routes(path, config, names)
    if config.store is None and config.limits.redis is not None:
        raise ValueError(f"{path}: limits.redis shares the limits of accounts; add a store")
    if config.store is None and config.auth.mode == "required" and config.auth.jwt is None:
        raise ValueError(f"{path}: auth.mode is keys, and nobody has one; add a store")
    return config


def _check_replicas(path: Path, model: ModelConfig) -> None:
    names = [replica.name or replica.url for replica in model.replicas]
    _reject_duplicates(path, f"of {model.name!r} the replica", names)
    discovered = {
        name for name, one in zip(names, model.replicas, strict=True) if one.discover is not None
    }
    for name, replica in zip(names, model.replicas, strict=True):
        if name.rpartition("@")[0] in discovered:
            raise ValueError(
                f"{path}: {name!r} is what discovery may call a replica; name it differently"
            )
        if replica.discover is not None:
            _check_discovered(path, replica)
        if replica.tls != UpstreamTls() and not replica.url.startswith("https:"):
            raise ValueError(
                f"{path}: {replica.url}: tls is for https URLs; write https, or remove it"
            )
        if replica.kv_events is not None and replica.kind not in {"auto", "vllm", "sglang"}:
            raise ValueError(f"{path}: {replica.url}: kv_events is of vllm and sglang; remove it")
        if replica.priority_scheduling and replica.kind not in {"auto", "vllm", "sglang"}:
            raise ValueError(
                f"{path}: {replica.url}: priority_scheduling is of vllm and sglang; remove it"
            )


def _check_routes(path: Path, config: GatewayConfig, model_names: list[str]) -> None:
    names = [route_name(route, place) for place, route in enumerate(config.routes)]
    _reject_duplicates(path, "the route", names)
    for name, route in zip(names, config.routes, strict=True):
        try:
            validate_route(route, model_names, has_accounts=config.store is not None)
        except ValueError as error:
            raise ValueError(f"{path}: route {name!r}: {error}") from error


def _check_discovered(path: Path, replica: ReplicaConfig) -> None:
    if not replica.url.startswith(("http:", "https:")):
        raise ValueError(
            f"{path}: {replica.url}: discover looks up a host's name; write http://HOST:PORT"
        )
    if replica.kv_events is not None and not replica.kv_events.has_wildcard_host:
        raise ValueError(
            f"{path}: {replica.url}: kv_events names one server, and discover finds several; write tcp://*:PORT"
        )


def _reject_duplicates(path: Path, what: str, names: list[str]) -> None:
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"{path}: {what} {min(twice)!r} is there twice; keep one")


def build_configured_headers(replica: ReplicaConfig) -> tuple[tuple[bytes, bytes], ...]:
    """What every request to it carries. Raises ValueError when its key is not set, or what is set is no header."""
    headers = dict(replica.headers)
    if replica.api_key_env is not None:
        key = os.environ.get(replica.api_key_env)
        if not key:
            raise ValueError(f"{replica.url}: set the environment variable {replica.api_key_env}")
        headers[replica.key_header] = replica.key_prefix + key
    for name, value in headers.items():
        if name.lower() in _RESERVED_HEADERS:
            raise ValueError(f"{replica.url}: the header {name!r} is the gateway's own; remove it")
        if not (_HEADER_NAME.fullmatch(name) and _HEADER_VALUE.fullmatch(value)):
            raise ValueError(f"{replica.url}: {name!r} cannot be sent as a header; use plain ASCII")
    return tuple((name.lower().encode(), value.encode()) for name, value in headers.items())
