"""Rows of the table `items`, which responses and conversations share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
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
from argosy.store.stored_bytes import ROW_OVERHEAD_BYTES, ItemOwner, StoredBytes, count_bytes

Item = dict[str, Any]
"""Input or output item of the Responses API."""
ItemRow = dict[str, Any]
"""Row of the table `items`, or of one with responses or conversations."""
ALL_ITEMS = 2**31
MAX_HISTORY_ITEMS = 20_000
MAX_HISTORY_BYTES = 64 * 1024 * 1024
MAX_ITEM_BYTES = 32 * 1024 * 1024
MAX_PAGE_BYTES = 8 * 1024 * 1024
"""Bytes of items after which a page ends early, since it is encoded at once."""
DELETION_BATCH_ROWS = 500
_columns = schema.items.c


def find_row(
    connection: Connection,
    table: Table,
    owner: ItemOwner,
    record_id: str,
    now: float,
    *,
    is_locked: bool = False,
) -> Row[Any] | None:
    """Return the row of an owner's response or conversation that has not expired at `now`.

    Every change of a record or of its items locks its row first, so that the change is decided on the row as it is.
    """
    if not record_id.isprintable():  # PostgreSQL refuses NUL
        return None
    is_usable = (table.c.expires_at > now, owner.owns(table))
    query = select(table).where(table.c.id == record_id, *is_usable)
    if is_locked:
        query = query.with_for_update()
    return connection.execute(query).one_or_none()


def build_item_rows(
    owner: ItemOwner, parent: str, items: Iterable[Item], *, start: int, is_output: bool = False
) -> list[ItemRow]:
    """Return the rows of items of a response or conversation from the position `start` on. Each item has an id.

    Raises:
        HistoryTooLongError: An item is too long.
    """
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
    for row in rows:
        if len(row["body"]) > MAX_ITEM_BYTES:
            raise HistoryTooLongError(
                f"An item has {len(row['body'])} bytes, and at most {MAX_ITEM_BYTES} bytes can be stored."
            )
    return rows


def insert_items(
    connection: Connection, stored_bytes: StoredBytes, owner: ItemOwner, rows: Sequence[ItemRow]
) -> None:
    """Insert rows of items within the owner's bound of bytes."""
    if rows:
        stored_bytes.add(connection, owner, sum(map(count_bytes, rows)))
        connection.execute(insert(schema.items), rows)


def insert_record(
    connection: Connection,
    stored_bytes: StoredBytes,
    table: Table,
    owner: ItemOwner,
    record: ItemRow,
    rows: Sequence[ItemRow],
) -> None:
    """Insert a response or conversation with its items within the owner's bound of bytes."""
    stored_bytes.add(connection, owner, sum(map(count_bytes, [record, *rows])))
    connection.execute(insert(table), record)
    if rows:
        connection.execute(insert(schema.items), rows)


def read_items(connection: Connection, parent: str, *, is_output: bool | None = None) -> list[Item]:
    """Read the items of a response or conversation in their order, or only its input or output."""
    query = select(_columns.body).where(_columns.parent == parent).order_by(_columns.position)
    if is_output is not None:
        query = query.where(_columns.is_output == is_output)
    return decode_items(connection.execute(query).scalars())


def read_page(
    connection: Connection,
    parent: str,
    *,
    is_output: bool | None = None,
    after: str | None = None,
    limit: int = ALL_ITEMS,
    is_descending: bool = False,
) -> tuple[list[Item], bool]:
    """Read a page of the items of a response or conversation, and whether there are more.

    No item follows one, `after`, that does not exist. A page has at least one item, and ends early at `MAX_PAGE_BYTES`.
    """
    position = _columns.position
    where = [_columns.parent == parent]
    if is_output is not None:
        where.append(_columns.is_output == is_output)
    if after is not None:
        if not after.isprintable():  # PostgreSQL refuses NUL
            return [], False
        same = and_(_columns.parent == parent, _columns.item == after)
        start = select(func.max(position)).where(same).scalar_subquery()
        where.append(position < start if is_descending else position > start)
    order = position.desc() if is_descending else position
    sizes = select(position, func.length(_columns.body)).where(*where).order_by(order)
    rows = connection.execute(sizes.limit(limit + 1)).all()
    ends = accumulate(size for _, size in rows)
    count = min(limit, len(rows), max(1, sum(end <= MAX_PAGE_BYTES for end in ends)))
    if not count:
        return [], False
    last = rows[count - 1].position
    where.append(position >= last if is_descending else position <= last)
    bodies = connection.execute(select(_columns.body).where(*where).order_by(order)).scalars()
    return decode_items(bodies), len(rows) > count


def decode_items(bodies: Iterable[bytes]) -> list[Item]:
    """Decode the bodies of rows."""
    return [msgspec.json.decode(bytes(body), type=Item) for body in bodies]


def check_history_size(connection: Connection, condition: ColumnElement[bool]) -> None:
    """Raise HistoryTooLongError if too many items for one request fulfil a condition."""
    query = select(func.count(), func.sum(func.length(_columns.body)))
    count, size_bytes = connection.execute(query.where(condition)).one()
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
    """Return the owner's items with these ids, by id. Of several items with one id, any one is returned.

    Raises:
        HistoryTooLongError: There are too many items for one request.
    """
    ids = [item_id for item_id in item_ids if item_id.isprintable()]  # PostgreSQL refuses NUL
    condition = and_(_columns.item.in_(ids), owner.owns(schema.items))
    check_history_size(connection, condition)
    query = select(_columns.body).where(condition)
    return {item["id"]: item for item in decode_items(connection.execute(query).scalars())}


def delete_with_items(
    connection: Connection, stored_bytes: StoredBytes, table: Table, ids: Sequence[str]
) -> None:
    """Delete responses or conversations, whose rows are locked, with all their items."""
    freed: defaultdict[ItemOwner, int] = defaultdict(int)
    is_item = _columns.parent.in_(ids)
    owners = _columns.organisation, _columns.owner
    size = func.sum(func.length(_columns.body) + ROW_OVERHEAD_BYTES)
    for organisation, owner, freed_bytes in (
        *connection.execute(
            delete(table)
            .where(table.c.id.in_(ids))
            .returning(
                table.c.organisation,
                table.c.owner,
                func.length(table.c.body) + ROW_OVERHEAD_BYTES,
            )
        ),
        *connection.execute(select(*owners, size).where(is_item).group_by(*owners)),
    ):
        freed[ItemOwner(organisation, owner)] -= int(freed_bytes)
    connection.execute(delete(schema.items).where(is_item))
    stored_bytes.change(connection, freed)


def delete_expired(database: Database, stored_bytes: StoredBytes, table: Table, now: float) -> int:
    """Delete a batch of expired responses or conversations. Returns their number, 0 if no more have expired."""
    expired = select(table.c.id).where(table.c.expires_at <= now).limit(DELETION_BATCH_ROWS)
    with database.write_transaction() as connection:
        ids = list(connection.execute(expired.with_for_update(skip_locked=True)).scalars())
        delete_with_items(connection, stored_bytes, table, ids)
    return len(ids)
