"""Which organisation a record belongs to: as an expression over its table's columns."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Table, null, or_

from argosy.store import schema
from argosy.store.records import AccountRecord, Key, Limit, Organisation, Price, Project, User

ORGANISATION_COLUMNS: dict[type[AccountRecord], ColumnElement[Any]] = {
    Organisation: schema.organisations.c.id,
    Project: schema.projects.c.organisation,
    User: schema.users.c.organisation,
    Key: schema.keys.c.organisation,
    Limit: schema.limits.c.organisation,
    Price: null(),
}
"""Id of the organisation that a record belongs to; NULL when it is the whole gateway's."""


def active_conditions(table: Table, now: float) -> list[ColumnElement[bool]]:
    """Those that are neither archived, disabled, revoked nor expired."""
    ended = ("archived_at", "disabled_at", "revoked_at")
    still: list[ColumnElement[bool]] = [table.c[n].is_(None) for n in ended if n in table.c]
    if table is schema.keys:
        still.append(or_(table.c.expires_at.is_(None), table.c.expires_at > now))
    return still
