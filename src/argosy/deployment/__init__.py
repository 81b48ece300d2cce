"""Model of a fleet that gateway and controller share: its settings, its declaration, and its records in the store.

The subpackage `settings` describes one gateway, as a `GatewayConfig`. The subpackage `declaration` describes a fleet:
a `FleetConfig` is a gateway's settings with models, pools and engines. It also has the canonical text of a declaration,
and the differences between two of them. The subpackage `records` has what the store keeps of a fleet: applied
revisions, replicas with their phases, routes and rollouts. A `FleetControl` reads them together, and stores what people
decide. The controller of `argosy.fleet` carries it out.
"""

from argosy.deployment.declaration.capacity import (
    MachineCapacity,
    check_capacity,
    list_growing_pools,
)
from argosy.deployment.declaration.comparison import (
    ChangeAction,
    ChangeEffect,
    PlannedChange,
    compare_fleets,
)
from argosy.deployment.declaration.config import (
    FleetConfig,
    FleetModelConfig,
    KubernetesSettings,
    PoolConfig,
    build_gateway_config,
    has_address_conflict,
    listen_url,
)
from argosy.deployment.declaration.documents import dump_fleet
from argosy.deployment.declaration.engines import (
    ARGOSY_ENGINE,
    BUILT_IN_ENGINES,
    ArgosyOptions,
    EngineKind,
)
from argosy.deployment.declaration.forecast import (
    MAX_SEQS_OPTIONS,
    ChangeForecast,
    ForecastFigure,
    ForecastRange,
    PoolForecast,
    PoolVariation,
)
from argosy.deployment.declaration.loading import (
    check_files,
    load_fleet,
    locate_fleet,
    parse_fleet,
    parse_remote_change,
)
from argosy.deployment.declaration.refusals import describe_refusals
from argosy.deployment.declaration.replica_command import (
    LaunchResources,
    build_command,
    build_resources,
    find_engine,
    replica_digest,
)
from argosy.deployment.declaration.rollout_config import (
    ExpectedText,
    GoldenSetCheck,
    PinnedMessage,
    PinnedPrompt,
    RolloutConfig,
)
from argosy.deployment.declaration.validation import GATEWAY_POOL, validate_fleet
from argosy.deployment.records.fleet_control import AppliedDeclaration, FleetControl
from argosy.deployment.records.fleet_records import (
    OBSERVED_NAME,
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
    decode_replicas,
)
from argosy.deployment.records.objective_reader import ObjectiveReader, ObjectiveStatus
from argosy.deployment.records.revisions import (
    FleetAction,
    FleetPlan,
    RevisionChanges,
    apply_declaration,
    describe_change,
    find_newest_revision,
    list_known_revisions,
    list_revision_changes,
    parse_declaration,
    plan_declaration,
    pool_digests,
    set_replicas,
    stop_everything,
)
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
    abort_route,
    describe_decision,
    read_rollouts,
    send_command,
)
from argosy.deployment.records.status import (
    FleetStatus,
    PoolStatus,
    count_gateways,
    count_replicas,
    find_store_problem,
    read_fleet_status,
)
from argosy.deployment.settings.adapter_config import AdapterConfig
from argosy.deployment.settings.alerting_config import (
    WATCHDOG,
    AlertingConfig,
    EmailConfig,
    ReceiverConfig,
)
from argosy.deployment.settings.auth_config import AuthConfig, ConsoleConfig, JwtConfig, OidcConfig
from argosy.deployment.settings.backup_config import BackupConfig
from argosy.deployment.settings.content_config import (
    ContentMatchers,
    ContentRule,
    Moderation,
    ModerationSide,
    compile_content_rule,
)
from argosy.deployment.settings.flag_config import (
    DeclaredFlag,
    find_unread_flags,
    parse_flag_condition,
)
from argosy.deployment.settings.gateway_config import (
    MAX_MODEL_NAME_LENGTH,
    RELOADABLE_SETTINGS,
    REQUEST_SETTINGS,
    ColdStartConfig,
    ExplainConfig,
    GatewayConfig,
    GivingWayConfig,
    LimitsConfig,
    ModelConfig,
    QueueConfig,
    RequestSetting,
    SeriesConfig,
    SleepConfig,
    Timeouts,
    TracingConfig,
    list_request_settings,
    load_config,
)
from argosy.deployment.settings.objective_config import LatencyTarget, ObjectivesConfig, SloConfig
from argosy.deployment.settings.prompt_config import PromptConfig, PromptRule
from argosy.deployment.settings.quality_config import QualityConfig, SampleJudge, ScheduledRun
from argosy.deployment.settings.replica_config import (
    BackendKind,
    DiscoveryMode,
    KvEventAddress,
    ReplicaConfig,
    ResumeMode,
    UpstreamTls,
    build_configured_headers,
    find_replica_proxy,
)
from argosy.deployment.settings.routing_config import (
    ANY_HEADER_VALUE,
    CacheRule,
    CascadeConfig,
    ClassifierConfig,
    JudgeConfig,
    RequestConditions,
    RouteConfig,
    SemanticCacheConfig,
    SummaryConfig,
    TrafficTarget,
    TruncationRule,
    build_traffic_route,
    read_classifier,
    rule_name,
)
from argosy.deployment.settings.secret_reference import SecretReference
