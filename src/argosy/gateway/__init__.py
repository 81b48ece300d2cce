"""The gateway: the front end of a fleet that authenticates, admits, routes, streams and meters requests.

`GatewayServer` builds the parts from a `GatewayConfig`, listens, and drains on SIGTERM. The application,
`GatewayApp`, authenticates each request as a `Principal` and calls the route's handler. The `proxy` package handles
generation requests: it runs the request filters, queues for a replica of the pool, and forwards the response. A
`RequestContext` carries the state of one generation request through filters, queue, attempts and response. In the
background, `AccountSync` polls the store for accounts, and on SIGHUP `ConfigReloader` reloads models and routes.
"""

from argosy.gateway.adapter_rollouts import describe_rollout, read_verdict
from argosy.gateway.auth import check_exposure, is_loopback
from argosy.gateway.fleet_pools import (
    FleetPools,
    GatewayPoolsClient,
    OtherFleetError,
    PoolsStatus,
    RoutedReplica,
)
from argosy.gateway.lessons import (
    Lesson,
    LessonControl,
    LessonFigure,
    LessonGoal,
    LessonLine,
    LessonPlot,
    LessonRun,
)
from argosy.gateway.pool import ModelStartup
from argosy.gateway.proxy import DemandReport, ModelDemand, prebuild_fast_path
from argosy.gateway.replica_logs import ReplicaLogs
from argosy.gateway.request_fields import sample_body
from argosy.gateway.rollout_messages import (
    ROUTE_PREFIX,
    OutcomeQuery,
    OutcomeReport,
    PublishedVersions,
)
from argosy.gateway.server import GatewayServer, serve_gateway
from argosy.gateway.upstream import UpstreamError
