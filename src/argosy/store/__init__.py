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

__all__ = [
    "Directory",
    "Key",
    "Limit",
    "Organisation",
    "Price",
    "Project",
    "Role",
    "Unit",
    "UsageRow",
    "User",
]
