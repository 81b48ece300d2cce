"""The front door: it authenticates, admits, routes, streams and meters."""

from argosy.gateway.config import (
    GatewayConfig,
    ModelConfig,
    QueueConfig,
    ReplicaConfig,
    Timeouts,
    load_config,
)
from argosy.gateway.server import GatewayServer, serve_gateway
from argosy.gateway.upstream_tls import UpstreamTls

__all__ = [
    "GatewayConfig",
    "GatewayServer",
    "ModelConfig",
    "QueueConfig",
    "ReplicaConfig",
    "Timeouts",
    "UpstreamTls",
    "load_config",
    "serve_gateway",
]
