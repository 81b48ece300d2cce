"""From the configuration to the models that are served: their pools, their replicas, the connections to those."""

from __future__ import annotations

from argosy.gateway.config import GatewayConfig, ModelConfig, Timeouts, key_of
from argosy.gateway.models import Models
from argosy.gateway.replicas import Pool, Replica
from argosy.gateway.upstream import Upstream, parse_endpoint
from argosy.policy import CHOOSERS


def build_models(config: GatewayConfig) -> Models:
    """All models, by all their names. Raises ValueError, saying what to change."""
    pools = [_pool(model, config.timeouts) for model in config.models]
    return Models(
        {
            name: pool
            for model, pool in zip(config.models, pools, strict=True)
            for name in (model.name, *model.aliases)
        }
    )


def _pool(model: ModelConfig, timeouts: Timeouts) -> Pool:
    replicas = []
    for wanted in model.replicas:
        key = key_of(wanted)
        headers = () if key is None else ((b"authorization", b"Bearer " + key.encode()),)
        upstream = Upstream(
            parse_endpoint(wanted.url), headers=headers, connect_timeout_s=timeouts.connect_s
        )
        name = wanted.model or model.name
        called = wanted.name or wanted.url
        replicas.append(Replica(called, wanted.kind, name, upstream, most=wanted.max_requests))
    return Pool(model.name, replicas, CHOOSERS[model.routing](), model.routing)
