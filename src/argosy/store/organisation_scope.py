"""SQL expressions that find the organisation of a record and select the records that have not ended."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Table, null, or_

from argosy.store import schema
from argosy.store.records import (
    AccountRecord,
    Key,
    Limit,
    Organisation,
    Price,
    Project,
    ReplicaSetting,
    User,
)

ORGANISATION_COLUMNS: dict[type[AccountRecord], ColumnElement[Any]] = {
    Organisation: schema.organisations.c.id,
    Project: schema.projects.c.organisation,
    User: schema.users.c.organisation,
    Key: schema.keys.c.organisation,
    Limit: schema.limits.c.organisation,
    Price: null(),
    ReplicaSetting: null(),
}
"""Id of the organisation that a record belongs to. NULL for records of the whole gateway."""


def active_conditions(table: Table, now: float) -> list[ColumnElement[bool]]:
    """Conditions for records that are neither archived, disabled, revoked nor expired at `now`."""
    end_columns = ("archived_at", "disabled_at", "revoked_at")
    conditions: list[ColumnElement[bool]] = [
        table.c[name].is_(None) for name in end_columns if name in table.c
    ]
    if table is schema.keys:
        conditions.append(or_(table.c.expires_at.is_(None), table.c.expires_at > now))
    return conditions
