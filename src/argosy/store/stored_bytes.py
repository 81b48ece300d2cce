"""Bytes that each tenant stores: totals that change in the transaction of what they count, and their bound."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, FromClause, Row, and_, bindparam, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.dml import ReturningInsert

from argosy.store import schema
from argosy.store.database import Database
from argosy.store.errors import StorageQuotaError

DEFAULT_MAX_STORED_BYTES = 1 << 30
ROW_OVERHEAD_BYTES = 512
"""Bytes that a row counts beside its body, for its ids and its entries in indexes."""
_totals, _limits = schema.stored_bytes.c, schema.limits.c


class ItemOwner(NamedTuple):
    """Tenant to which responses, conversations with their items, and files belong."""

    organisation: str
    owner: str
    """Id of the project, or of the user or the key of a principal without one."""

    def owns(self, table: FromClause) -> ColumnElement[bool]:
        """Return the condition that a row belongs to this owner."""
        columns = table.c
        return and_(columns.organisation == self.organisation, columns.owner == self.owner)


class StorageUse(NamedTuple):
    """Bytes that a tenant stores, and may store at most."""

    stored_bytes: int
    max_stored_bytes: int


class StoredBytes:
    """Totals of stored bytes by tenant. What is stored for tenants is inserted and deleted together with its bytes.

    Args:
        database: Database with the totals.
        default_limit: Bound of each tenant. A limit on `stored_bytes` of a project replaces it.
    """

    def __init__(self, database: Database, default_limit: int) -> None:
        self._database = database
        self._default_limit = default_limit

    def add(self, connection: Connection, owner: ItemOwner, added: int) -> None:
        """Add bytes to a tenant's total. The total is locked until the end of the transaction.

        Raises:
            StorageQuotaError: The total would exceed the bound.
        """
        row = self._change(connection, owner, added)
        if added > 0:
            self._check(row.bytes - added, added, row.amount)

    def change(self, connection: Connection, changes: Mapping[ItemOwner, int]) -> None:
        """Add bytes to the totals of several tenants or subtract them, whatever the bound."""
        # In one order, so that transactions that lock the same totals do not wait for each other in a circle.
        for owner, change in sorted(changes.items()):
            self._change(connection, owner, change)

    @staticmethod
    def _change(connection: Connection, owner: ItemOwner, change: int) -> Row[Any]:
        """Change a tenant's total, and return it with the amount of the tenant's own limit."""
        values = owner._asdict() | {"bytes": change, "limited": owner.owner}
        return connection.execute(_build_change(connection.dialect.name), values).one()

    def check_room(self, owner: ItemOwner, needed: int) -> None:
        """Raise StorageQuotaError if the tenant may not store `needed` bytes more, as of now."""
        use = self.read_use([owner.owner])[owner.owner]
        self._check(use.stored_bytes, needed, use.max_stored_bytes)

    def read_totals(self) -> dict[ItemOwner, int]:
        """Return the totals of all tenants that have stored anything."""
        with self._database.read_transaction() as connection:
            rows = connection.execute(select(schema.stored_bytes)).all()
        return {ItemOwner(row.organisation, row.owner): row.bytes for row in rows}

    def read_use(self, owners: Collection[str]) -> dict[str, StorageUse]:
        """Return the totals and bounds of these tenants, by their ids."""
        totals = select(_totals.owner, _totals.bytes).where(_totals.owner.in_(owners))
        limits = select(_limits.owner, _limits.amount).where(
            _limits.owner.in_(owners), _limits.unit == "stored_bytes"
        )
        with self._database.read_transaction() as connection:
            stored, bounds = (
                dict(map(tuple[str, int], connection.execute(query))) for query in (totals, limits)
            )
        return {
            owner: StorageUse(stored.get(owner, 0), bounds.get(owner, self._default_limit))
            for owner in owners
        }

    def _check(self, stored: int, needed: int, limit: int | None) -> None:
        limit = self._default_limit if limit is None else limit
        if stored + needed > limit:
            raise StorageQuotaError(
                f"The project stores {stored:,} bytes of responses, conversations and files, and may store {limit:,}."
                f" This request needs {needed:,} more. Delete some with DELETE /v1/responses/ID, /v1/conversations/ID"
                " or /v1/files/ID, send 'store': false, or have the limit on stored_bytes raised."
            )


@cache
def _build_change(dialect: str) -> ReturningInsert[Any]:
    """Return the statement that adds to a total, and returns it with the owner's own bound."""
    insert = (sqlite.insert if dialect == "sqlite" else postgresql.insert)(schema.stored_bytes)
    limit = select(_limits.amount).where(
        _limits.owner == bindparam("limited"), _limits.unit == "stored_bytes"
    )
    return insert.on_conflict_do_update(
        index_elements=[_totals.organisation, _totals.owner],
        set_={"bytes": _totals.bytes + insert.excluded.bytes},
    ).returning(_totals.bytes, limit.scalar_subquery().label("amount"))


def count_bytes(row: Mapping[str, Any]) -> int:
    """Return the bytes that a row counts."""
    return len(row["body"]) + ROW_OVERHEAD_BYTES
