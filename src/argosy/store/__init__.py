"""Durable state (SQLite or PostgreSQL) and fast state that gateways share (memory or Redis)."""

from argosy.store.accounts import Accounts
from argosy.store.answers import Answer, Answers, Claim, IdempotencyConfig
from argosy.store.audit import Audit, AuditEntry, Verdict
from argosy.store.changes import Part
from argosy.store.clock import Clock, SteadyClock, steady
from argosy.store.counters import Wants
from argosy.store.errors import ConflictError, NotFoundError, StoreAwayError, StoreError
from argosy.store.keys import digest
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
from argosy.store.rules import working
from argosy.store.shared import MemoryState, SharedState, open_answers, open_shared
from argosy.store.slots import Slot
from argosy.store.spool import Spool, SpoolError, SpoolFullError
from argosy.store.store import (
    Store,
    StoreConfig,
    default_url,
    find_store,
    open_store,
    usage_folder,
)
from argosy.store.terms import Terms
from argosy.store.usage import Group, ReportRow, UsageFilter, UsageLog, UsageSum, read_groups

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
