"""The front door: it authenticates, admits, routes, streams and meters."""

from argosy.gateway.auth import AuthConfig, check_exposure, is_loopback
from argosy.gateway.config import (
    GatewayConfig,
    ModelConfig,
    QueueConfig,
    ReplicaConfig,
    Timeouts,
    load_config,
)
from argosy.gateway.model_routes import RouteConfig
from argosy.gateway.server import GatewayServer, serve_gateway
from argosy.gateway.upstream import UpstreamTls

__all__ = [
    "AuthConfig",
    "GatewayConfig",
    "GatewayServer",
    "ModelConfig",
    "QueueConfig",
    "ReplicaConfig",
    "RouteConfig",
    "Timeouts",
    "UpstreamTls",
    "check_exposure",
    "is_loopback",
    "load_config",
    "serve_gateway",
]
