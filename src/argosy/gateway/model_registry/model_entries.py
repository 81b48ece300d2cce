"""From the configuration to what is served: the models, their pools, their replicas, the connections to those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from argosy.gateway.config import GatewayConfig, ModelConfig, ReplicaConfig, Timeouts, headers_of
from argosy.gateway.model_registry.model_router import Models
from argosy.gateway.model_routes import RouteConfig
from argosy.gateway.pool import Pool, Replica
from argosy.gateway.upstream import Upstream, client_context
from argosy.policy import Absence, Hedging
from argosy.protocol import parse_endpoint


class Entry:
    """One entry of a model's replicas: a server, or as many as its name has addresses.

    Raises ValueError or OSError, saying what to change.
    """

    def __init__(self, config: ReplicaConfig, model: str, timeouts: Timeouts) -> None:
        self.config = config
        self.name = config.name or config.url
        self.endpoint = parse_endpoint(config.url)
        self._model = config.model or model
        self._headers = headers_of(config)
        self._tls = client_context(config.tls) if self.endpoint.tls else None
        self._files = config.tls.digest()
        self._timeouts = timeouts

    def replica(self, address: str | None = None) -> Replica:
        """The server at its URL, or the one at this of its name's addresses, which is called so, too."""
        config = self.config
        upstream = Upstream(
            msgspec.structs.replace(self.endpoint, address=address),
            headers=self._headers,
            connect_timeout_s=self._timeouts.connect_s,
            tls=self._tls,
            server_name=config.tls.server_name,
        )
        return Replica(
            self.name if address is None else self.name_at(address),
            config.kind,
            self._model,
            upstream,
            absence=Absence(self._timeouts.recovery_s),
            most=config.max_requests,
            carry=config.carry,
            stream_usage=config.stream_usage,
            priority_scheduling=config.priority_scheduling,
            kv_events=None if config.kv_events is None else config.kv_events.at(upstream.endpoint),
        )

    def same(self, other: Entry) -> bool:
        """Whether both make the same replicas."""
        return self.config == other.config and self._files == other._files

    def same_names(self, other: Entry | None) -> bool:
        """Whether it is the same name that both look up."""
        return (
            other is not None
            and self.config.discover == other.config.discover
            and self.endpoint.host == other.endpoint.host
        )

    def name_at(self, address: str) -> str:
        """What the server at one of its name's addresses is called."""
        return f"{self.name}@{address}"


class Behind(NamedTuple):
    """A model, and what stands behind it."""

    model: ModelConfig
    entries: tuple[Entry, ...]


def read_models(config: GatewayConfig) -> list[Behind]:
    """All models of the configuration. Raises ValueError or OSError, saying what to change."""
    return [
        Behind(model, tuple(Entry(one, model.name, config.timeouts) for one in model.replicas))
        for model in config.models
    ]


def build_pool(behind: Behind) -> Pool:
    """A model's pool; whose names are to be looked up are not in it yet."""
    model = behind.model
    replicas = [entry.replica() for entry in behind.entries if entry.config.discover is None]
    return Pool(model.name, replicas, model.routing, hedging_of(model))


def hedging_of(model: ModelConfig) -> Hedging | None:
    """Whether silent replicas are raced by others, and how often."""
    return None if model.hedge_after_s is None else Hedging(model.hedge_after_s)


def named(behind: Sequence[Behind], pools: Sequence[Pool]) -> dict[str, Pool]:
    """The pools by all names of their models."""
    return {
        name: pool
        for (model, _), pool in zip(behind, pools, strict=True)
        for name in (model.name, *model.aliases)
    }


def build_models(behind: Sequence[Behind], routes: Sequence[RouteConfig] = ()) -> Models:
    """All models, by all their names, their pools in this order; `routes` name only these."""
    return Models(named(behind, [build_pool(one) for one in behind]), routes)
