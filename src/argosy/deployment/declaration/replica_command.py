"""Command line and resources of a pool's replicas, and the digest that shows whether running ones must be replaced."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from argosy.deployment.declaration.config import FleetConfig, FleetModelConfig, PoolConfig
from argosy.deployment.declaration.engines import (
    ARGOSY_ENGINE,
    BUILT_IN_ENGINES,
    EngineKind,
    OptionValue,
    fill_placeholders,
)
from argosy.model_store import DIGEST_PREFIX


class LaunchResources(msgspec.Struct, frozen=True, kw_only=True):
    """Needs of one replica on its machine or node."""

    accelerators: int = 0
    """Number of GPUs of its own."""
    cpus: float | None = None
    """Number of CPU cores. None does not restrict it."""
    memory_bytes: int | None = None
    """Maximum memory. None does not restrict it."""
    zones: tuple[str, ...] = ()
    """Zones in which it may run, best first; empty for any."""
    labels: Mapping[str, str] = {}
    """Labels that its node must have."""
    custom: Mapping[str, float] = {}
    """Amounts of resources with names of their own that its node must have."""

    @property
    def place(self) -> str:
        """Zones and labels of its node in words, such as ` of zone a with disk=ssd`; empty for any node."""
        zones = f" of zone {' or '.join(self.zones)}" if self.zones else ""
        labels = ", ".join(f"{key}={value}" for key, value in sorted(self.labels.items()))
        return zones + (f" with {labels}" if labels else "")


def replica_digest(config: FleetConfig, pool: PoolConfig) -> str:
    """Return a digest (SHA-256) of everything that changes the processes of a pool's replicas.

    References to secrets count, but not the secrets. Two pools with equal digests run equal replicas.
    """
    parts: dict[str, Any] = {
        "command": build_command(config, pool),
        "digest": config.model_of(pool).digest,
        "environment": msgspec.to_builtins(pool.environment, order="sorted"),
        "launcher": pool.launcher,
        "resources": msgspec.to_builtins(build_resources(pool), order="sorted"),
        "image": pool.image,
    }
    if pool.launcher == "kubernetes":
        parts["kubernetes"] = config.kubernetes.pod_settings()
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()


def build_resources(pool: PoolConfig) -> LaunchResources:
    """Return what one replica of a pool needs on its machine or node."""
    return LaunchResources(
        accelerators=pool.accelerators,
        cpus=pool.cpus,
        memory_bytes=pool.memory_bytes,
        zones=pool.zones,
        labels=pool.labels,
        custom=pool.custom_resources,
    )


def find_engine(config: FleetConfig, pool: PoolConfig) -> EngineKind:
    """Return the engine kind of a pool. The configuration must be valid."""
    return config.engines.get(pool.engine) or BUILT_IN_ENGINES[pool.engine]


def build_command(config: FleetConfig, pool: PoolConfig) -> tuple[str, ...]:
    """Return the command line, in which the launcher's placeholders remain."""
    engine, model = find_engine(config, pool), config.model_of(pool)
    command = tuple(_fill_command(engine, pool, _placeholder_values(model, pool)))
    if pool.engine != ARGOSY_ENGINE:
        return command
    options = {
        "model": model.source,
        "revision": model.revision,
        "digest": model.digest,
        "served_model_name": [model.name],
        "drain_deadline": pool.drain_deadline_s,
        **dict(sorted(pool.options.items())),
    }
    given = {name: value for name, value in options.items() if value is not None}
    return (*command, "--options", msgspec.json.encode(given).decode())


def _placeholder_values(model: FleetModelConfig, pool: PoolConfig) -> dict[str, str | None]:
    source = model.source or ""
    is_path = Path(source).is_absolute() or source.startswith(DIGEST_PREFIX)
    return {
        "digest": model.digest,
        "drain_deadline_s": str(math.ceil(pool.drain_deadline_s)),
        "hub_model": None if is_path else source,
        "model": source,
        "model_path": source if is_path else None,
        "revision": model.revision,
        "served_name": model.name,
    }


def _fill_command(
    engine: EngineKind, pool: PoolConfig, values: Mapping[str, str | None]
) -> Iterator[str]:
    listens_on_socket = engine.socket_arguments and pool.launcher == "local"
    groups = (
        engine.command,
        *engine.optional_arguments,
        engine.socket_arguments if listens_on_socket else engine.port_arguments,
    )
    for group in groups:
        filled = [fill_placeholders(argument, values) for argument in group]
        if None not in filled:
            yield from (argument for argument in filled if argument is not None)
    if pool.engine != ARGOSY_ENGINE:
        for name, value in sorted(pool.options.items()):
            yield from _format_option(engine, name, value)


def _format_option(engine: EngineKind, name: str, value: OptionValue) -> Iterator[str]:
    flag = f"--{name.replace('_', '-')}"
    match value:
        case True:
            yield flag
        case False:
            if engine.false_options == "no-prefix":
                yield f"--no-{name.replace('_', '-')}"
        case dict():
            yield from (flag, msgspec.json.encode(value, order="sorted").decode())
        case list() if engine.list_options == "append":
            yield from (flag, *map(str, value))
        case list():
            for item in value:
                yield from (flag, str(item))
        case _:
            yield from (flag, str(value))
