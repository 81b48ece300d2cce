"""The gateway: the front end of a fleet that authenticates, admits, routes, streams and meters requests.

`GatewayServer` builds the parts from a `GatewayConfig`, listens, and drains on SIGTERM. The ASGI application,
`GatewayApp`, authenticates each request as a `Principal` and calls the route's handler. The `proxy` package handles
generation requests: it runs the request filters, queues for a replica of the pool, and forwards the response. A
`RequestContext` carries the state of one generation request through filters, queue, attempts and response. In the
background, `AccountSync` polls the store for accounts, and on SIGHUP `ConfigReloader` reloads models and routes.
"""

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
