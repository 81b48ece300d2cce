"""Durable state (SQLite or PostgreSQL) and fast state that gateways share (memory or Redis)."""

from argosy.store.records import (
    Directory,
    Key,
    Limit,
    Organisation,
    Price,
    Project,
    Role,
    Unit,
    UsageRow,
    User,
)
from argosy.store.slots import Slot
from argosy.store.spool import Spool, SpoolError, SpoolFullError

__all__ = [
    "Directory",
    "Key",
    "Limit",
    "Organisation",
    "Price",
    "Project",
    "Role",
    "Slot",
    "Spool",
    "SpoolError",
    "SpoolFullError",
    "Unit",
    "UsageRow",
    "User",
]
