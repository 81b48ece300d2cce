"""Decision logic as pure code: no clock, no input or output, no torch; the current time is always an argument.

A request first reserves its quotas (`reserve`), counted by a `QuotaMeter` or, for limits that gateways share, by a
`LeasedQuota`. The load-shedding functions then decide whether it may join the `DispatchQueue` of its pool, which orders
tenants by tier and fair share. When a slot is free, the breakers, slot shares and tier reservations determine the
eligible replicas. A `RoutingPolicy` selects one of them with the help of a `PrefixCacheIndex`. The result of each
attempt updates the `ReplicaHealth`, which combines a `Breaker`, `Backpressure` and an `OutageTracker` into one
`ReplicaStatus`, as do the probes of a `HealthCheck`. Further attempts are limited by `RetryBudget`, `Hedging` and
`PoisonRequestTracker`. At the end of a request `compute_bill` decides what it costs. The engine's scheduler uses
`VirtualTokenCounters`, and `ThreadCountPolicy` adapts the threads of an engine on the CPU. The controller of a fleet
decides by `policy.reconciliation`.
"""

from argosy.policy.adapter_placement import count_homes, select_homes
from argosy.policy.backfill import (
    MAX_RAISED_DIVISOR,
    BackfillWindow,
    Backlog,
    BatchPace,
    LineShares,
    PoolLoad,
)
from argosy.policy.backpressure import Backpressure
from argosy.policy.billing import BATCH_PERCENT, Bill, RequestEnd, RequestStatus, compute_bill
from argosy.policy.breaker import (
    AttemptOutcome,
    Breaker,
    BreakerLimits,
    classify_status,
    eligible_replicas,
)
from argosy.policy.concurrency_slots import (
    lowest_admissible_tier,
    no_reservation_active,
    slot_share,
)
from argosy.policy.cost_allocation import (
    HardwareUse,
    allocate,
    attribute_cost,
)
from argosy.policy.cost_watch import (
    BUDGET_STEPS_PERCENT,
    MAX_OUTLIERS_PER_DAY,
    OUTLIER_FACTOR,
    OUTLIER_FLOOR_NANO_DOLLARS,
    OUTLIER_MIN_REQUESTS,
    OUTLIER_PERIOD_S,
    BudgetForecast,
    explain_outlier,
    forecast_budget,
    forecast_month,
)
from argosy.policy.deficit_round_robin import QUANTUM_TOKENS, QueuedRequest
from argosy.policy.event_prefix_index import (
    MAX_INDEXED_BLOCKS,
    MAX_NAMED_BLOCKS,
    EngineBlockHash,
    EngineBlockNames,
    EventPrefixIndex,
    TextBlockMap,
    compute_block_names,
)
from argosy.policy.fair_queue import (
    BATCH_TIER,
    LOWEST_TIER,
    PROMOTION_INTERVAL,
    DispatchQueue,
    TenantBacklog,
    promote_after_s,
    start_deadline,
)
from argosy.policy.health_check import (
    PROBE_TIMEOUT_S,
    UNSUPPORTED_STATUSES,
    FindingKind,
    HealthCheck,
    Probe,
    ProbeAnswer,
    ProbeEffect,
    ProbeFinding,
    ProbeKind,
    ServerProfile,
)
from argosy.policy.leased_quota import ConcurrencyLease, LeasedQuota, LeaseGrant, LeaseRequest
from argosy.policy.load_shedding import is_tenant_within_share, is_tier_admitted, saturation
from argosy.policy.outage_tracker import OutageTracker
from argosy.policy.prefix_cache_index import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    CacheHitReport,
    EstimatedPrefixIndex,
    PrefixCacheIndex,
    PromptTokensReport,
    RecentPlacements,
    compute_prefix_keys,
)
from argosy.policy.prefix_tree import PrefixNode, PrefixTree, RecentPrompt
from argosy.policy.quota_meters import (
    CalendarPeriod,
    ClockOffset,
    ConcurrencyMeter,
    QuotaMeter,
    SlidingWindow,
    calendar_bounds,
    is_exceeded,
)
from argosy.policy.replica_health import ReplicaHealth, StatusChange
from argosy.policy.replica_status import AdminState, ReplicaStatus
from argosy.policy.reservation import (
    NO_CHARGE,
    LimitHold,
    QuotaLimit,
    QuotaRejection,
    QuotaUsage,
    Rates,
    Reservation,
    is_permanent,
    longest_rejection,
    reserve,
    running_usage,
)
from argosy.policy.residency import Residency, ResidentModel, decide_residency
from argosy.policy.resolved_addresses import ResolvedAddresses
from argosy.policy.retries import Hedging, PoisonRequestTracker, RetryBudget, backoff_s
from argosy.policy.right_sizing import SizeAdvice, SizeVerdict, advise_size
from argosy.policy.routing import (
    ROUTING_POLICIES,
    BoundedHash,
    ReplicaLoad,
    RoundRobin,
    RoutingCandidate,
    RoutingCost,
    RoutingPolicy,
    RoutingPolicyName,
    estimate_cost,
)
from argosy.policy.smoothing import (
    EwmaMean,
    EwmaRate,
    OnlineLinearFit,
    OutputLengthEstimator,
    PeakEwma,
)
from argosy.policy.tenant_memory import MemoryEntry, TenantMemory
from argosy.policy.thread_count_policy import MEASURE_INTERVAL_S, ThreadCountPolicy
from argosy.policy.truncation import (
    Message,
    TruncationPolicy,
    build_summary_prompt,
    format_ranges,
    insert_summary,
    list_cuts,
)
from argosy.policy.virtual_token_counters import (
    INPUT_TOKEN_WEIGHT,
    OUTPUT_TOKEN_WEIGHT,
    TenantCounter,
    VirtualTokenCounters,
    weighted_tokens,
)
from argosy.policy.wake_at import WakeAt
from argosy.policy.window_lease import WindowLease
