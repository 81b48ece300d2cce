"""Options of a replica by name, and the settings of its server and its engine that they set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from argosy.engine.engine_config import EngineConfig
from argosy.engine.serving.api_server.replica_server_config import ReplicaServerConfig
from argosy.models import BUNDLED_MODEL
from argosy.settings import convert_settings, declared_options, define_options, parse_size

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
