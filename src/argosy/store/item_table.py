"""Rows of the table `items`, which responses and conversations share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    Row,
    Table,
    and_,
    delete,
    func,
    insert,
    select,
)

from argosy.store import schema
from argosy.store.database import Database
from argosy.store.errors import HistoryTooLongError

Item = dict[str, Any]
"""Input or output item of the Responses API."""
ALL_ITEMS = 2**31
MAX_HISTORY_ITEMS = 20_000
MAX_HISTORY_BYTES = 64 * 1024 * 1024
_DELETION_BATCH_ROWS = 500
_columns = schema.items.c


class ItemOwner(NamedTuple):
    """Tenant to which responses, conversations and their items belong."""

    organisation: str
    owner: str
    """Id of the project, or of the user or the key of a principal without one."""

    def owns(self, table: FromClause) -> ColumnElement[bool]:
        """Return the condition that a row belongs to this owner."""
        columns = table.c
        return and_(columns.organisation == self.organisation, columns.owner == self.owner)


def find_row(
    connection: Connection, table: Table, owner: ItemOwner, record_id: str, now: float
) -> Row[Any] | None:
    """Return the row of an owner's response or conversation that has not expired at `now`."""
    if not record_id.isprintable():  # PostgreSQL refuses NUL
        return None
    is_usable = (table.c.expires_at > now, owner.owns(table))
    query = select(table).where(table.c.id == record_id, *is_usable)
    return connection.execute(query).one_or_none()


def insert_items(
    connection: Connection,
    owner: ItemOwner,
    parent: str,
    items: Iterable[Item],
    *,
    start: int,
    is_output: bool = False,
) -> None:
    """Insert items of a response or conversation from the position `start` on. Each item has an id."""
    rows = [
        {
            "parent": parent,
            "position": position,
            **owner._asdict(),
            "item": item["id"],
            "is_output": is_output,
            "body": msgspec.json.encode(item),
        }
        for position, item in enumerate(items, start)
    ]
    if rows:
        connection.execute(insert(schema.items), rows)


def read_items(
    connection: Connection,
    parent: str,
    *,
    is_output: bool | None = None,
    after: str | None = None,
    limit: int = ALL_ITEMS,
    is_descending: bool = False,
) -> list[Item]:
    """Read the items of a response or conversation in their order, or only its input or output.

    No item follows one, `after`, that does not exist.
    """
    position = _columns.position
    query = select(_columns.body).where(_columns.parent == parent)
    if is_output is not None:
        query = query.where(_columns.is_output == is_output)
    if after is not None:
        if not after.isprintable():  # PostgreSQL refuses NUL
            return []
        same = and_(_columns.parent == parent, _columns.item == after)
        start = select(func.max(position)).where(same).scalar_subquery()
        query = query.where(position < start if is_descending else position > start)
    query = query.order_by(position.desc() if is_descending else position).limit(limit)
    return decode_items(connection.execute(query).scalars())


def decode_items(bodies: Iterable[bytes]) -> list[Item]:
    """Decode the bodies of rows."""
    return [msgspec.json.decode(bytes(body), type=Item) for body in bodies]


def check_history_size(connection: Connection, parents: Collection[str]) -> None:
    """Raise HistoryTooLongError if responses or a conversation have too many items for one request."""
    query = select(func.count(), func.sum(func.length(_columns.body)))
    count, size_bytes = connection.execute(query.where(_columns.parent.in_(parents))).one()
    if count > MAX_HISTORY_ITEMS or (size_bytes or 0) > MAX_HISTORY_BYTES:
        raise HistoryTooLongError(
            f"The conversation has {count} items with {size_bytes} bytes, and at most {MAX_HISTORY_ITEMS} items with "
            f"{MAX_HISTORY_BYTES} bytes can be continued. Compact it, or start a new one."
        )


def next_position(connection: Connection, parent: str) -> int:
    """Return the position after the last item."""
    last = select(func.max(_columns.position)).where(_columns.parent == parent)
    position = connection.execute(last).scalar_one_or_none()
    return 0 if position is None else position + 1


def find_items(
    connection: Connection, owner: ItemOwner, item_ids: Collection[str]
) -> dict[str, Item]:
    """Return the owner's items with these ids, by id. Of several items with one id, any one is returned."""
    ids = [item_id for item_id in item_ids if item_id.isprintable()]  # PostgreSQL refuses NUL
    query = select(_columns.body).where(_columns.item.in_(ids), owner.owns(schema.items))
    return {item["id"]: item for item in decode_items(connection.execute(query).scalars())}


def delete_with_items(connection: Connection, table: Table, ids: Sequence[str]) -> None:
    """Delete responses or conversations, with all their items."""
    connection.execute(delete(schema.items).where(_columns.parent.in_(ids)))
    connection.execute(delete(table).where(table.c.id.in_(ids)))


def delete_expired(database: Database, table: Table, now: float) -> int:
    """Delete a batch of expired responses or conversations. Returns their number, 0 if no more have expired."""
    expired = select(table.c.id).where(table.c.expires_at <= now).limit(_DELETION_BATCH_ROWS)
    with database.write_transaction() as connection:
        ids = list(connection.execute(expired).scalars())
        delete_with_items(connection, table, ids)
    return len(ids)
