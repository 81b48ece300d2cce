"""Launch specification of a pool's replicas, and the digest that shows whether running ones must be replaced."""

from __future__ import annotations

import hashlib
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from argosy.fleet.declaration.config import (
    FleetConfig,
    FleetModelConfig,
    PoolConfig,
    SecretReference,
)
from argosy.fleet.declaration.engine_catalog import ARGOSY_ENGINE, find_engine
from argosy.fleet.declaration.engine_kind import EngineKind, OptionValue, fill_placeholders
from argosy.fleet.launchers import LaunchError, LaunchProbes, LaunchResources, LaunchSpec
from argosy.model_store import DIGEST_PREFIX, open_model_store
from argosy.policy.reconciliation import replica_name

_STORED_MODEL = re.compile("sha256:[0-9a-f]{64}")
ON_THIS_MACHINE = frozenset({"local", "simulated"})
"""Launchers whose replicas run on the controller's machine."""


def build_launch_spec(
    config: FleetConfig,
    pool: PoolConfig,
    generation: int,
    ordinal: int,
    environ: Mapping[str, str] | None = None,
) -> LaunchSpec:
    """Build what a launcher needs to start one replica of a pool.

    Args:
        config: The fleet's declaration, which is valid.
        pool: One of its pools.
        generation: Number of the version of the pool's replica settings.
        ordinal: Number of the replica within the generation.
        environ: Variables to which secrets refer. By default those of this process.

    Raises:
        LaunchError: A secret does not exist. The message says which.
    """
    command = _build_command(config, pool)
    if pool.engine == ARGOSY_ENGINE and pool.launcher in ON_THIS_MACHINE:
        command = (
            sys.executable,
            "-P",
            "-m",
            "argosy.cli",
            *command[1:],
        )  # this version, wherever it is
    elif pool.engine != ARGOSY_ENGINE:
        command = tuple(_find_stored(argument) for argument in command)
    engine = find_engine(config, pool)
    spec = LaunchSpec(
        name=replica_name(pool.name, generation, ordinal),
        pool=pool.name,
        generation=generation,
        ordinal=ordinal,
        command=command,
        environment={
            name: value for name, value in pool.environment.items() if isinstance(value, str)
        },
        resources=_build_resources(pool),
        drain_deadline_s=pool.drain_deadline_s,
        drain_signal=engine.drain_signal,
        image=pool.image,
    )
    if pool.launcher == "kubernetes":
        return _add_kubernetes_settings(spec, config, pool, engine)
    secrets = {
        name: _read_secret(
            reference, f"pool {pool.name}: {name}", os.environ if environ is None else environ
        )
        for name, reference in pool.secret_references.items()
    }
    return msgspec.structs.replace(spec, environment={**spec.environment, **secrets})


def _add_kubernetes_settings(
    spec: LaunchSpec, config: FleetConfig, pool: PoolConfig, engine: EngineKind
) -> LaunchSpec:
    """Add what the cluster does itself: it resolves secrets, checks the replicas' health and evicts some."""
    return msgspec.structs.replace(
        spec,
        secret_keys={name: value.key for name, value in pool.secret_references.items()},
        probes=LaunchProbes(
            ready_path=engine.ready_path,
            live_path="/health" if engine.kind == "argosy" else engine.ready_path,
            start_timeout_s=pool.start_timeout_s,
            hang_timeout_s=pool.hang_timeout_s,
        ),
        max_unavailable=pool.max_unavailable_count(pool.initial_replicas, pool.spares),
        kubernetes=config.kubernetes,
    )


def _find_stored(argument: str) -> str:
    """Return the path of a stored model for engines that know no model store."""
    if _STORED_MODEL.fullmatch(argument) is None:
        return argument
    store = open_model_store()
    path = store.model_path(argument)
    if path is None:
        raise LaunchError(
            f"the model {argument} is not in the model store {store.folder} of the controller's machine. Pull it there."
        )
    return str(path)


def replica_digest(config: FleetConfig, pool: PoolConfig) -> str:
    """Return a digest (SHA-256) of everything that changes the processes of a pool's replicas.

    References to secrets count, but not the secrets. Two pools with equal digests run equal replicas.
    """
    parts: dict[str, Any] = {
        "command": _build_command(config, pool),
        "digest": config.model_of(pool).digest,
        "environment": msgspec.to_builtins(pool.environment, order="sorted"),
        "launcher": pool.launcher,
        "resources": msgspec.to_builtins(_build_resources(pool), order="sorted"),
        "image": pool.image,
    }
    if pool.launcher == "kubernetes":
        parts["kubernetes"] = config.kubernetes.pod_settings()
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()


def _build_resources(pool: PoolConfig) -> LaunchResources:
    return LaunchResources(
        accelerators=pool.accelerators,
        cpus=pool.cpus,
        memory_bytes=pool.memory_bytes,
        zones=pool.zones,
        labels=pool.labels,
        custom=pool.custom_resources,
    )


def _build_command(config: FleetConfig, pool: PoolConfig) -> tuple[str, ...]:
    """Return the command line, in which the launcher's placeholders remain."""
    engine, model = find_engine(config, pool), config.model_of(pool)
    return tuple(_fill_command(engine, pool, _placeholder_values(model, pool)))


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
    listens_on_socket = engine.socket_arguments and pool.launcher in ON_THIS_MACHINE
    groups = (
        engine.command,
        *engine.optional_arguments,
        engine.socket_arguments if listens_on_socket else engine.port_arguments,
    )
    for group in groups:
        filled = [fill_placeholders(argument, values) for argument in group]
        if None not in filled:
            yield from (argument for argument in filled if argument is not None)
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


def _read_secret(reference: SecretReference, purpose: str, environ: Mapping[str, str]) -> str:
    if reference.env is not None:
        value = environ.get(reference.env)
        if not value:
            raise LaunchError(
                f"{purpose}: the environment variable {reference.env} of the controller is not set. Set it."
            )
        return value
    assert reference.file is not None  # noqa: S101 - checked by the validation
    try:
        return Path(reference.file).read_text(encoding="utf-8").rstrip("\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise LaunchError(
            f"{purpose}: the file {reference.file} cannot be read ({reason}). Create it."
        ) from error
