"""Durable state (SQLite or PostgreSQL) and fast state that gateways share (memory or Redis)."""

from argosy.store.accounts import Accounts
from argosy.store.api_keys import digest
from argosy.store.audit import Audit, AuditEntry, Verdict
from argosy.store.clock import Clock, SteadyClock, steady
from argosy.store.errors import ConflictError, NotFoundError, StoreAwayError, StoreError
from argosy.store.idempotency_store import Answer, Answers, Claim, IdempotencyConfig
from argosy.store.ledger import Group, ReportRow, UsageFilter, UsageLog, UsageSum, read_groups
from argosy.store.limits_and_prices import Terms
from argosy.store.quota_backend import MemoryState, SharedState, open_answers, open_shared
from argosy.store.quota_meters import Wants
from argosy.store.record_tables import Part
from argosy.store.records import (
    Amount,
    Directory,
    Key,
    KeyInfo,
    Limit,
    Moment,
    Name,
    Names,
    Networks,
    Organisation,
    OwnerKind,
    Price,
    Project,
    Role,
    RoleScope,
    Tier,
    TokenPrice,
    Unit,
    Unsure,
    UsageRow,
    User,
    Weight,
    Window,
)
from argosy.store.store import (
    Store,
    StoreConfig,
    default_url,
    find_store,
    open_store,
    usage_folder,
)
from argosy.store.usage_log import Spool, SpoolError, SpoolFullError
from argosy.store.usage_slots import Slot
from argosy.store.validation import working

__all__ = [
    "Accounts",
    "Amount",
    "Answer",
    "Answers",
    "Audit",
    "AuditEntry",
    "Claim",
    "Clock",
    "ConflictError",
    "Directory",
    "Group",
    "IdempotencyConfig",
    "Key",
    "KeyInfo",
    "Limit",
    "MemoryState",
    "Moment",
    "Name",
    "Names",
    "Networks",
    "NotFoundError",
    "Organisation",
    "OwnerKind",
    "Part",
    "Price",
    "Project",
    "ReportRow",
    "Role",
    "RoleScope",
    "SharedState",
    "Slot",
    "Spool",
    "SpoolError",
    "SpoolFullError",
    "SteadyClock",
    "Store",
    "StoreAwayError",
    "StoreConfig",
    "StoreError",
    "Terms",
    "Tier",
    "TokenPrice",
    "Unit",
    "Unsure",
    "UsageFilter",
    "UsageLog",
    "UsageRow",
    "UsageSum",
    "User",
    "Verdict",
    "Wants",
    "Weight",
    "Window",
    "default_url",
    "digest",
    "find_store",
    "open_answers",
    "open_shared",
    "open_store",
    "read_groups",
    "steady",
    "usage_folder",
    "working",
]
