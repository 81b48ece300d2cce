"""From the configuration to the models that are served: their pools, their replicas, the connections to those."""

from __future__ import annotations

from argosy.gateway.config import GatewayConfig, ModelConfig, Timeouts, headers_of
from argosy.gateway.models import Models
from argosy.gateway.replicas import Pool, Replica
from argosy.gateway.upstream import Upstream
from argosy.gateway.upstream_tls import client_context
from argosy.policy import Hedging
from argosy.protocol import parse_endpoint


def build_models(config: GatewayConfig) -> Models:
    """All models, by all their names. Raises ValueError, saying what to change."""
    pools = [_pool(model, config.timeouts) for model in config.models]
    return Models(
        {
            name: pool
            for model, pool in zip(config.models, pools, strict=True)
            for name in (model.name, *model.aliases)
        },
        config.routes,
    )


def _pool(model: ModelConfig, timeouts: Timeouts) -> Pool:
    replicas = []
    for wanted in model.replicas:
        endpoint = parse_endpoint(wanted.url)
        upstream = Upstream(
            endpoint,
            headers=headers_of(wanted),
            connect_timeout_s=timeouts.connect_s,
            tls=client_context(wanted.tls) if endpoint.tls else None,
            server_name=wanted.tls.server_name,
        )
        replica = Replica(
            wanted.name or wanted.url,
            wanted.kind,
            wanted.model or model.name,
            upstream,
            most=wanted.max_requests,
            carry=wanted.carry,
            stream_usage=wanted.stream_usage,
            kv_events=wanted.kv_events,
        )
        replicas.append(replica)
    hedging = None if model.hedge_after_s is None else Hedging(model.hedge_after_s)
    return Pool(model.name, replicas, model.routing, hedging)
