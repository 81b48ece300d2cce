"""Construction of models, pools, replicas and upstream connections from the configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from argosy.deployment import (
    GatewayConfig,
    GivingWayConfig,
    ModelConfig,
    ReplicaConfig,
    RequestSetting,
    Timeouts,
    build_configured_headers,
    build_traffic_route,
    find_replica_proxy,
)
from argosy.gateway.model_registry.adapter_index import DeclaredAdapter
from argosy.gateway.model_registry.model_router import ModelRouter
from argosy.gateway.pool import AdminSettings, Pool, PoolVersions, ReplicaEndpoint
from argosy.gateway.rollout_messages import PublishedVersions
from argosy.gateway.upstream import Upstream, create_client_ssl_context
from argosy.model_store import ModelStoreError, open_model_store
from argosy.policy import AdminState, Hedging
from argosy.policy.placement import GivingWay
from argosy.policy.traffic import PoolRoute, TrafficRoute
from argosy.protocol import parse_endpoint


class ReplicaEntry:
    """Entry in a model's list of replicas: one server, or one server per address of its host name with discovery.

    Raises:
        ValueError: The entry's settings are invalid; the message contains the remedy.
        OSError: A file that the entry names cannot be read.
    """

    def __init__(self, config: ReplicaConfig, model: str, timeouts: Timeouts) -> None:
        self.config = config
        self.name = config.name or config.url
        self.endpoint = parse_endpoint(config.url)
        self._upstream_model = config.model or model
        self._headers = build_configured_headers(config)
        self._proxy = find_replica_proxy(config, self.endpoint)
        self._tls_context = create_client_ssl_context(config.tls) if self.endpoint.tls else None
        self._tls_digest = config.tls.digest()
        self._timeouts = timeouts

    def build_replica(self, address: str | None = None) -> ReplicaEndpoint:
        """Build the replica at the entry's URL, or at one address of its host name."""
        config = self.config
        upstream = Upstream(
            msgspec.structs.replace(self.endpoint, address=address),
            headers=self._headers,
            connect_timeout_s=self._timeouts.connect_timeout_s,
            tls=self._tls_context,
            server_name=config.tls.server_name,
            proxy=self._proxy,
        )
        return ReplicaEndpoint(
            self.name if address is None else self.replica_name(address),
            config.kind,
            self._upstream_model,
            upstream,
            grace_s=self._timeouts.failover_timeout_s,
            max_concurrency=config.max_requests,
            resume_mode=config.resume_mode,
            arithmetic_id=config.arithmetic or "",
            initial_admin=AdminSettings(
                AdminState.CORDONED if config.cordoned else AdminState.ACTIVE, config.weight
            ),
            stream_usage=config.stream_usage,
            priority_scheduling=config.priority_scheduling,
            adapter_root=config.adapter_root or _default_adapter_root(),
            kv_events=None
            if config.kv_events is None
            else config.kv_events.resolve_host(upstream.endpoint),
        )

    def is_equivalent(self, other: ReplicaEntry) -> bool:
        """Return whether both entries build equal replicas, including the content of their TLS files."""
        return self.config == other.config and self._tls_digest == other._tls_digest

    def has_same_hostname(self, other: ReplicaEntry | None) -> bool:
        """Return whether both entries discover the same host name in the same mode."""
        return (
            other is not None
            and self.config.discover == other.config.discover
            and self.endpoint.host == other.endpoint.host
        )

    def replica_name(self, address: str) -> str:
        """Return the name of the replica at one address of the host name."""
        return f"{self.name}@{address}"


def _default_adapter_root() -> str:
    """Return the folder of this machine's model store; empty for a user without one."""
    try:
        return str(open_model_store().models)
    except ModelStoreError:
        return ""


class ModelEntries(NamedTuple):
    """Model with the replica entries of its versions."""

    model: ModelConfig
    versions: Mapping[str, tuple[ReplicaEntry, ...]]
    """Replica entries by digest of the version."""
    route: PoolRoute | None = None
    """Which version serves whom. None if changes of the model are no rollouts."""

    @property
    def stable(self) -> str:
        """Digest of the stable version; empty without rollouts."""
        return "" if self.route is None else self.route.stable


def build_model_entries(
    config: GatewayConfig, published: Sequence[PublishedVersions] = ()
) -> list[ModelEntries]:
    """Build the entries of all configured models.

    Args:
        config: The settings. The replicas of each model are those of its stable version.
        published: Versions of the models whose changes are rollouts.

    Raises:
        ValueError: The settings are invalid; the message contains the remedy.
        OSError: A file that the settings name cannot be read.
    """
    versions_by_model = {versions.model: versions for versions in published}
    return [
        _build_entries(model, versions_by_model.get(model.name), config.timeouts)
        for model in config.models
    ]


def _build_entries(
    model: ModelConfig, versions: PublishedVersions | None, timeouts: Timeouts
) -> ModelEntries:
    route = None if versions is None else versions.route
    replicas: dict[str, Sequence[ReplicaConfig]] = {} if versions is None else {**versions.replicas}
    replicas["" if route is None else route.stable] = model.replicas
    entries = {
        digest: tuple([ReplicaEntry(replica, model.name, timeouts) for replica in configs])
        for digest, configs in replicas.items()
    }
    return ModelEntries(model, entries, route)


def build_pool(model_entries: ModelEntries) -> Pool:
    """Build the pools of all versions of a model, and return that of the stable one.

    Replicas found by discovery are added later.
    """
    model, versions, route = model_entries
    pools = {
        digest: build_version_pool(
            model, digest, [each.build_replica() for each in entries if not each.config.discover]
        )
        for digest, entries in versions.items()
    }
    pool = pools[model_entries.stable]
    pool.traffic = build_traffic(model)
    pool.versions = None if route is None else PoolVersions(route, pools)
    return pool


def build_version_pool(model: ModelConfig, version: str, replicas: list[ReplicaEndpoint]) -> Pool:
    """Build the pool of one version of a model."""
    pool = Pool(
        model.name,
        replicas,
        model.routing,
        build_hedging(model),
        build_giving_way(model.giving_way),
        version,
    )
    pool.sleep = model.sleep
    return pool


def build_hedging(model: ModelConfig) -> Hedging | None:
    """Return the model's hedging policy, or None if hedging is off."""
    return None if model.hedge_after_s is None else Hedging(model.hedge_after_s)


def build_traffic(model: ModelConfig) -> TrafficRoute | None:
    """Return which models answer for this one, or None if it always answers itself."""
    return build_traffic_route(model.name, model.traffic, model.fallback_models, model.max_wait_s)


def build_giving_way(config: GivingWayConfig) -> GivingWay | None:
    """Return when streams give way, or None if they never do."""
    if not config.enabled:
        return None
    return GivingWay(
        (config.premium_after_s, config.standard_after_s, config.free_after_s, math.inf),
        config.min_slice_s,
        config.max_paused_share,
        config.max_share,
    )


def build_pools_by_name(
    model_entries: Sequence[ModelEntries], pools: Sequence[Pool]
) -> dict[str, Pool]:
    """Map the name and aliases of each model to the pool of its stable version."""
    return {
        name: pool
        for entries, pool in zip(model_entries, pools, strict=True)
        for name in (entries.model.name, *entries.model.aliases)
    }


def build_model_router(
    model_entries: Sequence[ModelEntries], rules: Sequence[RequestSetting] = ()
) -> ModelRouter:
    """Build the router. Its pools have the order of `model_entries`, and `rules` must name only these models."""
    return ModelRouter(
        build_pools_by_name(model_entries, [build_pool(entries) for entries in model_entries]),
        rules,
        list_declared_adapters(model_entries),
    )


def list_declared_adapters(model_entries: Sequence[ModelEntries]) -> list[DeclaredAdapter]:
    """Return the adapters in the settings of the models."""
    return [
        DeclaredAdapter(entries.model.name, adapter)
        for entries in model_entries
        for adapter in entries.model.adapters
    ]
