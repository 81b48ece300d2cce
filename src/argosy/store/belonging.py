"""Which organisation a record belongs to: as an expression over its table's columns."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, ScalarSelect, Table, func, null, or_, select

from argosy.store import schema
from argosy.store.records import Key, Limit, Organisation, Price, Project, Record, User


def _organisation_of(table: Table, record: ColumnElement[Any]) -> ScalarSelect[Any]:
    """The organisation of the organisation, project or user with this id; NULL when there is none in the table."""
    organisation = table.c.id if table is schema.organisations else table.c.organisation
    return select(organisation).where(table.c.id == record).scalar_subquery()


_organisation_of_limited_key = (
    select(schema.projects.c.organisation)
    .join(schema.keys, schema.keys.c.project == schema.projects.c.id)
    .where(schema.keys.c.id == schema.limits.c.owner)
    .scalar_subquery()
)

ORGANISATION: dict[type[Record], ColumnElement[Any]] = {
    Organisation: schema.organisations.c.id,
    Project: schema.projects.c.organisation,
    User: schema.users.c.organisation,
    Key: _organisation_of(schema.projects, schema.keys.c.project),
    Limit: func.coalesce(
        *(
            _organisation_of(table, schema.limits.c.owner)
            for table in (schema.organisations, schema.projects, schema.users)
        ),
        _organisation_of_limited_key,
    ),
    Price: null(),
}
"""Id of the organisation that a record belongs to; NULL when it is the whole gateway's."""


def not_ended(table: Table, now: float) -> list[ColumnElement[bool]]:
    """Those that are neither archived, disabled, revoked nor expired."""
    ended = ("archived_at", "disabled_at", "revoked_at")
    still: list[ColumnElement[bool]] = [table.c[n].is_(None) for n in ended if n in table.c]
    if table is schema.keys:
        still.append(or_(table.c.expires_at.is_(None), table.c.expires_at > now))
    return still
