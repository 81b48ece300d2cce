"""Stored responses of the Responses API: their history by previous responses, background runs, expiry, deletion."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, literal, select, tuple_, update

from argosy.store import schema
from argosy.store.database import Database
from argosy.store.errors import HistoryTooLongError, NotFoundError
from argosy.store.item_table import (
    ALL_ITEMS,
    MAX_PAGE_BYTES,
    Item,
    build_item_rows,
    check_history_size,
    decode_items,
    delete_expired,
    delete_with_items,
    find_items,
    find_row,
    insert_items,
    insert_record,
    next_position,
    read_items,
    read_page,
)
from argosy.store.stored_bytes import ItemOwner, StoredBytes

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
RUNNING_STATUSES: tuple[ResponseStatus, ...] = ("queued", "in_progress")
HEARTBEAT_TIMEOUT_S = 60.0
"""Time after its last heartbeat after which a background response counts as interrupted."""
INTERRUPTED_ERROR = {
    "code": "server_error",
    "message": "The gateway that ran the response has stopped. Send the request again.",
}
MAX_LISTED_RECORDS = 10_000
"""Most records that are compared for one page."""
_LISTED_AT_ONCE = 20
_responses = schema.responses.c


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response with its input and output."""

    id: str
    status: ResponseStatus
    previous: str | None = None
    """Id of the response that it continues."""
    body: dict[str, Any]
    """The response as the client sees it, without output."""
    input: Sequence[Item] = ()
    """New input items. Those of previous responses are theirs."""
    output: Sequence[Item] = ()
    is_background: bool = False
    """Whether the response runs without the client's connection, so that heartbeats are recorded."""

    def render(self) -> dict[str, Any]:
        """Return the response as the client sees it."""
        return {**self.body, "status": self.status, "output": self.output}


class ResponseStore:
    """Responses by tenant. Every call may block on the database.

    Methods that take an id raise NotFoundError if the owner has no such response, or if it has expired. Methods that
    store items raise StorageQuotaError beyond the owner's bound.
    """

    def __init__(
        self, database: Database, clock: Callable[[], float], stored_bytes: StoredBytes
    ) -> None:
        self._database = database
        self._clock = clock
        self._stored_bytes = stored_bytes

    def create(self, owner: ItemOwner, response: StoredResponse, retention_s: float) -> None:
        """Store a new response, which expires `retention_s` after it was created or last continued."""
        now = self._clock()
        row = {
            "id": response.id,
            **owner._asdict(),
            "created_at": now,
            "expires_at": now + retention_s,
            "status": response.status,
            "previous": response.previous,
            "body": msgspec.json.encode(response.body),
            "heartbeat_at": now if response.is_background else None,
        }
        input_rows = build_item_rows(owner, response.id, response.input, start=0)
        output_rows = build_item_rows(
            owner, response.id, response.output, start=len(response.input), is_output=True
        )
        rows = [*input_rows, *output_rows]
        with self._database.write_transaction() as connection:
            insert_record(connection, self._stored_bytes, schema.responses, owner, row, rows)

    def get(self, owner: ItemOwner, response_id: str) -> StoredResponse:
        """Return a response with its output, and without its input."""
        with self._database.read_transaction() as connection:
            return self._read(connection, owner, response_id)

    def list_input(
        self,
        owner: ItemOwner,
        response_id: str,
        *,
        after: str | None = None,
        limit: int = ALL_ITEMS,
        is_descending: bool = False,
    ) -> tuple[list[Item], bool]:
        """Return a page of the input items of a response, and whether there are more."""
        with self._database.read_transaction() as connection:
            self._require(connection, owner, response_id)
            return read_page(
                connection,
                response_id,
                is_output=False,
                after=after,
                limit=limit,
                is_descending=is_descending,
            )

    def list_bodies(
        self,
        owner: ItemOwner,
        id_prefix: str,
        *,
        matches: Callable[[dict[str, Any]], bool],
        after: str | None = None,
        limit: int,
        is_descending: bool = False,
    ) -> tuple[list[dict[str, Any]], bool]:
        """Return a page of the records whose ids have a prefix, by their creation, and whether there are more.

        Args:
            owner: Their owner.
            id_prefix: Beginning of their ids.
            matches: Returns whether a body is listed.
            after: Id of the record after which the page starts.
            limit: Most records of the page, which also ends early at `MAX_PAGE_BYTES`.
            is_descending: Whether the latest record is the first.

        Raises:
            HistoryTooLongError: None of very many records is listed.
        """
        where = [
            owner.owns(schema.responses),
            _responses.expires_at > self._clock(),
            _responses.id.startswith(id_prefix, autoescape=True),
        ]
        place = tuple_(_responses.created_at, _responses.id)
        listed: list[dict[str, Any]] = []
        with self._database.read_transaction() as connection:
            if after is not None:
                row = find_row(connection, schema.responses, owner, after, self._clock())
                if row is None:
                    raise _not_found(after)
                start = tuple_(literal(row.created_at), literal(row.id))
                where.append(place < start if is_descending else place > start)
            order = [column.desc() if is_descending else column for column in place.clauses]
            query = select(_responses.body).where(*where).order_by(*order)
            rows = connection.execution_options(yield_per=_LISTED_AT_ONCE).execute(query).scalars()
            size = 0
            for count, body in enumerate(rows):
                if count == MAX_LISTED_RECORDS:
                    raise HistoryTooLongError(
                        f"{count} records were compared and not enough fit. Continue with 'after', or filter less."
                    )
                decoded = msgspec.json.decode(bytes(body), type=dict[str, Any])
                if not matches(decoded):
                    continue
                size += len(body)
                if len(listed) == limit or (listed and size > MAX_PAGE_BYTES):
                    return listed, True
                listed.append(decoded)
        return listed, False

    def set_metadata(
        self, owner: ItemOwner, response_id: str, metadata: Mapping[str, str]
    ) -> dict[str, Any]:
        """Replace the metadata in the body of a record. Returns the body."""
        with self._database.write_transaction() as connection:
            row = self._require(connection, owner, response_id, is_locked=True)
            body = msgspec.json.decode(bytes(row.body), type=dict[str, Any])
            body["metadata"] = dict(metadata)
            encoded = msgspec.json.encode(body)
            self._stored_bytes.add(connection, owner, len(encoded) - len(row.body))
            connection.execute(
                update(schema.responses).where(_responses.id == response_id).values(body=encoded)
            )
        return body

    def load_history(self, owner: ItemOwner, response_id: str, retention_s: float) -> list[Item]:
        """Return all items of a response and of those that it continues, oldest first, and keep them for longer.

        Raises:
            NotFoundError: One of the responses does not exist any more.
            HistoryTooLongError: The responses have too many items for one request.
        """
        _check_id(response_id)
        chain = _select_chain(owner, response_id, self._clock())
        with self._database.write_transaction() as connection:
            rows = connection.execute(select(chain.c.id, chain.c.previous)).all()
            ids = {row.id for row in rows}
            for wanted in (response_id, *(row.previous for row in rows)):
                if wanted is not None and wanted not in ids:
                    raise _not_found(wanted)
            check_history_size(connection, schema.items.c.parent.in_(ids))
            items = schema.items.c
            query = (
                select(items.body)
                .join_from(chain, schema.items, items.parent == chain.c.id)
                .order_by(chain.c.depth.desc(), items.position)
            )
            history = decode_items(connection.execute(query).scalars())
            expires_at = self._clock() + retention_s
            connection.execute(
                update(schema.responses).where(_responses.id.in_(ids)).values(expires_at=expires_at)
            )
        return history

    def find_items(self, owner: ItemOwner, item_ids: Collection[str]) -> Mapping[str, Item]:
        """Return stored items of responses and conversations by their ids."""
        with self._database.read_transaction() as connection:
            return find_items(connection, owner, item_ids)

    def delete(self, owner: ItemOwner, response_id: str) -> None:
        """Delete a response with its items. Responses that continue it cannot be continued any more."""
        with self._database.write_transaction() as connection:
            self._require(connection, owner, response_id, is_locked=True)
            delete_with_items(connection, self._stored_bytes, schema.responses, [response_id])

    def delete_expired(self) -> int:
        """Delete a batch of expired responses. Returns their number, 0 if no more have expired."""
        return delete_expired(self._database, self._stored_bytes, schema.responses, self._clock())

    # --- background ------------------------------------------------------------------------------

    def finish(
        self,
        owner: ItemOwner,
        response_id: str,
        status: ResponseStatus,
        body: Mapping[str, Any],
        output: Sequence[Item],
    ) -> bool:
        """Complete a background response.

        Returns:
            Whether it was stored. False if the response was cancelled or deleted meanwhile.
        """
        encoded = msgspec.json.encode(body)
        running = select(schema.responses).where(*_is_running(owner, response_id))
        with self._database.write_transaction() as connection:
            row = connection.execute(running.with_for_update()).one_or_none()
            if row is None:
                return False
            connection.execute(
                update(schema.responses)
                .where(_responses.id == response_id)
                .values(status=status, body=encoded, heartbeat_at=None)
            )
            self._stored_bytes.change(connection, {owner: len(encoded) - len(row.body)})
            start = next_position(connection, response_id)
            rows = build_item_rows(owner, response_id, output, start=start, is_output=True)
            insert_items(connection, self._stored_bytes, owner, rows)
        return True

    def cancel(self, owner: ItemOwner, response_id: str) -> StoredResponse:
        """Cancel a background response if it runs, and return it."""
        _check_id(response_id)
        with self._database.write_transaction() as connection:
            connection.execute(
                update(schema.responses)
                .where(*_is_running(owner, response_id))
                .values(status="cancelled", heartbeat_at=None)
            )
            return self._read(connection, owner, response_id)

    def record_heartbeats(self, response_ids: Collection[str]) -> set[str]:
        """Record that background responses run. Returns those that still should."""
        running = (_responses.id.in_(response_ids), _responses.status.in_(RUNNING_STATUSES))
        with self._database.write_transaction() as connection:
            connection.execute(
                update(schema.responses).where(*running).values(heartbeat_at=self._clock())
            )
            return set(connection.execute(select(_responses.id).where(*running)).scalars())

    def fail_interrupted(self) -> int:
        """Fail background responses whose gateway has stopped. Returns their number."""
        is_interrupted = _responses.heartbeat_at < self._clock() - HEARTBEAT_TIMEOUT_S
        with self._database.write_transaction() as connection:
            rows = connection.execute(
                select(schema.responses).where(is_interrupted).with_for_update()
            ).all()
            added: defaultdict[ItemOwner, int] = defaultdict(int)
            for row in rows:
                body = msgspec.json.encode(
                    msgspec.json.decode(bytes(row.body)) | {"error": INTERRUPTED_ERROR}
                )
                added[ItemOwner(row.organisation, row.owner)] += len(body) - len(row.body)
                connection.execute(
                    update(schema.responses)
                    .where(_responses.id == row.id)
                    .values(status="failed", body=body, heartbeat_at=None)
                )
            self._stored_bytes.change(connection, added)
        return len(rows)

    # --- queries ---------------------------------------------------------------------------------

    def _read(self, connection: Connection, owner: ItemOwner, response_id: str) -> StoredResponse:
        row = self._require(connection, owner, response_id)
        return StoredResponse(
            id=row.id,
            status=row.status,
            previous=row.previous,
            body=msgspec.json.decode(bytes(row.body)),
            output=read_items(connection, response_id, is_output=True),
            is_background=row.heartbeat_at is not None,
        )

    def _require(
        self, connection: Connection, owner: ItemOwner, response_id: str, *, is_locked: bool = False
    ) -> Row[Any]:
        """Return the row of a response."""
        row = find_row(
            *(connection, schema.responses, owner, response_id, self._clock()), is_locked=is_locked
        )
        if row is None:
            raise _not_found(response_id)
        return row


def _select_chain(owner: ItemOwner, response_id: str, now: float) -> Any:  # noqa: ANN401 - a common table expression
    """Return a query for a response and those that it continues, by their distance `depth`."""
    table = schema.responses.alias()
    is_usable = (owner.owns(schema.responses), _responses.expires_at > now)
    chain = (
        select(_responses.id, _responses.previous, literal(0).label("depth"))
        .where(_responses.id == response_id, *is_usable)
        .cte("chain", recursive=True)
    )
    is_previous = (table.c.id == chain.c.previous, table.c.expires_at > now, owner.owns(table))
    return chain.union_all(
        select(table.c.id, table.c.previous, chain.c.depth + 1).where(*is_previous)
    )


def _is_running(owner: ItemOwner, response_id: str) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions that a row is this background response, and that it runs."""
    return (
        _responses.id == response_id,
        _responses.status.in_(RUNNING_STATUSES),
        owner.owns(schema.responses),
    )


def _check_id(response_id: str) -> None:
    """Raise NotFoundError for an id that no response has. PostgreSQL refuses texts with NUL."""
    if not response_id.isprintable():
        raise _not_found(response_id)


def _not_found(response_id: str) -> NotFoundError:
    return NotFoundError(
        f"The response {response_id[:200]!r} is not stored. It was created without 'store', was deleted or has expired."
    )
