"""Decisions, pure: no clock, no input or output, no torch."""

from argosy.policy.absence import Absence
from argosy.policy.affinity import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    Answered,
    LastPlaces,
    Prefixes,
    PrefixIndex,
    Read,
    chain,
)
from argosy.policy.backpressure import Backpressure
from argosy.policy.breaker import Breaker, BreakerLimits, Outcome, classify, usable
from argosy.policy.discovery import Addresses
from argosy.policy.estimates import OutputEstimates
from argosy.policy.fairness import INPUT_PRICE, OUTPUT_PRICE, Account, TenantShares, service
from argosy.policy.headroom import lowest_tier, nothing_kept
from argosy.policy.hedging import Hedging
from argosy.policy.kv_blocks import MOST_TOLD, EngineBlocks, Hash, block_names
from argosy.policy.kv_index import MOST_HELD, ExactIndex, Texts
from argosy.policy.leases import Lease
from argosy.policy.limits import (
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
from argosy.policy.measured import Line, Mean, PeakEwma, Rate
from argosy.policy.order import PROMOTED_EACH, QUANTUM, DispatchQueue, Held, Waiting, due_at
from argosy.policy.prices import NO_CHARGE, Priced, PriceList, Rates
from argosy.policy.retries import RetryBudget, backoff_s
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
from argosy.policy.seats import part
from argosy.policy.sharing import Ask, Grant, Shared
from argosy.policy.shedding import admits, fits, saturation
from argosy.policy.slot_lease import SlotLease
from argosy.policy.supervision import Action, Custody, CustodyLimits, Life
from argosy.policy.suspects import Suspects
from argosy.policy.windows import Concurrency, Counter, Period, Window, period

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
