"""An applied declaration as the controller uses it: desired state, launch specifications, pools for the gateways."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from argosy.fleet.control.replica_monitor import CheckPaths
from argosy.fleet.declaration import (
    GATEWAY_POOL,
    FleetConfig,
    PoolConfig,
    build_gateway_config,
    build_launch_spec,
    find_engine,
    parse_fleet,
    replica_digest,
)
from argosy.fleet.launchers import LaunchError, LaunchSpec
from argosy.gateway import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.policy import RestartLimits
from argosy.policy.reconciliation import DesiredFleet, DesiredPool, replica_name
from argosy.store import FleetRevision, StoreConfig

GATEWAY_LAUNCHER = "local"
_PUBLISHED_SETTINGS: dict[str, Any] = {"models": [], "routes": [], "pools_file": None}
"""Settings of a gateway that the controller publishes or assigns. Their change needs no restart."""


class RoutedMember(msgspec.Struct, frozen=True):
    """Replica in the rotation, with the address at which gateways reach it."""

    name: str
    pool: str
    url: str


def pool_digests(config: FleetConfig) -> dict[str, str]:
    """Return the digest of the replica settings of each pool, and of the gateways' settings. See `FleetStore.apply`."""
    digests = {pool.name: replica_digest(config, pool) for pool in config.pools}
    if config.gateways:
        settings = msgspec.structs.replace(build_gateway_config(config), **_PUBLISHED_SETTINGS)
        encoded = msgspec.json.encode(msgspec.to_builtins(settings), order="sorted")
        digests[GATEWAY_POOL] = hashlib.sha256(encoded).hexdigest()
    return digests


class DeclaredFleet:
    """A revision in force, and the earlier ones whose replicas may still run.

    Args:
        revision: The revision in force.
        find_revision: Returns the newest revision with a generation of a pool, or None.
        folder: Folder for the settings of the gateways.
        store_url: URL of the store, for gateways whose declaration names none.

    Raises:
        ValueError: The declaration is invalid for this version of Argosy.
    """

    def __init__(
        self,
        revision: FleetRevision,
        find_revision: Callable[[str, int], FleetRevision | None],
        folder: Path,
        store_url: str,
    ) -> None:
        self.number = revision.number
        self.config = parse_fleet(revision.declaration, f"revision {revision.number}")
        self._generations = {name: pool.generation for name, pool in revision.generations.items()}
        self._find_revision = find_revision
        self._folder = folder
        self._store_url = store_url

    @property
    def launchers(self) -> Collection[str]:
        """Names of the launchers that the declaration uses."""
        names = {pool.launcher for pool in self.config.pools}
        return names | {GATEWAY_LAUNCHER} if self.config.gateways else names

    def generation(self, pool: str) -> int:
        """Return the number of the version of a pool's replica settings."""
        return self._generations[pool]

    def desired_state(self, scaled: Mapping[str, int]) -> DesiredFleet:
        """Return what the fleet shall consist of.

        Args:
            scaled: Number of replicas of the pools for which an autoscaler decides.
        """
        pools = [
            self._desired_pool(pool, scaled.get(pool.name, pool.initial_replicas))
            for pool in self.config.pools
        ]
        if self.config.gateways:
            # A new gateway cannot listen on the port of the old one while that runs.
            pools.append(
                DesiredPool(
                    name=GATEWAY_POOL,
                    launcher=GATEWAY_LAUNCHER,
                    generation=self._generations[GATEWAY_POOL],
                    replicas=self.config.gateways,
                    max_surge=0,
                    max_unavailable=1,
                    serves_model=False,
                )
            )
        return DesiredFleet(pools=tuple(pools))

    def launch_spec(self, pool: str, generation: int, ordinal: int) -> LaunchSpec:
        """Return the specification of a replica of the current or an earlier generation.

        Raises:
            LaunchError: It cannot be built, for example because a secret is missing.
        """
        config = self._config_of(pool, generation)
        if pool == GATEWAY_POOL:
            return self._gateway_spec(config, generation, ordinal)
        pool_config = None if config is None else config.find_pool(pool)
        if config is None or pool_config is None:
            raise LaunchError(f"no revision has generation {generation} of the pool {pool}")
        return build_launch_spec(config, pool_config, generation, ordinal)

    def check_paths(self, pool: str) -> CheckPaths:
        """Return the paths for health checks of a pool's replicas."""
        pool_config = self.config.find_pool(pool)
        if pool == GATEWAY_POOL:
            return CheckPaths(ready="/health", load=None)
        if pool_config is None:
            return CheckPaths()
        engine = find_engine(self.config, pool_config)
        return CheckPaths(engine.ready_path, "/load" if engine.kind == "argosy" else None)

    def model_name(self, pool: str) -> str | None:
        """Return the name by which a pool's replicas serve their model, for warm-up requests."""
        pool_config = self.config.find_pool(pool)
        return None if pool_config is None else pool_config.model

    def source(self, pool: str) -> str:
        """Return the source of a pool's model; empty for gateways and removed pools."""
        pool_config = self.config.find_pool(pool)
        return "" if pool_config is None else self.config.model_of(pool_config).source or ""

    def published_models(self, members: Iterable[RoutedMember]) -> list[ModelConfig]:
        """Return the models with the replicas that gateways shall route to.

        These are the servers that the declaration lists by URL, and the members of the rotation.
        """
        by_model: dict[str, list[ReplicaConfig]] = {}
        for member in members:
            pool = self.config.find_pool(member.pool)
            if pool is not None:
                engine = find_engine(self.config, pool)
                replica = ReplicaConfig(name=member.name, url=member.url, kind=engine.kind)
                by_model.setdefault(pool.model, []).append(replica)
        return [
            msgspec.structs.replace(
                model, replicas=[*model.replicas, *by_model.get(model.name, ())]
            )
            for model in build_gateway_config(self.config).models
        ]

    @staticmethod
    def _limits(pool: PoolConfig) -> RestartLimits:
        return RestartLimits(
            hang_timeout_s=pool.hang_timeout_s, start_timeout_s=pool.start_timeout_s
        )

    def _desired_pool(self, pool: PoolConfig, replicas: int) -> DesiredPool:
        return DesiredPool(
            name=pool.name,
            launcher=pool.launcher,
            generation=self._generations[pool.name],
            replicas=replicas,
            spares=pool.count_spares(replicas),
            max_surge=pool.max_surge_count(replicas),
            max_unavailable=pool.max_unavailable_count(replicas),
            restart_limits=self._limits(pool),
            requires_warm_up=pool.warm_up,
        )

    def _config_of(self, pool: str, generation: int) -> FleetConfig | None:
        if self._generations.get(pool) == generation:
            return self.config
        revision = self._find_revision(pool, generation)
        return None if revision is None else parse_fleet(revision.declaration)

    def _gateway_spec(
        self, config: FleetConfig | None, generation: int, ordinal: int
    ) -> LaunchSpec:
        if config is None:
            raise LaunchError(f"no revision has generation {generation} of the gateways")
        settings = msgspec.structs.replace(
            build_gateway_config(config, ordinal),
            fleet=config.fleet,
            store=msgspec.structs.replace(config.store or StoreConfig(), url=self._store_url),
            pools_file=str(self._folder / f"pools-{ordinal}.json"),
        )
        name = replica_name(GATEWAY_POOL, generation, ordinal)
        path = self._folder / f"{name}.json"
        try:
            path.write_bytes(msgspec.json.encode(msgspec.to_builtins(settings)))
        except OSError as error:
            raise LaunchError(f"{path} cannot be written: {error.strerror}") from error
        return LaunchSpec(
            name=name,
            pool=GATEWAY_POOL,
            generation=generation,
            ordinal=ordinal,
            command=(sys.executable, "-m", "argosy.cli", "gateway", "--config", str(path)),
            drain_deadline_s=settings.drain_deadline_s,
            url=_listen_url(settings),
        )


def find_newest_revision(
    revisions: Iterable[FleetRevision], pool: str, generation: int
) -> FleetRevision | None:
    """Return the first revision that has a generation of a pool; `revisions` are sorted from new to old."""
    for revision in revisions:
        found = revision.generations.get(pool)
        if found is not None and found.generation == generation:
            return revision
    return None


def gateway_url(config: FleetConfig, ordinal: int = 0) -> str:
    """Return the address of a gateway that the controller starts, as seen from this machine."""
    return _listen_url(build_gateway_config(config, ordinal))


def set_replicas(config: FleetConfig, pool: str, replicas: int | None) -> FleetConfig:
    """Return a declaration with another number of replicas of a pool. It pauses the pool's autoscaler.

    Args:
        config: The declaration.
        pool: Name of the pool.
        replicas: The number; None to let the autoscaler decide again.

    Raises:
        ValueError: There is no such pool, its limits do not allow the number, or it has no autoscaler.
    """
    declared = config.find_pool(pool)
    if declared is None:
        known = ", ".join(pool.name for pool in config.pools) or "none"
        raise ValueError(f"there is no pool {pool!r}; use one of: {known}")
    if replicas is None:
        if declared.autoscaling.mode == "off":
            raise ValueError(
                f"the pool {pool} has no autoscaler; set `autoscaling` of the pool, or give a number"
            )
    elif declared.min_replicas is not None and replicas < declared.min_replicas:
        raise ValueError(
            f"min_replicas of the pool {pool} is {declared.min_replicas}; change it first"
        )
    elif declared.max_replicas is not None and replicas > declared.max_replicas:
        raise ValueError(
            f"max_replicas of the pool {pool} is {declared.max_replicas}; change it first"
        )
    scaled = msgspec.structs.replace(declared, replicas=replicas)
    pools = tuple(scaled if other.name == pool else other for other in config.pools)
    return msgspec.structs.replace(config, pools=pools)


def stop_everything(config: FleetConfig) -> FleetConfig:
    """Return a declaration of the same fleet without pools and gateways."""
    return msgspec.structs.replace(config, pools=(), gateways=0)


def _listen_url(settings: GatewayConfig) -> str:
    """Return the address of a gateway on this machine."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    host = settings.host if settings.host not in {"0.0.0.0", "::", ""} else "127.0.0.1"  # noqa: S104 - compares
    scheme = "http" if settings.tls is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}"
