"""From the configuration to what is served: the models, their pools, their replicas, the connections to those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from argosy.gateway.config import (
    GatewayConfig,
    ModelConfig,
    ReplicaConfig,
    Timeouts,
    build_configured_headers,
)
from argosy.gateway.model_registry.model_router import ModelRouter
from argosy.gateway.model_routes import RouteConfig
from argosy.gateway.pool import Pool, ReplicaEndpoint
from argosy.gateway.upstream import Upstream, create_client_ssl_context
from argosy.policy import Hedging, OutageTracker
from argosy.protocol import parse_endpoint


class ReplicaEntry:
    """One entry of a model's replicas: a server, or as many as its name has addresses.

    Raises ValueError or OSError, saying what to change.
    """

    def __init__(self, config: ReplicaConfig, model: str, timeouts: Timeouts) -> None:
        self.config = config
        self.name = config.name or config.url
        self.endpoint = parse_endpoint(config.url)
        self._upstream_model = config.model or model
        self._headers = build_configured_headers(config)
        self._tls_context = create_client_ssl_context(config.tls) if self.endpoint.tls else None
        self._tls_digest = config.tls.digest()
        self._timeouts = timeouts

    def build_replica(self, address: str | None = None) -> ReplicaEndpoint:
        """The server at its URL, or the one at this of its name's addresses, which is called so, too."""
        config = self.config
        upstream = Upstream(
            msgspec.structs.replace(self.endpoint, address=address),
            headers=self._headers,
            connect_timeout_s=self._timeouts.connect_timeout_s,
            tls=self._tls_context,
            server_name=config.tls.server_name,
        )
        return ReplicaEndpoint(
            self.name if address is None else self.replica_name(address),
            config.kind,
            self._upstream_model,
            upstream,
            outage=OutageTracker(self._timeouts.failover_timeout_s),
            max_concurrency=config.max_requests,
            resume_mode=config.resume_mode,
            stream_usage=config.stream_usage,
            priority_scheduling=config.priority_scheduling,
            kv_events=None
            if config.kv_events is None
            else config.kv_events.resolve_host(upstream.endpoint),
        )

    def is_equivalent(self, other: ReplicaEntry) -> bool:
        """Whether both make the same replicas."""
        return self.config == other.config and self._tls_digest == other._tls_digest

    def has_same_hostname(self, other: ReplicaEntry | None) -> bool:
        """Whether it is the same name that both look up."""
        return (
            other is not None
            and self.config.discover == other.config.discover
            and self.endpoint.host == other.endpoint.host
        )

    def replica_name(self, address: str) -> str:
        """What the server at one of its name's addresses is called."""
        return f"{self.name}@{address}"


class ModelEntries(NamedTuple):
    """A model, and what stands behind it."""

    model: ModelConfig
    entries: tuple[ReplicaEntry, ...]


def build_model_entries(config: GatewayConfig) -> list[ModelEntries]:
    """All models of the configuration. Raises ValueError or OSError, saying what to change."""
    return [
        ModelEntries(
            model, tuple(ReplicaEntry(one, model.name, config.timeouts) for one in model.replicas)
        )
        for model in config.models
    ]


def build_pool(model_entries: ModelEntries) -> Pool:
    """A model's pool; whose names are to be looked up are not in it yet."""
    model = model_entries.model
    replicas = [
        entry.build_replica() for entry in model_entries.entries if entry.config.discover is None
    ]
    return Pool(model.name, replicas, model.routing, build_hedging(model))


def build_hedging(model: ModelConfig) -> Hedging | None:
    """Whether silent replicas are raced by others, and how often."""
    return None if model.hedge_after_s is None else Hedging(model.hedge_after_s)


def pools_by_name(model_entries: Sequence[ModelEntries], pools: Sequence[Pool]) -> dict[str, Pool]:
    """The pools by all names of their models."""
    return {
        name: pool
        for (model, _), pool in zip(model_entries, pools, strict=True)
        for name in (model.name, *model.aliases)
    }


def build_model_router(
    model_entries: Sequence[ModelEntries], routes: Sequence[RouteConfig] = ()
) -> ModelRouter:
    """All models, by all their names, their pools in this order; `routes` name only these."""
    return ModelRouter(
        pools_by_name(model_entries, [build_pool(one) for one in model_entries]), routes
    )
