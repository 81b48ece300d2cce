"""Launch specification of a replica: what its declaration says, with the secrets of this machine."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

import msgspec

from argosy.deployment import (
    ARGOSY_ENGINE,
    EngineKind,
    FleetConfig,
    PoolConfig,
    SecretReference,
    build_command,
    build_resources,
    find_engine,
)
from argosy.fleet.launchers import LaunchError, LaunchProbes, LaunchSpec
from argosy.model_store import open_model_store
from argosy.policy.reconciliation import replica_name

_STORED_MODEL = re.compile("sha256:[0-9a-f]{64}")


def build_launch_spec(
    config: FleetConfig,
    pool: PoolConfig,
    generation: int,
    ordinal: int,
    environ: Mapping[str, str] | None = None,
) -> LaunchSpec:
    """Build what a launcher needs to start one replica of a pool.

    The declaration is valid. Secrets refer to variables in `environ`, by default those of this process.

    Raises:
        LaunchError: A secret does not exist. The message says which.
    """
    command = build_command(config, pool)
    if pool.engine == ARGOSY_ENGINE and pool.launcher == "local":
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
        resources=build_resources(pool),
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


def _read_secret(reference: SecretReference, purpose: str, environ: Mapping[str, str]) -> str:
    try:
        return reference.read(environ)
    except ValueError as error:
        raise LaunchError(f"{purpose}: {error}") from error
