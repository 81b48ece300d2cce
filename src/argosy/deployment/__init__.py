"""Model of a fleet that gateway and controller share: its settings, its declaration, and its records in the store.

The subpackage `settings` describes one gateway, as a `GatewayConfig`. The subpackage `declaration` describes a fleet:
a `FleetConfig` is a gateway's settings with models, pools and engines. It also has the canonical text of a declaration,
and the differences between two of them. The subpackage `records` has what the store keeps of a fleet: applied
revisions, replicas with their phases, routes and rollouts. A `FleetControl` reads them together, and stores what people
decide. The controller of `argosy.fleet` carries it out.
"""

from argosy.deployment.declaration.argosy_options import FLEET_OPTIONS, ArgosyOptions
from argosy.deployment.declaration.comparison import (
    ChangeAction,
    ChangeEffect,
    PlannedChange,
    compare_fleets,
)
from argosy.deployment.declaration.config import (
    FleetConfig,
    FleetModelConfig,
    ObjectivesConfig,
    PoolConfig,
    SecretReference,
)
from argosy.deployment.declaration.documents import dump_fleet
from argosy.deployment.declaration.engine_catalog import (
    ARGOSY_ENGINE,
    BUILT_IN_ENGINES,
    find_engine,
)
from argosy.deployment.declaration.engine_kind import EngineKind
from argosy.deployment.declaration.gateway_settings import build_gateway_config
from argosy.deployment.declaration.kubernetes_settings import KubernetesSettings
from argosy.deployment.declaration.loading import (
    load_fleet,
    locate_fleet,
    parse_fleet,
    parse_remote_change,
)
from argosy.deployment.declaration.pinned_prompt import ExpectedText, PinnedMessage, PinnedPrompt
from argosy.deployment.declaration.replica_command import (
    LaunchResources,
    build_command,
    build_resources,
    replica_digest,
)
from argosy.deployment.declaration.rollout_config import RolloutConfig
from argosy.deployment.declaration.validation import GATEWAY_POOL, validate_fleet
from argosy.deployment.records.fleet_control import AppliedDeclaration, FleetControl
from argosy.deployment.records.fleet_plan import (
    FleetPlan,
    RevisionChanges,
    describe_change,
    list_revision_changes,
    plan_declaration,
)
from argosy.deployment.records.fleet_records import (
    REPLICA_PREFIX,
    ROLLOUT_BASELINE_PREFIX,
    ROLLOUT_GATE_PREFIX,
    ROLLOUT_STATUS_PREFIX,
    SCALING_DECISION,
    FleetRecords,
    ObservedRevision,
    ReplicaRecord,
    ScalingRecord,
    decode_kind,
    decode_records,
)
from argosy.deployment.records.revisions import (
    apply_declaration,
    find_newest_revision,
    gateway_url,
    list_known_revisions,
    listen_url,
    parse_declaration,
    pool_digests,
    set_replicas,
    stop_everything,
)
from argosy.deployment.records.rollout_commands import abort_route, send_command
from argosy.deployment.records.rollout_documents import (
    ROLLOUTS_PREFIX,
    ROUTE_PREFIX,
    RolloutDocuments,
    append_command,
    read_rollout_documents,
    remove_commands,
    roll_back_route,
)
from argosy.deployment.records.rollout_status import (
    ROLLOUT_REFUSED,
    RolloutReport,
    RolloutStatus,
    describe_decision,
    read_rollouts,
)
from argosy.deployment.records.status import FleetStatus, PoolStatus, read_fleet_status
from argosy.deployment.settings.auth_config import AuthConfig, JwtConfig
from argosy.deployment.settings.console_config import ConsoleConfig, OidcConfig
from argosy.deployment.settings.gateway_config import (
    RELOADABLE_SETTINGS,
    ColdStartConfig,
    ExplainConfig,
    GatewayConfig,
    GivingWayConfig,
    LimitsConfig,
    ModelConfig,
    ModelName,
    QueueConfig,
    SeriesConfig,
    Timeouts,
    load_config,
    validate_config,
)
from argosy.deployment.settings.replica_config import (
    BackendKind,
    DiscoveryMode,
    KvEventAddress,
    ReplicaConfig,
    ResumeMode,
    UpstreamTls,
    build_configured_headers,
)
from argosy.deployment.settings.route_config import ANY_HEADER_VALUE, RouteConfig, route_name
from argosy.deployment.settings.traffic_config import TrafficTarget, build_traffic_route
