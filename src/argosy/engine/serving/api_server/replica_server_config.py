"""Settings of the replica server, and the options of a replica by which it and its engine are configured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from argosy.engine.engine_config import EngineConfig
from argosy.http_server import TlsConfig
from argosy.model_store import REFERENCE_PREFIX
from argosy.models import BUNDLED_MODEL
from argosy.settings import convert_settings, declared_options, define_options, option, parse_size


class ReplicaServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Listening address and limits for clients. Times are in seconds. Fields with `option` are options of commands."""

    host: Annotated[
        str,
        option(
            "Host name or address to listen on. `::` is all addresses, `localhost` both loopback ones."
        ),
    ] = "localhost"
    port: Annotated[int, option("Port to listen on; 0 selects a free port.", ge=0, le=65535)] = 8000
    uds: Annotated[str, option("Listen on this Unix socket instead of host and port.")] | None = (
        None
    )
    tls: TlsConfig | None = None
    """TLS settings. None listens without TLS."""
    served_model_names: Annotated[
        tuple[str, ...],
        option("Model name for requests; may be given several times.", name="served_model_name"),
    ] = ()
    """Responses use the first one. Empty means the model's own name."""
    chat_template: (
        Annotated[str, option("Jinja file to use instead of the model's template.", "Model")] | None
    ) = None
    tool_format: Annotated[
        str,
        option(
            "Format of tool calls and reasoning: auto (from the chat template), none, or a name that"
            " `--tool-format list` prints.",
            "Model",
        ),
    ] = "auto"
    lora_modules: Annotated[
        tuple[str, ...],
        option(
            "Name of a LoRA adapter and its folder; may be given several times. Also a JSON object as in vLLM, and"
            " store:NAME or a digest instead of a folder. Needs `--enable-lora`.",
            "Adapters",
            metavar="NAME=PATH",
        ),
    ] = ()
    adapter_root: Annotated[
        str,
        option(
            "Folder whose LoRA adapters may be loaded by requests, by their path below it or by their digest.",
            "Adapters",
        ),
    ] = ""
    allow_adapter_loading: Annotated[
        bool,
        option(
            "Let requests to `/v1/load_lora_adapter` and `/v1/unload_lora_adapter` change the adapters.",
            "Adapters",
        ),
    ] = False
    max_loras: Annotated[
        int | None, option("Option of vLLM. It has no effect: any number share a step.", "Adapters")
    ] = None
    max_lora_rank: Annotated[
        int | None, option("Option of vLLM. It has no effect: ranks are not padded.", "Adapters")
    ] = None
    max_cpu_loras: Annotated[
        int | None, option("Option of vLLM. It has no effect: see `--adapter-memory`.", "Adapters")
    ] = None
    fully_sharded_loras: Annotated[
        bool, option("Option of vLLM. It has no effect: models are not sharded.", "Adapters")
    ] = False
    unknown_fields: Annotated[
        Literal["ignore", "refuse"],
        option(
            "Unknown request fields, and pictures, sounds and files in earlier messages of a conversation: ignored "
            "and named in a response header, or refused.",
            "Advanced",
        ),
    ] = "ignore"
    body_limit_bytes: int = 32 * 1024 * 1024
    body_timeout_s: float = 60.0
    """A request whose body is incomplete after this time is rejected."""
    sse_keepalive_interval_s: float = 15.0
    """A stream without output for this time gets a keep-alive comment."""
    slow_reader_timeout_s: float = 30.0
    """A client that reads nothing for this time is disconnected."""
    drain_deadline_s: Annotated[
        float,
        option("Seconds for running requests to finish after SIGTERM.", "Advanced", ge=0),
    ] = 30.0
    retry_after_s: float = 1.0
    """`Retry-After` of responses when the replica accepts no requests."""
    zone: Annotated[
        str,
        option(
            "Failure domain of the replica, such as a rack or an availability zone, for `argosy replicas list`.",
            "Advanced",
        ),
    ] = ""
    labels: Annotated[
        dict[str, str],
        option(
            "Label of the replica, for `argosy replicas list`; may be given several times.",
            "Advanced",
            name="label",
            metavar="KEY=VALUE",
        ),
    ] = {}
    vllm_metrics: Annotated[bool, option("Export metrics under vLLM's names too.", "Advanced")] = (
        False
    )
    log_format: Literal["json", "console"] = "console"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        option("Lowest level that is logged.", "Advanced"),
    ] = "info"
    log_name: Annotated[
        str,
        option(
            "Log in the console format instead of JSON, with this name in each line.", "Advanced"
        ),
    ] = ""

    @property
    def options_without_effect(self) -> list[str]:
        """Options of vLLM that are set and do nothing."""
        names = ("max_loras", "max_lora_rank", "max_cpu_loras", "fully_sharded_loras")
        return [name for name in names if getattr(self, name)]

    def model_names_for(self, model: str) -> tuple[str, ...]:
        """Return the configured names, or that of the directory, file, hub repository or stored version."""
        path = Path(model)
        own_name = model
        if model.startswith(REFERENCE_PREFIX):
            own_name = model.removeprefix(REFERENCE_PREFIX).partition(":")[0]
        elif path.exists():
            own_name = path.resolve().name.removesuffix(".gguf")
        return self.served_model_names or (own_name,)


SERVER_DEFAULTS: Mapping[str, Any] = {"model": str(BUNDLED_MODEL), "request_timeout": 600.0}
"""Defaults of a replica's options that `LLM` does not have."""
REPLICA_OPTIONS = {
    name: msgspec.structs.replace(each, default=SERVER_DEFAULTS.get(name, each.default))
    for name, each in declared_options(EngineConfig, ReplicaServerConfig).items()
}
"""Options of `argosy replica` by name."""
ReplicaOptions = define_options(
    "ReplicaOptions", "Options of `argosy replica`.", REPLICA_OPTIONS.values()
)


def build_replica_settings(
    options: Mapping[str, Any],
) -> tuple[ReplicaServerConfig, EngineConfig]:
    """Build the settings of the server and the engine from options by name. The others have their defaults.

    Raises:
        ValueError: An option is unknown or has an invalid value. The message names it and what it may be.
    """
    checked = convert_settings(options, ReplicaOptions)
    values = {**SERVER_DEFAULTS, **{name: getattr(checked, name) for name in options}}
    return ReplicaServerConfig(**_fields(values, ReplicaServerConfig)), EngineConfig(
        **_fields(values, EngineConfig)
    )


def _fields(values: Mapping[str, Any], struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the fields of a structure that options set."""
    return {
        each.field: parse_size(values[name]) if each.is_size else values[name]
        for name, each in declared_options(struct).items()
        if values.get(name) is not None
    }
