"""The gateway: the front end of a fleet that authenticates, admits, routes, streams and meters requests.

`GatewayServer` builds the parts from a `GatewayConfig`, listens, and drains on SIGTERM. The ASGI application,
`GatewayApp`, authenticates each request as a `Principal` and calls the route's handler. The `proxy` package handles
generation requests: it runs the request filters, queues for a replica of the pool, and forwards the response. A
`RequestContext` carries the state of one generation request through filters, queue, attempts and response. In the
background, `AccountSync` polls the store for accounts, and on SIGHUP `ConfigReloader` reloads models and routes.
"""

from argosy.gateway.auth import AuthConfig, check_exposure, is_loopback
from argosy.gateway.backends import BackendKind
from argosy.gateway.config import (
    RENAMED_SETTINGS,
    GatewayConfig,
    ModelConfig,
    ModelName,
    QueueConfig,
    ReplicaConfig,
    Timeouts,
    load_config,
    validate_config,
)
from argosy.gateway.config_reloader import RELOADABLE_SETTINGS
from argosy.gateway.console import ConsoleConfig
from argosy.gateway.fleet_control import (
    FleetChangeView,
    FleetControl,
    FleetDeclarationView,
    FleetGatewaysView,
    FleetPlanView,
    FleetPoolView,
    FleetReplicaView,
    FleetRevisionView,
    FleetView,
    OpenFleetControl,
    PoolRolloutView,
    VersionView,
)
from argosy.gateway.fleet_pools import (
    FleetPools,
    GatewayPoolsClient,
    OtherFleetError,
    PoolsStatus,
    RoutedReplica,
)
from argosy.gateway.model_routes import RouteConfig
from argosy.gateway.model_traffic import TrafficTarget
from argosy.gateway.pool import ModelStartup
from argosy.gateway.proxy import DemandReport, ModelDemand, prebuild_fast_path
from argosy.gateway.replica_logs import ReplicaLogs
from argosy.gateway.rollout_messages import (
    ROUTE_PREFIX,
    OutcomeQuery,
    OutcomeReport,
    PublishedVersions,
)
from argosy.gateway.server import GatewayServer, serve_gateway
from argosy.gateway.upstream import UpstreamError, UpstreamTls

__all__ = [
    "RELOADABLE_SETTINGS",
    "RENAMED_SETTINGS",
    "ROUTE_PREFIX",
    "AuthConfig",
    "BackendKind",
    "ConsoleConfig",
    "DemandReport",
    "FleetChangeView",
    "FleetControl",
    "FleetDeclarationView",
    "FleetGatewaysView",
    "FleetPlanView",
    "FleetPoolView",
    "FleetPools",
    "FleetReplicaView",
    "FleetRevisionView",
    "FleetView",
    "GatewayConfig",
    "GatewayPoolsClient",
    "GatewayServer",
    "ModelConfig",
    "ModelDemand",
    "ModelName",
    "ModelStartup",
    "OpenFleetControl",
    "OtherFleetError",
    "OutcomeQuery",
    "OutcomeReport",
    "PoolRolloutView",
    "PoolsStatus",
    "PublishedVersions",
    "QueueConfig",
    "ReplicaConfig",
    "ReplicaLogs",
    "RouteConfig",
    "RoutedReplica",
    "Timeouts",
    "TrafficTarget",
    "UpstreamError",
    "UpstreamTls",
    "VersionView",
    "check_exposure",
    "is_loopback",
    "load_config",
    "prebuild_fast_path",
    "serve_gateway",
    "validate_config",
]
