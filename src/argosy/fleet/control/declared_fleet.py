"""An applied declaration as the controller uses it: desired state, launch specifications, pools for the gateways."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from argosy.deployment import (
    GATEWAY_POOL,
    EngineKind,
    FleetConfig,
    ModelConfig,
    PoolConfig,
    ReplicaConfig,
    ReplicaRecord,
    RolloutConfig,
    build_gateway_config,
    find_engine,
    find_newest_revision,
    has_address_conflict,
    listen_url,
    parse_fleet,
)
from argosy.fleet.control.replica_monitor import CheckPaths
from argosy.fleet.launch_spec import build_launch_spec
from argosy.fleet.launchers import LaunchedReplica, LaunchError, LaunchSpec, LaunchState
from argosy.machine_resources import usable_cpus
from argosy.policy.reconciliation import DesiredFleet, DesiredPool, RestartLimits, replica_name
from argosy.policy.rollout import RolloutPlan
from argosy.store import FleetRevision, StoreConfig

GATEWAY_LAUNCHER = "local"


class VersionTarget(NamedTuple):
    """Desired replicas of one version of a pool."""

    generation: int
    replicas: int
    spares: int = 0
    surplus_reason: str = ""
    """Why replicas beyond these leave."""


class DeclaredFleet:
    """A revision in force, and the earlier ones whose replicas may still run.

    Args:
        known: The latest revisions, newest first, in which the settings of earlier generations are found.
        store_url: URL of the store, for gateways whose declaration names none.

    Raises:
        ValueError: The declaration is invalid for this version of Argosy.
    """

    def __init__(
        self,
        revision: FleetRevision,
        known: Sequence[FleetRevision],
        folder: Path,
        store_url: str,
    ) -> None:
        self.number = revision.number
        self.config = parse_fleet(revision.declaration, f"revision {revision.number}")
        self._generations = revision.generations
        self._known = known
        self._configs: dict[int, FleetConfig] = {}
        """Earlier declarations that were read, by the number of their revision."""
        self._held: dict[str, int] = {}
        """Earlier generation of each pool whose renewal waits, see `hold_renewals`."""
        self._folder = folder
        self._store_url = store_url

    @property
    def launchers(self) -> Collection[str]:
        """Names of the launchers that the declaration uses."""
        names = {pool.launcher for pool in self.config.pools}
        return names | {GATEWAY_LAUNCHER} if self.config.gateways else names

    def generation(self, pool: str) -> int:
        """Return the number of the version of a pool's replica settings."""
        return self._held.get(pool) or self._generations[pool].generation

    def hold_renewals(self, listed: Sequence[LaunchedReplica]) -> None:
        """Keep the replicas of renewed pools as long as a gateway runs that is to be replaced.

        So an upgrade replaces all gateways before the first replica. If no new gateway becomes ready, it replaces none.
        `listed` are all replicas and gateways that exist.
        """
        self._held = {}
        gateways = self._generations.get(GATEWAY_POOL)
        if gateways is None or not any(
            each.pool == GATEWAY_POOL
            and each.state is LaunchState.RUNNING
            and each.generation != gateways.generation
            for each in listed
        ):
            return
        for pool in self.config.pools:
            declared = self._generations[pool.name]
            present = {each.generation for each in listed if each.pool == pool.name}
            same = [
                each for each in present if self.find_digest(pool.name, each) == declared.digest
            ]
            if same and declared.generation not in present:
                self._held[pool.name] = max(same)

    def digest(self, pool: str) -> str:
        """Return the digest of a pool's replica settings."""
        return self._generations[pool].digest

    def find_generation(self, pool: str, digest: str) -> int | None:
        """Return the number of a version of a pool; None if no known revision has it."""
        declared = self._generations.get(pool)
        if declared is not None and declared.digest == digest:
            return self.generation(pool)
        for revision in self._known:
            found = revision.generations.get(pool)
            if found is not None and found.digest == digest:
                return found.generation
        return None

    def find_digest(self, pool: str, generation: int) -> str | None:
        """Return the digest of a version of a pool; None if no known revision has it."""
        revision = find_newest_revision(self._known, pool, generation)
        return None if revision is None else revision.generations[pool].digest

    def desired_state(
        self,
        scaled: Mapping[str, int],
        versions: Mapping[str, Sequence[VersionTarget]],
        undecided: Collection[str] = (),
        gateways: Sequence[LaunchedReplica] = (),
    ) -> DesiredFleet:
        """Return what the fleet shall consist of.

        `scaled` are the numbers of replicas for which an autoscaler decides. Nothing may be done about `undecided`
        pools. `gateways` are those that run.
        """
        pools = [
            self._desired_pool(pool, target)
            for pool in self.config.pools
            if pool.name not in undecided
            for target in versions.get(pool.name)
            or [self._only_target(pool, scaled.get(pool.name, pool.initial_replicas))]
        ]
        if self.config.gateways:
            pools.insert(  # first, since they start in a moment, and replicas load longer
                0,
                DesiredPool(
                    name=GATEWAY_POOL,
                    launcher=GATEWAY_LAUNCHER,
                    generation=self.generation(GATEWAY_POOL),
                    replicas=self.config.gateways,
                    max_surge=int(not (num_early := self._count_early_exits(gateways))),
                    max_unavailable=num_early,
                    serves_model=False,
                ),
            )
        return DesiredFleet(pools=tuple(pools), cores={GATEWAY_LAUNCHER: usable_cpus()})

    def _count_early_exits(self, gateways: Sequence[LaunchedReplica]) -> int:
        """Return how many gateways at once have to end before those of this declaration listen; usually none.

        One of an earlier version of Argosy has no address of its own, and hands nothing over.
        """
        configs = [self._config_of(GATEWAY_POOL, each.generation) for each in gateways]
        if any(each is not None and has_address_conflict(each, self.config) for each in configs):
            return self.config.gateways
        return int(None in configs or any(each.own_url is None for each in gateways))

    def launch_spec(self, pool: str, generation: int, ordinal: int) -> LaunchSpec:
        """Return the specification of a replica of the current or an earlier generation.

        Raises:
            LaunchError: It cannot be built, for example because a secret is missing.
        """
        if pool == GATEWAY_POOL:
            return self._gateway_spec(self._config_of(pool, generation), generation, ordinal)
        version = self.find_version(pool, generation)
        if version is None:
            raise LaunchError(f"no revision has generation {generation} of the pool {pool}")
        return build_launch_spec(*version, generation, ordinal)

    def find_version(self, pool: str, generation: int) -> tuple[FleetConfig, PoolConfig] | None:
        """Return the settings of a version of a pool; None if no known revision has it."""
        config = self._config_of(pool, generation)
        pool_config = None if config is None else config.find_pool(pool)
        return None if config is None or pool_config is None else (config, pool_config)

    def check_paths(self, pool: str, generation: int | None = None) -> CheckPaths:
        """Return the paths for health checks of a pool's replicas, by default of the current generation."""
        if pool == GATEWAY_POOL:
            return CheckPaths(ready="/health", load=None)
        engine = self._find_engine(pool, generation)
        if engine is None:
            return CheckPaths()
        return CheckPaths(engine.ready_path, "/load" if engine.kind == "argosy" else None)

    def rollout_plan(self, pool: PoolConfig) -> RolloutPlan:
        """Return the plan of the rollouts of a pool that declares some."""
        rollout = pool.rollout or RolloutConfig()
        return rollout.build_plan(has_objectives=self.config.objectives.has_latency)

    def has_same_computation(self, pool: str, first: str, second: str) -> bool:
        """Return whether two versions of a pool differ in settings without influence on answers, as far as is known."""
        computations = []
        for digest in (first, second):
            generation = self.find_generation(pool, digest)
            version = None if generation is None else self.find_version(pool, generation)
            if version is None:
                return False
            config, settings = version
            model = config.model_of(settings)
            computations.append(
                (
                    (model.source, model.revision, model.digest),
                    (settings.engine, find_engine(config, settings)),
                    (settings.options, settings.image, settings.accelerators),
                )
            )
        return computations[0] == computations[1]

    def model_name(self, pool: str) -> str | None:
        """Return the name by which a pool's replicas serve their model, for warm-up requests."""
        pool_config = self.config.find_pool(pool)
        return None if pool_config is None else pool_config.model

    def count_by_model(self, scaled: Mapping[str, int]) -> dict[str, int]:
        """Return how many replicas shall serve each model. `scaled` are the numbers that autoscalers decide."""
        counts = Counter[str]()
        for pool in self.config.pools:
            counts[pool.model] += scaled.get(pool.name, pool.initial_replicas)
        return dict(counts)

    def source(self, pool: str) -> str:
        """Return the source of a pool's model; empty for gateways and removed pools."""
        pool_config = self.config.find_pool(pool)
        return "" if pool_config is None else self.config.model_of(pool_config).source or ""

    def published_models(self, members: Iterable[ReplicaRecord]) -> list[ModelConfig]:
        """Return the models with the replicas that gateways shall route to.

        These are the servers that the declaration lists by URL, and the members of the rotation.
        """
        by_model: dict[str, list[ReplicaConfig]] = {}
        for member in members:
            pool = self.config.find_pool(member.pool)
            if pool is not None:
                by_model.setdefault(pool.model, []).append(self.published_replica(member))
        return [
            msgspec.structs.replace(
                model, replicas=[*model.replicas, *by_model.get(model.name, ())]
            )
            for model in build_gateway_config(self.config).models
        ]

    def published_replica(self, member: ReplicaRecord) -> ReplicaConfig:
        """Return a member of the rotation as the gateways know it."""
        engine = self._find_engine(member.pool, member.generation)
        kind = "auto" if engine is None else engine.kind
        return ReplicaConfig(name=member.name, url=member.url, kind=kind)

    def restart_limits(self, pool: PoolConfig) -> RestartLimits:
        """Return the limits of the restarts of a pool's replicas."""
        return RestartLimits(
            hang_timeout_s=pool.hang_timeout_s, start_timeout_s=pool.start_timeout_s
        )

    def _find_engine(self, pool: str, generation: int | None) -> EngineKind | None:
        """Return the engine of a version, or of the current one if it is not known; None if there is no such pool."""
        version = None if generation is None else self.find_version(pool, generation)
        if version is None:
            pool_config = self.config.find_pool(pool)
            version = None if pool_config is None else (self.config, pool_config)
        return None if version is None else find_engine(*version)

    def _only_target(self, pool: PoolConfig, replicas: int) -> VersionTarget:
        return VersionTarget(self.generation(pool.name), replicas, pool.count_spares(replicas))

    def _desired_pool(self, pool: PoolConfig, target: VersionTarget) -> DesiredPool:
        return DesiredPool(
            name=pool.name,
            launcher=pool.launcher,
            generation=target.generation,
            replicas=target.replicas,
            spares=target.spares,
            max_surge=pool.max_surge_count(target.replicas),
            max_unavailable=pool.max_unavailable_count(target.replicas, target.spares),
            restart_limits=self.restart_limits(pool),
            requires_warm_up=pool.warm_up,
            surplus_reason=target.surplus_reason,
        )

    def _config_of(self, pool: str, generation: int) -> FleetConfig | None:
        current = self._generations.get(pool)
        if current is not None and current.generation == generation:
            return self.config
        revision = find_newest_revision(self._known, pool, generation)
        if revision is None:
            return None
        config = self._configs.get(revision.number)
        if config is None:
            config = self._configs[revision.number] = parse_fleet(revision.declaration)
        return config

    def _gateway_spec(
        self, config: FleetConfig | None, generation: int, ordinal: int
    ) -> LaunchSpec:
        if config is None:
            raise LaunchError(f"no revision has generation {generation} of the gateways")
        address = "unix" if config.uds is not None else config.port + ordinal
        settings = msgspec.structs.replace(
            build_gateway_config(config, ordinal),
            fleet=config.fleet,
            store=msgspec.structs.replace(config.store or StoreConfig(), url=self._store_url),
            pools_file=str(self._folder / f"pools-{ordinal}.json"),
            handover=str(self._folder / f"listen-{address}.handover"),
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
            command=(
                *(sys.executable, "-m", "argosy.cli", "gateway", "--config", str(path)),
                *("--control-socket", "{socket}"),
            ),
            inherits_environment=True,
            drain_deadline_s=settings.drain_deadline_s,
            url=listen_url(settings),
        )
