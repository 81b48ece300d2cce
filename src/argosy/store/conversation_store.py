"""Stored conversations of the Responses API: metadata and items, which responses read and extend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, and_, delete, func, select, update

from argosy.store import schema
from argosy.store.api_keys import generate_id
from argosy.store.database import Database
from argosy.store.errors import NotFoundError
from argosy.store.item_table import (
    ALL_ITEMS,
    Item,
    build_item_rows,
    check_history_size,
    delete_expired,
    delete_with_items,
    find_row,
    insert_items,
    insert_record,
    next_position,
    read_items,
    read_page,
)
from argosy.store.stored_bytes import ROW_OVERHEAD_BYTES, ItemOwner, StoredBytes

_conversations = schema.conversations.c


class StoredConversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation without its items."""

    id: str
    created_at: float
    metadata: dict[str, str]


class ConversationStore:
    """Conversations by tenant. Every call may block on the database.

    Methods that take an id raise NotFoundError if the owner has no such conversation, or if it has expired. A
    conversation expires a time after it was last used. Methods that store raise StorageQuotaError beyond the owner's
    bound.
    """

    def __init__(
        self, database: Database, clock: Callable[[], float], stored_bytes: StoredBytes
    ) -> None:
        self._database = database
        self._clock = clock
        self._stored_bytes = stored_bytes

    def create(
        self,
        owner: ItemOwner,
        metadata: Mapping[str, str],
        items: Sequence[Item],
        retention_s: float,
    ) -> StoredConversation:
        """Create a conversation with items."""
        now = self._clock()
        conversation = StoredConversation(
            id=generate_id("conv"), created_at=now, metadata=dict(metadata)
        )
        row = {
            "id": conversation.id,
            **owner._asdict(),
            "created_at": now,
            "expires_at": now + retention_s,
            "body": msgspec.json.encode(metadata),
        }
        rows = build_item_rows(owner, conversation.id, items, start=0)
        with self._database.write_transaction() as connection:
            insert_record(connection, self._stored_bytes, schema.conversations, owner, row, rows)
        return conversation

    def get(self, owner: ItemOwner, conversation_id: str) -> StoredConversation:
        """Return a conversation."""
        with self._database.read_transaction() as connection:
            return _to_conversation(self._require(connection, owner, conversation_id))

    def set_metadata(
        self, owner: ItemOwner, conversation_id: str, metadata: Mapping[str, str]
    ) -> StoredConversation:
        """Replace the metadata."""
        body = msgspec.json.encode(metadata)
        with self._database.write_transaction() as connection:
            row = self._require(connection, owner, conversation_id, is_locked=True)
            self._stored_bytes.add(connection, owner, len(body) - len(row.body))
            connection.execute(
                update(schema.conversations)
                .where(_conversations.id == conversation_id)
                .values(body=body)
            )
        return StoredConversation(id=row.id, created_at=row.created_at, metadata=dict(metadata))

    def delete(self, owner: ItemOwner, conversation_id: str) -> None:
        """Delete a conversation with its items."""
        with self._database.write_transaction() as connection:
            self._require(connection, owner, conversation_id, is_locked=True)
            delete_with_items(
                connection, self._stored_bytes, schema.conversations, [conversation_id]
            )

    def append_items(
        self, owner: ItemOwner, conversation_id: str, items: Sequence[Item], retention_s: float
    ) -> None:
        """Append items, and keep the conversation for longer."""
        with self._database.write_transaction() as connection:
            # The lock gives concurrent appends different positions.
            self._require(connection, owner, conversation_id, is_locked=True)
            connection.execute(
                update(schema.conversations)
                .where(_conversations.id == conversation_id)
                .values(expires_at=self._clock() + retention_s)
            )
            start = next_position(connection, conversation_id)
            rows = build_item_rows(owner, conversation_id, items, start=start)
            insert_items(connection, self._stored_bytes, owner, rows)

    def list_items(
        self,
        owner: ItemOwner,
        conversation_id: str,
        *,
        after: str | None = None,
        limit: int = ALL_ITEMS,
        is_descending: bool = False,
    ) -> tuple[list[Item], bool]:
        """Return a page of the items of a conversation, and whether there are more."""
        with self._database.read_transaction() as connection:
            self._require(connection, owner, conversation_id)
            return read_page(
                connection, conversation_id, after=after, limit=limit, is_descending=is_descending
            )

    def load_history(self, owner: ItemOwner, conversation_id: str) -> list[Item]:
        """Return all items. Raises HistoryTooLongError if there are too many for one request."""
        with self._database.read_transaction() as connection:
            self._require(connection, owner, conversation_id)
            check_history_size(connection, schema.items.c.parent == conversation_id)
            return read_items(connection, conversation_id)

    def get_item(self, owner: ItemOwner, conversation_id: str, item_id: str) -> Item:
        """Return an item. Raises NotFoundError if the conversation has no such item."""
        query = select(schema.items.c.body).where(_is_item(conversation_id, item_id))
        with self._database.read_transaction() as connection:
            self._require(connection, owner, conversation_id)
            body = connection.execute(query).scalars().first()
        if body is None:
            raise _item_not_found(item_id)
        return msgspec.json.decode(bytes(body), type=Item)

    def delete_item(
        self, owner: ItemOwner, conversation_id: str, item_id: str
    ) -> StoredConversation:
        """Delete an item. Raises NotFoundError if the conversation has no such item."""
        is_item, size = _is_item(conversation_id, item_id), func.length(schema.items.c.body)
        with self._database.write_transaction() as connection:
            row = self._require(connection, owner, conversation_id, is_locked=True)
            statement = delete(schema.items).where(is_item).returning(size)
            sizes = connection.execute(statement).scalars().all()
            if not sizes:
                raise _item_not_found(item_id)
            freed = sum(sizes) + ROW_OVERHEAD_BYTES * len(sizes)
            self._stored_bytes.change(connection, {owner: -freed})
        return _to_conversation(row)

    def delete_expired(self) -> int:
        """Delete a batch of expired conversations. Returns their number, 0 if no more have expired."""
        return delete_expired(
            self._database, self._stored_bytes, schema.conversations, self._clock()
        )

    def _require(
        self,
        connection: Connection,
        owner: ItemOwner,
        conversation_id: str,
        *,
        is_locked: bool = False,
    ) -> Row[Any]:
        """Return the row of a conversation."""
        row = find_row(
            *(connection, schema.conversations, owner, conversation_id, self._clock()),
            is_locked=is_locked,
        )
        if row is None:
            raise NotFoundError(
                f"The conversation {conversation_id[:200]!r} does not exist. It was deleted or has expired."
            )
        return row


def _to_conversation(row: Row[Any]) -> StoredConversation:
    return StoredConversation(
        id=row.id,
        created_at=row.created_at,
        metadata=msgspec.json.decode(bytes(row.body), type=dict[str, str]),
    )


def _is_item(conversation_id: str, item_id: str) -> ColumnElement[bool]:
    """Return the condition that a row is this item of a conversation."""
    if not item_id.isprintable():  # PostgreSQL refuses texts with NUL
        raise _item_not_found(item_id)
    return and_(schema.items.c.parent == conversation_id, schema.items.c.item == item_id)


def _item_not_found(item_id: str) -> NotFoundError:
    return NotFoundError(f"The conversation has no item {item_id[:200]!r}.")
