"""Decisions, pure: no clock, no input or output, no torch."""

from argosy.policy.backpressure import Backpressure
from argosy.policy.breaker import Breaker, BreakerLimits, Outcome, classify, usable
from argosy.policy.concurrency_lease import SlotLease
from argosy.policy.concurrency_slots import part
from argosy.policy.engine_block_names import MOST_TOLD, EngineBlocks, Hash, block_names
from argosy.policy.event_prefix_index import MOST_HELD, ExactIndex, Texts
from argosy.policy.fair_queue import PROMOTED_EACH, QUANTUM, DispatchQueue, Held, Waiting, due_at
from argosy.policy.hedging import Hedging
from argosy.policy.leased_quota import Ask, Grant, Shared
from argosy.policy.load_shedding import admits, fits, saturation
from argosy.policy.outage_tracker import Absence
from argosy.policy.output_length import OutputEstimates
from argosy.policy.poison_requests import Suspects
from argosy.policy.prefix_cache_index import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    Answered,
    LastPlaces,
    Prefixes,
    PrefixIndex,
    Read,
    chain,
)
from argosy.policy.prices import NO_CHARGE, Priced, PriceList, Rates
from argosy.policy.quota_meters import Concurrency, Counter, Period, Window, period
from argosy.policy.reservation import (
    Hold,
    Meter,
    Refusal,
    Reservation,
    Use,
    ended,
    never,
    reserve,
    running,
    worst,
)
from argosy.policy.resolved_addresses import Addresses
from argosy.policy.retry_budget import RetryBudget, backoff_s
from argosy.policy.routing import (
    CHOOSERS,
    SEES_ALL,
    BoundedHash,
    Candidate,
    Chooser,
    Cost,
    LeastCost,
    PowerOfTwo,
    ReplicaLoad,
    RoundRobin,
    Rule,
    cost,
)
from argosy.policy.smoothing import Line, Mean, PeakEwma, Rate
from argosy.policy.supervision import Action, Custody, CustodyLimits, Life
from argosy.policy.tier_reservation import lowest_tier, nothing_kept
from argosy.policy.virtual_token_counters import (
    INPUT_PRICE,
    OUTPUT_PRICE,
    Account,
    TenantShares,
    service,
)
from argosy.policy.window_lease import Lease

__all__ = [
    "BLOCK_BYTES",
    "BLOCK_TOKENS",
    "CHOOSERS",
    "INPUT_PRICE",
    "MOST_HELD",
    "MOST_TOLD",
    "NO_CHARGE",
    "OUTPUT_PRICE",
    "PROMOTED_EACH",
    "QUANTUM",
    "SEES_ALL",
    "Absence",
    "Account",
    "Action",
    "Addresses",
    "Answered",
    "Ask",
    "Backpressure",
    "BoundedHash",
    "Breaker",
    "BreakerLimits",
    "Candidate",
    "Chooser",
    "Concurrency",
    "Cost",
    "Counter",
    "Custody",
    "CustodyLimits",
    "DispatchQueue",
    "EngineBlocks",
    "ExactIndex",
    "Grant",
    "Hash",
    "Hedging",
    "Held",
    "Hold",
    "LastPlaces",
    "Lease",
    "LeastCost",
    "Life",
    "Line",
    "Mean",
    "Meter",
    "Outcome",
    "OutputEstimates",
    "PeakEwma",
    "Period",
    "PowerOfTwo",
    "PrefixIndex",
    "Prefixes",
    "PriceList",
    "Priced",
    "Rate",
    "Rates",
    "Read",
    "Refusal",
    "ReplicaLoad",
    "Reservation",
    "RetryBudget",
    "RoundRobin",
    "Rule",
    "Shared",
    "SlotLease",
    "Suspects",
    "TenantShares",
    "Texts",
    "Use",
    "Waiting",
    "Window",
    "admits",
    "backoff_s",
    "block_names",
    "chain",
    "classify",
    "cost",
    "due_at",
    "ended",
    "fits",
    "lowest_tier",
    "never",
    "nothing_kept",
    "part",
    "period",
    "reserve",
    "running",
    "saturation",
    "service",
    "usable",
    "worst",
]
