"""Durable state in SQLite or PostgreSQL, and fast state that gateways share in memory or Redis.

`Store` opens a database by URL. Its `accounts`, `limits_and_prices`, `adapters`, `prompts`, `quality`, `flags` and
`replica_settings` change records in audited transactions, and `load_snapshot` reads all of them as one
`AccountSnapshot` that gateways hold in memory. Its `ledger` adds, sums and rolls up usage records. Its `responses` and
`conversations` hold the state of the Responses API, and its `files` what clients upload, within the bounds that
`stored_bytes` keeps. Its `fleets` hold declared fleets: revisions, events, and the lease of the leading controller. A
`UsageLog` holds usage on the gateway's disk until the ledger has it, so no request waits for the database. Separate
from the store, a `QuotaBackend` counts limits across gateways and an `IdempotencyStore` holds the responses of
repeatable requests.
"""

from argosy.store.accounts import Accounts
from argosy.store.adapters import Adapters
from argosy.store.api_keys import hash_key
from argosy.store.audit import AuditEntry, AuditLog, AuditVerification
from argosy.store.batch_store import (
    ENDED_STATUSES,
    MAX_LINES,
    Batch,
    BatchDetails,
    BatchError,
    BatchLine,
    BatchStatus,
    BatchStore,
    ClaimedLine,
    EndedLine,
    HolderMonitor,
    LineResult,
)
from argosy.store.clock import Clock, steady_clock
from argosy.store.console_session_store import ConsoleSession, ConsoleSessionStore
from argosy.store.content_access import ContentAccess
from argosy.store.conversation_store import ConversationStore, StoredConversation
from argosy.store.cost_watch import Budget, CostOutlier, list_budgets, list_outliers
from argosy.store.csv_export import format_csv, format_csv_time
from argosy.store.database import limit_query_time, sqlite_path, sqlite_url
from argosy.store.erasure import ErasedProject, Erasure
from argosy.store.errors import (
    ConflictError,
    FileInUseError,
    HistoryTooLongError,
    NotFoundError,
    QueryTimeoutError,
    StorageQuotaError,
    StoreError,
    StoreUnavailableError,
    UploadError,
)
from argosy.store.file_store import (
    NEVER,
    FileContent,
    FileStore,
    StoredFile,
    StoredUpload,
    WrittenBlob,
)
from argosy.store.flags import Flags
from argosy.store.fleet_store import (
    DECISION,
    AuditedDecision,
    DeposedError,
    FleetDocument,
    FleetEvent,
    FleetLease,
    FleetRevision,
    FleetStore,
    PoolGeneration,
)
from argosy.store.focus_export import FOCUS_VERSIONS, FocusExport, FocusVersion
from argosy.store.gateway_registry import (
    BLOB_PLACE_KEY,
    LIVENESS_TIMEOUT_S,
    GatewayRecord,
    GatewayRegistry,
    SecretStore,
)
from argosy.store.hardware_costs import CostRow, HardwareCosts, HardwareDay, compare_costs
from argosy.store.idempotency_store import (
    CachedResponse,
    IdempotencyConfig,
    IdempotencyStore,
    InFlightClaim,
)
from argosy.store.item_table import Item
from argosy.store.ledger import (
    ALL_USAGE,
    ColdPart,
    Ledger,
    RecordOrder,
    ReportGroup,
    UsageFilter,
    UsageReportRow,
    UsageTotals,
    parse_report_groups,
)
from argosy.store.limits_and_prices import LimitsAndPrices, PriceList
from argosy.store.migrations import NEWEST_REVISION
from argosy.store.objective_hours import MissDetails, ObjectiveHour, ObjectiveHours
from argosy.store.prompts import Prompts
from argosy.store.quality import Quality, SampleSummary
from argosy.store.quota_backend import (
    LocalQuotaBackend,
    QuotaBackend,
    create_idempotency_store,
    create_quota_backend,
)
from argosy.store.quota_meters import QuotaDemand
from argosy.store.record_tables import AccountTransaction, ChangeCheck, PageRequest
from argosy.store.records import (
    DEFAULT_STEP_S,
    LATEST,
    PRODUCTION,
    AccountRecord,
    AccountSnapshot,
    Adapter,
    AdapterReplicas,
    ContentDigest,
    Flag,
    GatewayFlag,
    Key,
    KeyInfo,
    Limit,
    LimitAmount,
    LimitUnit,
    LimitWindow,
    Name,
    Names,
    Networks,
    Organisation,
    OwnerKind,
    Percent,
    Price,
    Project,
    Prompt,
    PromptLabel,
    PromptName,
    PromptVersionNumber,
    QualityConsent,
    QualityRun,
    QualitySample,
    QualitySet,
    QuotaFailureMode,
    ReplicaSetting,
    ReplicaState,
    ReplicaWeight,
    Role,
    RoleScope,
    SampledTexts,
    StepSeconds,
    SwitchState,
    Tier,
    Timestamp,
    TokenPrice,
    UsageRecord,
    UsageStatus,
    User,
    Weight,
)
from argosy.store.replicas import CONTROLLER_LOG, ReplicaLogRun, ReplicaLogStore, ReplicaSettings
from argosy.store.response_store import (
    RUNNING_STATUSES,
    ResponseStatus,
    ResponseStore,
    StoredResponse,
)
from argosy.store.retention import RetentionKind, RetentionRule, RetentionRules
from argosy.store.store import (
    Store,
    StoreConfig,
    default_blob_folder,
    default_store_url,
    open_existing_store,
    open_memory_store,
    open_store,
    usage_log_folder,
)
from argosy.store.stored_bytes import ItemOwner, StoredBytes
from argosy.store.usage_log import UsageLog, UsageLogError, UsageLogFullError
from argosy.store.usage_slots import UsageSlot
from argosy.store.validation import is_key_valid
