"""The gateway's settings, read from a YAML file in which unknown keys are errors. Times are in seconds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import starmap
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from argosy.blob_store import check_location
from argosy.deployment.settings.adapter_config import AdapterConfig, resolve_adapters
from argosy.deployment.settings.alerting_config import AlertingConfig, find_alerting_problems
from argosy.deployment.settings.auth_config import AuthConfig, ConsoleConfig
from argosy.deployment.settings.backup_config import BackupConfig
from argosy.deployment.settings.content_config import (
    ContentRule,
    compile_content_rule,
    validate_moderation,
)
from argosy.deployment.settings.flag_config import DeclaredFlag, find_flag_problems
from argosy.deployment.settings.objective_config import ObjectivesConfig, find_objective_problems
from argosy.deployment.settings.prompt_config import (
    PromptConfig,
    PromptRule,
    find_prompt_problems,
)
from argosy.deployment.settings.quality_config import QualityConfig, find_quality_problems
from argosy.deployment.settings.replica_config import ReplicaConfig, find_contradiction
from argosy.deployment.settings.routing_config import (
    CacheRule,
    RequestConditions,
    RouteConfig,
    TrafficTarget,
    TruncationRule,
    read_classifiers,
    rule_name,
    validate_conditions,
    validate_traffic,
)
from argosy.http_server import TlsConfig
from argosy.policy import RoutingPolicyName
from argosy.policy.traffic import FeatureFlag, FlagName
from argosy.protocol import parse_endpoint
from argosy.settings import (
    ByCommandLine,
    ByOperator,
    SettingError,
    SettingPath,
    SettingsDocument,
    Size,
    parse_size,
)
from argosy.store import IdempotencyConfig, StoreConfig

MAX_MODEL_NAME_LENGTH = 200
ModelName = Annotated[
    str,
    Meta(
        max_length=MAX_MODEL_NAME_LENGTH,
        pattern=r"^[^\s\x00-\x1f\x7f-\x9f-]([^\x00-\x1f\x7f-\x9f]*[^\s\x00-\x1f\x7f-\x9f])?$(?!\n)",
        examples=["chat"],
    ),
]
PositiveFloat = Annotated[float, Meta(gt=0)]


class GivingWayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When running streams pause for requests that have waited too long.

    A paused stream resumes without losing a token. Only streams of native replicas that can be resumed exactly pause.
    """

    enabled: ByOperator[bool] = True
    """Whether streams pause."""
    premium_after_s: ByOperator[PositiveFloat] = 0.3
    """Wait of a premium request after which streams pause for it."""
    standard_after_s: ByOperator[PositiveFloat] = 1.0
    """Wait of a standard request after which streams pause for it."""
    free_after_s: ByOperator[PositiveFloat] = 5.0
    """Wait of a free request after which streams pause for it."""
    min_slice_s: ByOperator[PositiveFloat] = 2.0
    """How long a stream runs at least before it pauses, and between two pauses."""
    max_paused_share: ByOperator[Annotated[float, Meta(gt=0, le=1)]] = 0.25
    """Maximum part of the concurrency slots that are paused within one second."""
    max_share: ByOperator[Annotated[float, Meta(gt=0, le=1)]] = 0.9
    """Part of the concurrency slots that a tenant may hold with streams that cannot pause. Beyond it, other tenants of
    the tier go first."""


class SleepConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the native replicas of a model sleep, which frees their memory. A request wakes them up (`cold_start`)."""

    after_s: ByOperator[Annotated[float, Meta(ge=0, le=604_800)] | None] = None
    """Time without requests after which they sleep. None lets them sleep only when other models need the memory
    (`model_memory`)."""
    level: ByOperator[Literal[1, 2]] = 1
    """1 keeps the weights, 2 drops them too."""
    pinned: ByOperator[bool] = False
    """Whether they never sleep, so that their memory counts but is never freed."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A public model name and the replicas that answer for it."""

    name: ByOperator[ModelName]
    """Name that requests use."""
    aliases: ByOperator[tuple[ModelName, ...]] = ()
    """Other names of the model. Give each version a name and let an alias move. A `*` stands for any text, for clients
    that insist on names such as `claude-sonnet-4-5`."""
    routing: ByOperator[RoutingPolicyName] = "least-cost"
    """How a replica is selected; see the explanation of routing."""
    hedge_after_s: ByOperator[PositiveFloat | None] = None
    """Send the request to a second replica if the first has not started to answer after this time. None disables
    hedging."""
    giving_way: ByOperator[GivingWayConfig] = GivingWayConfig()
    """When running streams pause for waiting requests."""
    sleep: ByOperator[SleepConfig | None] = None
    """When the model's replicas sleep. None lets them never sleep."""
    replicas: ByCommandLine[list[ReplicaConfig]] = []
    """The servers behind the model. Required, unless a controller runs the model's replicas, or other models answer
    (`traffic`)."""
    adapters: ByOperator[Annotated[tuple[AdapterConfig, ...], Meta(max_length=2000)]] = ()
    """Adapters (LoRA) of the model, beside those of `argosy adapters`."""
    traffic: ByOperator[tuple[TrafficTarget, ...]] = ()
    """Models that answer for this one, each for a part of the users. A user stays at one model, also when the weight of
    that model grows. Empty if the model itself answers."""
    fallback_models: ByOperator[tuple[str, ...]] = ()
    """Models that answer, in this order, when the model that should has no ready replica, or a longer queue than
    `max_wait_s`. They also answer if its replicas fail the request or refuse it as full before the client receives
    output. If none of them can answer in time either, the request waits, or is refused, as without them."""
    max_wait_s: ByOperator[PositiveFloat | None] = None
    """Predicted time in the queue beyond which `fallback_models` answer. None means any time."""

    @property
    def is_answered_by_others(self) -> bool:
        """Whether only other models answer, so that this one needs no replicas."""
        return bool(self.traffic) and all(target.model != self.name for target in self.traffic)


class Timeouts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time limits for replicas and requests.

    Streams have no total limit, only a limit on silence, because a client can disconnect at any time. Native replicas
    are sent streaming requests even for non-streaming clients, if the response can be aggregated from a stream.
    """

    connect_timeout_s: ByOperator[PositiveFloat] = 2.0
    """For a connection to a replica."""
    first_token_timeout_s: ByOperator[PositiveFloat] = 120.0
    """From sending the request to the first token of the stream."""
    stream_idle_timeout_s: ByOperator[PositiveFloat] = 30.0
    """From one chunk of a stream to the next."""
    non_streaming_timeout_s: ByOperator[PositiveFloat] = 3600.0
    """For a response that the replica sends in one piece."""
    request_timeout_s: ByOperator[PositiveFloat | None] = None
    """For any request, from its arrival. The response then ends with the tokens so far, as with the request field
    `timeout_s`."""
    failover_timeout_s: ByOperator[PositiveFloat] = 30.0
    """How long a request waits for failed replicas to be replaced."""


class ColdStartConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How requests wait for a model that the fleet has scaled to zero.

    A client that waits for less time is known by its header `x-argosy-deadline`, `x-stainless-timeout` or
    `x-stainless-read-timeout`. Other clients are refused with the time that the start still takes.
    """

    hold_s: ByOperator[Annotated[float, Meta(ge=0, le=86_400)]] = 300.0
    """Maximum wait of a streaming request. Its response starts early, and comments announce the progress."""
    non_streaming_hold_s: ByOperator[Annotated[float, Meta(ge=0, le=86_400)]] = 25.0
    """Maximum wait of a request whose response is sent in one piece. 0 refuses it at once; the model starts
    nevertheless."""
    comment_interval_s: ByOperator[PositiveFloat] = 10.0
    """Interval of the comments in a stream that waits, such as `: argosy starting 41 % eta 38s`. A shorter read timeout
    of the client shortens it."""
    event_interval_s: ByOperator[PositiveFloat] = 60.0
    """Interval of the events without content in such a stream, for clients whose timeouts ignore comments."""


class QueueConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the queue in front of each pool."""

    max_requests: ByOperator[Annotated[int, Meta(ge=0)]] = 5000
    """Maximum number of queued requests."""
    max_bytes: ByOperator[Annotated[int, Meta(ge=0)]] = 1 << 30
    """Maximum total size of the queued request bodies."""
    timeout_s: ByOperator[PositiveFloat] = 60.0
    """Maximum time in the queue."""


class SeriesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time series that the gateway keeps for `GET /admin/series`."""

    enabled: bool = True
    """Keep series. The last 24 hours are in memory."""
    file: str | None = None
    """SQLite file for older minutes and for restarts. By default a file in the user's state folder, named after the
    address on which the gateway listens. A gateway on a free port (`port: 0`) has none by default."""
    keep_days: Annotated[float, Meta(ge=0, le=3660)] = 30.0
    """How long minutes are kept in the file. 0 writes no file."""


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the quota backend that several gateways share."""

    redis: str | None = None
    """URL of a Redis or Valkey server (`redis://`, `rediss://`, `unix://`). Without it, no limits are shared."""
    password_env: str | None = None
    """Environment variable with the server's password."""


class TracingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Export of the traces of requests to an OTLP receiver. OpenTelemetry's environment variables set the rest."""

    endpoint: Annotated[str, Meta(examples=["http://collector:4318"])] | None = None
    """Base URL of a receiver of OTLP. None takes `OTEL_EXPORTER_OTLP_ENDPOINT`."""
    protocol: Literal["http/protobuf", "grpc"] | None = None
    """Protocol of the receiver. None takes `OTEL_EXPORTER_OTLP_PROTOCOL`, and HTTP without it. gRPC needs the extra
    `grpc`."""
    headers_env: str | None = None
    """Environment variable with headers for the receiver, such as `authorization=Basic%20...`. They are added to those
    of `OTEL_EXPORTER_OTLP_HEADERS`."""
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Share of the traces that are kept. Those of failures, of several attempts and of clients that sample are kept
    apart from it."""
    max_traces_per_s: Annotated[int, Meta(ge=1)] = 100
    """Maximum traces kept in a second. One tenant has a tenth of them."""
    semconv: Literal["latest", "1.36"] = "latest"
    """Version of OpenTelemetry's names for generative AI."""


class ExplainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many ended requests can be explained, for how long, and how many prompts are examined."""

    max_requests: ByOperator[Annotated[int, Meta(ge=0)]] = 10_000
    """Maximum number of explanations kept."""
    retention_s: ByOperator[Annotated[float, Meta(ge=0)]] = 3600.0
    """How long an explanation is kept."""
    prefix_sample_ratio: ByOperator[Annotated[float, Meta(ge=0, le=1)]] = 0.02
    """Share of the time in which the prompts of a tenant are examined for `argosy doctor prefix`. Hashes of them are
    kept, no text. With 0, an operator can still have them examined for a limited time."""


RequestSetting = RequestConditions | PromptConfig | DeclaredFlag
"""Setting that decides about single requests."""
REQUEST_SETTINGS = (
    *("routes", "content_rules", "cache_rules", "truncation_rules"),
    *("prompt_rules", "prompts", "feature_flags"),
)
"""Names of the lists and mappings of such settings, which the controller of a fleet publishes to its gateways."""


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a gateway."""

    models: ByOperator[Sequence[ModelConfig]] = ()
    """Models and the replicas that answer for them. A gateway of a `fleet` may have none, because its controller
    publishes them."""
    routes: ByOperator[list[RouteConfig]] = []
    """Routes in order. The first that matches a request decides which model answers. Without a match the requested
    model answers."""
    content_rules: ByOperator[list[ContentRule]] = []
    """Content rules in order. The first that matches a request decides what is filtered from its prompt and answer."""
    cache_rules: ByOperator[list[CacheRule]] = []
    """Cache rules in order. The first that matches a request decides whether its answer is kept for equal requests."""
    truncation_rules: ByOperator[list[TruncationRule]] = []
    """Truncation rules in order. The first that matches a chat decides how it becomes shorter if it is too long."""
    prompts: ByOperator[list[PromptConfig]] = []
    """Versions of prompts, beside those of `argosy prompts`."""
    prompt_rules: ByOperator[list[PromptRule]] = []
    """Prompt rules in order. The first that matches a request decides which prompt stands before its messages."""
    feature_flags: ByOperator[dict[FlagName, FeatureFlag]] = {}
    """Feature flags by name, in a subset of flagd's format. Conditions of rules read them (`flag`), and `argosy flags`
    switches them while gateways run."""
    response_cache: ByOperator[IdempotencyConfig] = IdempotencyConfig()
    """Bounds of the answers that cache rules keep, in memory, or in `limits.redis` for all gateways."""
    fleet: ByCommandLine[
        Annotated[
            str, Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$(?!\n)", examples=["my-fleet"])
        ]
        | None
    ] = None
    """Name of the fleet whose controller publishes models, replicas and routes to this gateway. They replace those of
    this file. Needs a store."""
    pools_file: ByCommandLine[str | None] = None
    """File in which the gateway keeps what the controller published, to serve by it while no controller runs. By
    default a file in the user's state folder."""
    host: ByCommandLine[str] = "localhost"
    """Host name or address to listen on. `localhost` is both loopback addresses, `::` all addresses of IPv4 and IPv6,
    and `0.0.0.0` those of IPv4."""
    port: ByCommandLine[Annotated[int, Meta(ge=0, le=65535)]] = 8000
    """0 selects a free port."""
    uds: ByCommandLine[str | None] = None
    """Path of a Unix domain socket to listen on instead of host and port."""
    handover: ByCommandLine[str | None] = None
    """Path of a Unix socket at which a gateway hands its listening socket to a later one with the same path, so that a
    restart refuses no connection. Start the new gateway, and stop the old one when the new one is ready. A controller
    does both for its gateways, and chooses the path."""
    tls: ByCommandLine[TlsConfig | None] = None
    """Listen with TLS."""
    advertise_url: ByCommandLine[str | None] = None
    """Address at which other gateways of the same store reach this one, for explanations of its requests. None means
    the address on which it listens. If it listens on all addresses, that is the one from which it reaches others."""
    store: ByCommandLine[StoreConfig | None] = None
    """Accounts, keys, limits, prices and the ledger. None means a single user on the local machine."""
    auth: ByCommandLine[AuthConfig] = AuthConfig()
    """API keys, tokens, client addresses and browser origins."""
    console: ByCommandLine[ConsoleConfig] = ConsoleConfig()
    """The web application at `/`."""
    limits: ByCommandLine[LimitsConfig] = LimitsConfig()
    """Where limits are shared between gateways."""
    timeouts: ByOperator[Timeouts] = Timeouts()
    """How long a replica may take."""
    queue: ByOperator[QueueConfig] = QueueConfig()
    """How much may wait for each model, and how long."""
    cold_start: ByOperator[ColdStartConfig] = ColdStartConfig()
    """How requests wait for a model that is scaled to zero or sleeps."""
    model_memory: ByOperator[Size | None] = None
    """Memory for all models with `sleep` together, if they run on one machine. Those that wait for it wake up in turn.
    None sets no limit."""
    idempotency: ByOperator[IdempotencyConfig] = IdempotencyConfig()
    """How responses are kept under their idempotency keys (`Idempotency-Key`)."""
    explain: ByOperator[ExplainConfig] = ExplainConfig()
    """How many explanations of requests are kept, and how long."""
    objectives: ByOperator[ObjectivesConfig] = ObjectivesConfig()
    """Service levels that models are to meet. The autoscaler of a fleet learns from them what a replica can serve."""
    tracing: ByCommandLine[TracingConfig | None] = None
    """Export traces of requests by OTLP. None exports none."""
    alerting: ByCommandLine[AlertingConfig] = AlertingConfig()
    """Alerts, and who is notified of them. A gateway of a `fleet` leaves them to the controller."""
    quality: ByOperator[QualityConfig] = QualityConfig()
    """Samples of answers, and scheduled runs of golden sets."""
    backup: ByCommandLine[BackupConfig | None] = None
    """Backups of the store, and drills that restore them, by one of its gateways. None makes none."""
    series: ByCommandLine[SeriesConfig] = SeriesConfig()
    """Time series of requests, tokens, latencies, replicas, tenants and cost."""
    max_failed_attempts: ByOperator[Annotated[int, Meta(ge=1, le=10)]] = 4
    """Maximum number of failures of one request: 5xx responses, or replicas lost while the request made little
    progress."""
    unknown_fields: ByOperator[Literal["ignore", "refuse"]] = "ignore"
    """Whether native replicas ignore unknown request fields, and pictures, sounds and files in earlier messages, and
    name them in `x-argosy-ignored-fields`, or refuse them."""
    log_content: ByCommandLine[bool] = False
    """Keep rendered prompts and raw outputs of native replicas in explanations. All users who may explain a request
    can then read them."""
    body_limit_bytes: ByOperator[Annotated[int, Meta(ge=1)]] = 32 * 1024 * 1024
    """Maximum size of a request body."""
    body_timeout_s: ByOperator[PositiveFloat] = 60.0
    """Maximum time in which a request body must arrive."""
    slow_reader_timeout_s: ByOperator[PositiveFloat] = 30.0
    """A client that reads nothing for this time is disconnected."""
    sse_keepalive_interval_s: ByOperator[PositiveFloat] = 15.0
    """Interval of the keep-alive comments in a stream without tokens."""
    early_stream_start_s: ByOperator[PositiveFloat] = 2.0
    """A stream whose replica has not answered after this time starts with its headers and a keep-alive comment. Errors
    after that are events of the stream."""
    max_connection_age_s: ByOperator[PositiveFloat] = 600.0
    """Approximate maximum age of a client connection. An older connection is closed between two requests, so that
    clients spread over several gateways again."""
    connection_idle_timeout_s: ByOperator[PositiveFloat] = 75.0
    """How long a client connection is kept without a request. A proxy in front of the gateway needs a shorter idle
    timeout. Otherwise it sends requests on connections that are being closed."""
    max_connections_per_address: ByOperator[Annotated[int, Meta(ge=1)] | None] = None
    """Maximum number of client connections of one address, or of one /64 network with IPv6. Beyond it, a new connection
    replaces the address's connection that has been without a request for the longest time. It is refused if all of them
    run requests. The maximum does not apply to `auth.trusted_proxies`. None means three quarters of the connections
    that the limit on open files permits, and no maximum for addresses of the gateway's own machine."""
    fast_path: ByOperator[Literal["auto", "off"]] = "auto"
    """Forward streams in native code where possible. `auto` needs a C++ compiler, or code that was built in advance."""
    drain_deadline_s: ByOperator[Annotated[float, Meta(ge=0)]] = 30.0
    """How long running requests may take after SIGTERM."""
    drain_keepalive_s: ByOperator[Annotated[float, Meta(ge=0)]] = 1.0
    """How long a draining gateway keeps idle connections open for a request that may be on its way."""
    log_format: ByOperator[Literal["json", "console"]] = "console"
    """Format of the log lines."""
    log_level: ByOperator[Literal["debug", "info", "warning", "error"]] = "info"
    """Lowest level that is logged."""

    @property
    def rules(self) -> list[RequestSetting]:
        """The rules for requests of all kinds, and the prompts that they name."""
        return list_request_settings(self)

    @property
    def conditions(self) -> list[RequestConditions]:
        """The rules for requests of all kinds."""
        return [each for each in self.rules if isinstance(each, RequestConditions)]

    @property
    def model_memory_bytes(self) -> int | None:
        """Memory of all models that may sleep in bytes."""
        return None if self.model_memory is None else parse_size(self.model_memory)


def list_request_settings(source: msgspec.Struct) -> list[RequestSetting]:
    """Return the settings in the fields `REQUEST_SETTINGS` of a structure."""
    found: list[RequestSetting] = []
    for name in REQUEST_SETTINGS:
        value = getattr(source, name)
        found += starmap(DeclaredFlag, value.items()) if isinstance(value, dict) else value
    return found


def load_config(path: Path) -> GatewayConfig:
    """Read and validate a settings file.

    Raises:
        ValueError: The file cannot be read or a setting is invalid. The message names the file and the key.
    """
    document = SettingsDocument.read([path])
    config = document.decode(GatewayConfig, find_contradictions)
    models = [
        msgspec.structs.replace(
            model, adapters=resolve_adapters(model.adapters, f"{path}: models[{index}]")
        )
        for index, model in enumerate(config.models)
    ]
    routes = read_classifiers(config.routes, [path] * len(config.routes))
    return msgspec.structs.replace(config, models=models, routes=routes)


RELOADABLE_SETTINGS = frozenset({"models", "objectives", *REQUEST_SETTINGS})
"""Settings that a gateway applies while it runs. Changes of other settings need a restart."""


def find_contradictions(
    config: GatewayConfig, *, has_controller: bool = False
) -> Iterator[SettingError]:
    """Yield an error for each contradiction of settings. The messages say what to change.

    With `has_controller` a controller runs replicas, so that models need none in the settings.
    """
    if not (config.models or config.fleet):
        yield SettingError("no model is configured. Add `models`.", ("models",))
    if config.fleet is not None and config.store is None and not has_controller:
        yield SettingError(
            "the controller of a fleet finds its gateways in their store. Add `store`.", ("fleet",)
        )
    names: list[tuple[str, SettingPath]] = []
    for index, model in enumerate(config.models):
        path: SettingPath = ("models", index)
        names.append((model.name, (*path, "name")))
        names += [(name, (*path, "aliases", at)) for at, name in enumerate(model.aliases)]
        if not (model.replicas or has_controller or config.fleet or model.is_answered_by_others):
            yield SettingError(
                f"model {model.name!r} has no replicas. Add `replicas` with at least one `url`.",
                path,
            )
        yield from _find_replica_problems(model, (*path, "replicas"))
    yield from _find_duplicates("model name", names)
    has_accounts = has_controller or config.store is not None
    yield from _find_adapter_problems(
        config, {name for name, _ in names}, has_accounts=has_accounts
    )
    yield from _find_traffic_problems(config)
    yield from _find_rule_problems(config, [name for name, _ in names])
    yield from find_prompt_problems(config.prompts, config.prompt_rules, has_accounts=has_accounts)
    yield from find_quality_problems(config.quality, has_accounts=has_accounts)
    if config.advertise_url is not None:
        try:
            parse_endpoint(config.advertise_url)
        except ValueError as error:
            yield SettingError(f"advertise_url: {error}", ("advertise_url",), problem=str(error))
    if config.store is not None and config.store.blobs is not None:
        try:
            check_location(config.store.blobs)
        except ValueError as error:
            yield SettingError.at(("store", "blobs"), str(error))
    if config.store is None and config.limits.redis is not None:
        yield SettingError(
            "limits.redis shares the limits of accounts, which need a store. Add `store`, or remove limits.redis.",
            ("limits", "redis"),
        )
    if config.backup is not None and not has_accounts:
        yield SettingError("backup needs a store. Add `store`, or remove backup.", ("backup",))
    yield from _find_console_problems(config)
    yield from find_alerting_problems(config.alerting)
    yield from find_objective_problems(config.objectives)
    if config.store is None and config.auth.mode == "required" and config.auth.jwt is None:
        yield SettingError(
            "auth.mode is required, but without a store no key exists. Add `store` or auth.jwt.",
            ("auth", "mode"),
        )


def _find_console_problems(config: GatewayConfig) -> Iterator[SettingError]:
    oidc, trusted = config.console.oidc, config.auth.jwt
    if oidc is None:
        return
    path: SettingPath = ("console", "oidc")
    if trusted is None or trusted.issuer is None:
        yield SettingError("console.oidc signs in with auth.jwt.issuer. Set it.", path)
    elif oidc.client_id not in trusted.audience:
        message = f"console.oidc: the issuer's tokens name the client {oidc.client_id!r}. Add it to auth.jwt.audience."
        yield SettingError(message, path)
    if config.store is None:
        yield SettingError("console.oidc keeps sessions in a store. Add `store`.", path)


def _find_replica_problems(model: ModelConfig, path: SettingPath) -> Iterator[SettingError]:
    names = [replica.name or replica.url for replica in model.replicas]
    paths = [(*path, index) for index in range(len(names))]
    yield from _find_duplicates(
        f"model {model.name!r}, replica", list(zip(names, paths, strict=True))
    )
    discovered = {
        name
        for name, config in zip(names, model.replicas, strict=True)
        if config.discover is not None
    }
    for name, here, replica in zip(names, paths, model.replicas, strict=True):
        if name.rpartition("@")[0] in discovered:
            yield SettingError(
                f"discovery may give the name {name!r} to another replica. Rename this one.", here
            )
        try:
            parse_endpoint(replica.url)
        except ValueError as error:
            yield SettingError.at((*here, "url"), str(error))
            continue
        problem = find_contradiction(replica)
        if problem is not None:
            yield SettingError(f"{replica.url}: {problem}", here)


def _find_adapter_problems(
    config: GatewayConfig, model_names: Collection[str], *, has_accounts: bool
) -> Iterator[SettingError]:
    names: list[tuple[str, SettingPath]] = []
    for index, model in enumerate(config.models):
        for at, adapter in enumerate(model.adapters):
            path: SettingPath = ("models", index, "adapters", at)
            owner = "" if adapter.owner is None else f" of {adapter.owner}"
            names.append((f"{adapter.name}{owner}", (*path, "name")))
            if adapter.name in model_names:
                problem = f"a model is called {adapter.name!r}. Rename the adapter."
                yield SettingError.at((*path, "name"), problem)
            if adapter.owner is not None and not has_accounts:
                yield SettingError.at(
                    (*path, "owner"), "owners are organisations, which need a store. Add `store`."
                )
    yield from _find_duplicates("adapter", names)


def _find_traffic_problems(config: GatewayConfig) -> Iterator[SettingError]:
    divides = {
        name: bool(model.traffic)
        for model in config.models
        for name in (model.name, *model.aliases)
    }
    for index, model in enumerate(config.models):
        others = {
            name: divided
            for name, divided in divides.items()
            if name not in {model.name, *model.aliases}
        }
        try:
            validate_traffic(
                model.name, model.traffic, model.fallback_models, model.max_wait_s, others
            )
        except ValueError as error:
            yield SettingError(f"model {model.name!r}: {error}", ("models", index))


def _find_rule_problems(config: GatewayConfig, model_names: list[str]) -> Iterator[SettingError]:
    """Yield an error for each problem of a rule for requests."""
    settings: tuple[tuple[str, str, Sequence[RequestConditions]], ...] = (
        ("routes", "route", config.routes),
        ("content_rules", "content rule", config.content_rules),
        ("cache_rules", "cache rule", config.cache_rules),
        ("truncation_rules", "truncation rule", config.truncation_rules),
        ("prompt_rules", "prompt rule", config.prompt_rules),
    )
    yield from find_flag_problems(
        config.feature_flags,
        [
            ((setting, index), rule)
            for setting, _, rules in settings
            for index, rule in enumerate(rules)
        ],
    )
    for setting, subject, rules in settings:
        names = [rule_name(rule, setting, index) for index, rule in enumerate(rules)]
        yield from _find_duplicates(
            subject, [(name, (setting, index)) for index, name in enumerate(names)]
        )
        for index, (name, rule) in enumerate(zip(names, rules, strict=True)):
            try:
                validate_conditions(rule, model_names, has_accounts=config.store is not None)
                if isinstance(rule, ContentRule):
                    compile_content_rule(rule)
                    validate_moderation(rule, model_names)
            except ValueError as error:
                yield SettingError(f"{subject} {name!r}: {error}", (setting, index))


def _find_duplicates(
    subject: str, names: Sequence[tuple[str, SettingPath]]
) -> Iterator[SettingError]:
    known = set[str]()
    for name, path in names:
        if name in known:
            yield SettingError(f"{subject} {name!r} is defined twice. Keep one.", path)
        known.add(name)
