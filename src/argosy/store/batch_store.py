"""Batches and their lines: a durable queue, whose lines gateways claim, answer and end exactly once.

A claim names its holder, which is a gateway, and gets the next number of the line's fence. Only the holder of the last
claim can end a line. One transaction writes its result, the counts of the batch and the row of the ledger. So a line
that is answered twice counts once. `HolderMonitor` finds holders that have stopped, and their claims are
released.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    and_,
    delete,
    func,
    insert,
    literal,
    or_,
    select,
    tuple_,
    update,
)

from argosy.protocol import NO_TOKENS, TokenUsage
from argosy.store import schema
from argosy.store.database import Database, conflict_aware_insert
from argosy.store.errors import ConflictError, NotFoundError
from argosy.store.file_store import FileStore, WrittenBlob
from argosy.store.item_table import find_row
from argosy.store.ledger import DAY_S, insert_records
from argosy.store.records import UsageRecord
from argosy.store.stored_bytes import ROW_OVERHEAD_BYTES, ItemOwner, StoredBytes

BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
LineState = Literal["queued", "running", "answered", "cancelled", "expired"]
OPEN_STATUSES: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing", "cancelling")
ENDED_STATUSES: tuple[BatchStatus, ...] = ("failed", "completed", "expired", "cancelled")
MAX_OPEN_BATCHES = 100
"""Batches of one owner that may be open at the same time."""
MAX_LINES = 100_000
RETENTION_S = 30 * DAY_S
"""How long an ended batch and its results are kept after it was created."""
LAPSE_AFTER_S = 45.0
"""Time without a heartbeat of a holder after which its claims lapse. Gateways have one every 15 s."""
RESULT_PAGE_BYTES = 4 << 20
_batches, _lines = schema.batches.c, schema.batch_lines.c
_OPEN_LINES: tuple[LineState, ...] = ("queued", "running")


class BatchError(msgspec.Struct, frozen=True, omit_defaults=True):
    """Error of a batch's input."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchDetails(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts about a batch that no query needs, kept as JSON. Times are seconds since the epoch."""

    path: str
    """Path of the API to which the lines are requests."""
    key: str = ""
    """Id of the API key that created the batch. Empty without one."""
    user: str = ""
    request_digest: str = ""
    """Digest of the request that created it, which a repeated one with the same idempotency key must have."""
    models: tuple[str, ...] = ()
    """Models that the lines name, each once."""
    completion_window: str = "24h"
    input_file: str = ""
    output_file: str = ""
    error_file: str = ""
    output_expires_after_s: int | None = None
    metadata: dict[str, str] | None = None
    errors: tuple[BatchError, ...] = ()
    in_progress_at: float | None = None
    finalizing_at: float | None = None
    cancelling_at: float | None = None
    ended_at: float | None = None


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch with the counts of its lines."""

    id: str
    organisation: str
    owner: str
    created_at: float
    expires_at: float
    """End of the completion window."""
    status: BatchStatus
    total: int = 0
    completed: int = 0
    failed: int = 0
    """Lines whose response is an error."""
    closed: int = 0
    """Lines that were cancelled or have expired."""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    bytes: int = 0
    fence: int = 0
    details: BatchDetails

    @property
    def num_open(self) -> int:
        """Lines that have not ended."""
        return self.total - self.completed - self.failed - self.closed


class BatchLine(NamedTuple):
    """Request of a batch."""

    line: int
    """Number of the line, from 0."""
    custom_id: str
    model: str
    body: bytes


class ClaimedLine(NamedTuple):
    """Line that a gateway has claimed."""

    batch: str
    line: int
    fence: int
    attempts: int
    """Claims that have reached a replica, with this one."""
    body: bytes


class LineResult(NamedTuple):
    """Response to a claimed line, with its row of the ledger."""

    claimed: ClaimedLine
    status_code: int
    body: bytes
    record: UsageRecord | None


class EndedLine(NamedTuple):
    """Line that has ended."""

    line: int
    custom_id: str
    state: LineState
    status_code: int | None
    body: bytes | None


class BatchStore:
    """Batches by owner, and claims of gateways. Every call may block on the database.

    Methods that take an id raise NotFoundError if the owner has no such batch.
    """

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float],
        stored_bytes: StoredBytes,
        files: FileStore,
    ) -> None:
        self._database = database
        self._clock = clock
        self._stored_bytes = stored_bytes
        self._files = files

    # --- owners ----------------------------------------------------------------------------------

    def create(self, batch: Batch, lines: Sequence[BatchLine] = ()) -> Batch:
        """Store a new batch, or return the stored one with the same id.

        Lines that are given belong to a batch in progress. Otherwise they follow by `add_lines`. The input file is held
        until the batch ends.

        Raises:
            NotFoundError: The owner has no such input file.
            ConflictError: The owner has `MAX_OPEN_BATCHES` open batches.
            StorageQuotaError: The owner would store too many bytes.
        """
        owner = ItemOwner(batch.organisation, batch.owner)
        with self._database.write_transaction() as connection:
            values = _to_row(batch) | {"total": len(lines), "bytes": 0}
            statement = conflict_aware_insert(connection, schema.batches).values(values)
            inserted = connection.execute(
                statement.on_conflict_do_nothing(index_elements=["id"]).returning(_batches.id)
            ).one_or_none()
            if inserted is None:
                return _to_batch(self._require(connection, owner, batch.id))
            is_open = and_(owner.owns(schema.batches), _batches.status.in_(OPEN_STATUSES))
            count = connection.execute(select(func.count()).where(is_open)).scalar_one()
            if batch.details.input_file:
                self._files.hold(connection, owner, batch.details.input_file)
            if count > MAX_OPEN_BATCHES:
                raise ConflictError(
                    f"The project has {MAX_OPEN_BATCHES} batches that have not ended. Wait until one has, or cancel"
                    " one."
                )
            self._insert_lines(connection, batch, lines)
            return _to_batch(self._require(connection, owner, batch.id))

    def get(self, owner: ItemOwner, batch_id: str) -> Batch:
        """Return a batch."""
        with self._database.read_transaction() as connection:
            return _to_batch(self._require(connection, owner, batch_id))

    def list_page(
        self,
        owner: ItemOwner | None,
        prefix: str,
        limit: int,
        *,
        after: str | None = None,
        before: str | None = None,
    ) -> tuple[list[Batch], bool]:
        """Return batches whose ids have a prefix, the latest first, and whether there are more.

        Args:
            owner: Owner of the batches; None for all batches, without a position.
            prefix: Beginning of their ids.
            limit: Most batches of the page.
            after: Id of the batch after which the page starts.
            before: Id of the batch before which the page ends, in place of `after`.
        """
        place = tuple_(_batches.created_at, _batches.id)
        where = [_batches.id.startswith(prefix, autoescape=True)]
        if owner is not None:
            where.append(owner.owns(schema.batches))
        is_descending = before is None
        with self._database.read_transaction() as connection:
            if owner is not None and (mark := after or before) is not None:
                row = self._require(connection, owner, mark)
                start = tuple_(literal(row.created_at), literal(row.id))
                where.append(place < start if is_descending else place > start)
            order = [each.desc() if is_descending else each for each in place.clauses]
            query = select(schema.batches).where(*where).order_by(*order).limit(limit + 1)
            batches = [_to_batch(row) for row in connection.execute(query)]
        page = batches[:limit]
        return page if is_descending else page[::-1], len(batches) > limit

    def cancel(self, owner: ItemOwner, batch_id: str) -> Batch:
        """Cancel a batch: its open lines end at once, and it waits for its end. A second call changes nothing.

        Raises:
            ConflictError: The batch has ended.
        """
        now = self._clock()
        with self._database.write_transaction() as connection:
            batch = _to_batch(self._require(connection, owner, batch_id, is_locked=True))
            if batch.status in ENDED_STATUSES:
                raise ConflictError(f"The batch is {batch.status}, so it cannot be cancelled.")
            if batch.status in {"validating", "in_progress"}:
                details = msgspec.structs.replace(batch.details, cancelling_at=now)
                self._close_lines(connection, batch.id, "cancelled")
                # Another claim, so that the gateway that validates it writes nothing more.
                _set(
                    *(connection, batch.id),
                    status="cancelling",
                    holder="",
                    fence=batch.fence + 1,
                    body=msgspec.json.encode(details),
                )
            return _to_batch(self._require(connection, owner, batch_id))

    def delete(self, owner: ItemOwner, batch_id: str) -> None:
        """Delete a batch that has ended.

        Raises:
            ConflictError: It has not ended.
        """
        with self._database.write_transaction() as connection:
            batch = _to_batch(self._require(connection, owner, batch_id, is_locked=True))
            if batch.status not in ENDED_STATUSES:
                raise ConflictError("The batch has not ended. Cancel it first.")
            self._delete(connection, [batch])

    def read_results(self, batch_id: str, start: int) -> list[EndedLine]:
        """Return lines of an ended batch from the number `start` on, about `RESULT_PAGE_BYTES`; none after the last."""
        columns = _lines.line, _lines.custom_id, _lines.state, _lines.status_code
        is_next = and_(_lines.batch == batch_id, _lines.line >= start)
        sizes = select(_lines.line, func.length(_lines.result)).where(is_next)
        with self._database.read_transaction() as connection:
            last, size = start - 1, 0
            for line, length in connection.execute(sizes.order_by(_lines.line).limit(1000)):
                size += length or 0
                if last >= start and size > RESULT_PAGE_BYTES:
                    break
                last = line
            query = select(*columns, _lines.result).where(is_next, _lines.line <= last)
            return [
                EndedLine(*row[:-1], None if row.result is None else bytes(row.result))
                for row in connection.execute(query.order_by(_lines.line))
            ]

    # --- lines -----------------------------------------------------------------------------------

    def list_work(self) -> list[tuple[Batch, dict[str, int]]]:
        """Return the batches in progress, each with the number of its waiting lines by model."""
        is_running = _batches.status == "in_progress"
        counts = (
            select(_lines.batch, _lines.model, func.count())
            .join(schema.batches, _batches.id == _lines.batch)
            .where(is_running, _lines.state == "queued")
            .group_by(_lines.batch, _lines.model)
        )
        queued: defaultdict[str, dict[str, int]] = defaultdict(dict)
        with self._database.read_transaction() as connection:
            batches = [
                _to_batch(row)
                for row in connection.execute(
                    select(schema.batches).where(is_running).order_by(_batches.created_at)
                )
            ]
            if batches:
                for batch, model, count in connection.execute(counts):
                    queued[batch][model] = count
        return [(batch, queued[batch.id]) for batch in batches]

    def claim_lines(self, holder: str, batch_id: str, model: str, limit: int) -> list[ClaimedLine]:
        """Claim waiting lines of a batch for a model, in their order."""
        waiting = (
            select(_lines.line)
            .where(_lines.batch == batch_id, _lines.state == "queued", _lines.model == model)
            .order_by(_lines.line)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        with self._database.write_transaction() as connection:
            numbers = list(connection.execute(waiting).scalars())
            rows = connection.execute(
                update(schema.batch_lines)
                .where(_lines.batch == batch_id, _lines.line.in_(numbers))
                .values(
                    state="running",
                    holder=holder,
                    fence=_lines.fence + 1,
                    attempts=_lines.attempts + 1,
                )
                .returning(_lines.line, _lines.fence, _lines.attempts, _lines.body)
            ).all()
        return sorted(
            ClaimedLine(batch_id, row.line, row.fence, row.attempts, bytes(row.body))
            for row in rows
        )

    def release_lines(self, lines: Iterable[tuple[ClaimedLine, bool]]) -> None:
        """Let claimed lines wait again. A line keeps the attempt if it has reached a replica, which comes with it."""
        with self._database.write_transaction() as connection:
            for line, is_attempt in sorted(lines):
                connection.execute(
                    update(schema.batch_lines)
                    .where(*_is_held(line))
                    .values(
                        state="queued", holder="", attempts=_lines.attempts - int(not is_attempt)
                    )
                )

    def commit(self, results: Sequence[LineResult]) -> int:
        """End claimed lines with their responses, count them, and add their rows to the ledger.

        Returns:
            The number of lines that ended. The results of lost claims are thrown away.
        """
        by_batch: defaultdict[str, list[LineResult]] = defaultdict(list)
        for result in sorted(results, key=lambda each: each.claimed[:2]):
            by_batch[result.claimed.batch].append(result)
        records: list[UsageRecord] = []
        count = 0
        with self._database.write_transaction() as connection:
            for batch_id, of_batch in by_batch.items():
                lock = select(_batches.organisation, _batches.owner).where(_batches.id == batch_id)
                owner = connection.execute(lock.with_for_update()).one_or_none()
                ended = [each for each in of_batch if _end_line(connection, each)]
                if owner is None or not ended:
                    continue
                count += len(ended)
                records += [each.record for each in ended if each.record is not None]
                self._count_results(connection, batch_id, ItemOwner(*owner), ended)
            insert_records(connection, records)
        return count

    def _count_results(
        self,
        connection: Connection,
        batch_id: str,
        owner: ItemOwner,
        ended: Sequence[LineResult],
    ) -> None:
        """Add ended lines to the counts of their batch. Their results replace their requests."""
        completed = sum(each.status_code < 300 for each in ended)
        usages = [
            NO_TOKENS
            if each.record is None
            else TokenUsage(
                each.record.input_tokens, each.record.cached_tokens, each.record.output_tokens
            )
            for each in ended
        ]
        added = sum(len(each.body) - len(each.claimed.body) for each in ended)
        _set(
            *(connection, batch_id),
            completed=_batches.completed + completed,
            failed=_batches.failed + len(ended) - completed,
            input_tokens=_batches.input_tokens + sum(each.prompt_tokens for each in usages),
            cached_tokens=_batches.cached_tokens + sum(each.cached_tokens for each in usages),
            output_tokens=_batches.output_tokens + sum(each.output_tokens for each in usages),
            bytes=_batches.bytes + added,
        )
        self._stored_bytes.change(connection, {owner: added})

    # --- claims of batches -----------------------------------------------------------------------

    def claim_batch(self, holder: str, skipped: Collection[str] = ()) -> Batch | None:
        """Claim a batch that has to be validated, or to be finalised since its lines have ended.

        The open lines of a batch whose window is over end here. Returns None if no batch needs work but those whose ids
        are skipped.
        """
        now = self._clock()
        is_over = and_(
            _batches.status == "in_progress",
            or_(
                _batches.completed + _batches.failed + _batches.closed >= _batches.total,
                _batches.expires_at <= now,
            ),
        )
        needs_work = or_(_batches.status.in_(("validating", "finalizing", "cancelling")), is_over)
        query = (
            select(schema.batches)
            .where(_batches.holder == "", needs_work, _batches.id.not_in(skipped))
            .order_by(_batches.created_at)
            .limit(1)
            .with_for_update(skip_locked=True)
        )
        with self._database.read_transaction() as connection:
            if connection.execute(query).one_or_none() is None:
                return None
        with self._database.write_transaction() as connection:
            row = connection.execute(query).one_or_none()
            if row is None:
                return None
            batch = _to_batch(row)
            values: dict[str, Any] = {"holder": holder, "fence": batch.fence + 1}
            if batch.status == "in_progress":
                self._close_lines(connection, batch.id, "expired")
                details = msgspec.structs.replace(batch.details, finalizing_at=now)
                values |= {"status": "finalizing", "body": msgspec.json.encode(details)}
            _set(connection, batch.id, **values)
            claimed = select(schema.batches).where(_batches.id == batch.id)
            return _to_batch(connection.execute(claimed).one())

    def clear_lines(self, claimed: Batch) -> bool:
        """Delete the lines of a claimed batch, before it is validated again. Returns False if the claim is lost."""
        with self._database.write_transaction() as connection:
            batch = self._lock_claimed(connection, claimed)
            if batch is None:
                return False
            self._delete_lines(connection, batch)
            _set(connection, batch.id, total=0, bytes=0)
        return True

    def add_lines(self, claimed: Batch, lines: Sequence[BatchLine]) -> bool:
        """Add lines to a claimed batch that is validated. Returns False if the claim is lost.

        Raises:
            StorageQuotaError: The owner would store too many bytes.
        """
        with self._database.write_transaction() as connection:
            batch = self._lock_claimed(connection, claimed)
            if batch is None:
                return False
            self._insert_lines(connection, batch, lines)
            _set(connection, batch.id, total=batch.total + len(lines))
        return True

    def begin(self, claimed: Batch, models: Collection[str]) -> bool:
        """Let the lines of a claimed batch run, which have been validated. Returns False if the claim is lost."""
        details = msgspec.structs.replace(
            claimed.details, models=tuple(models), in_progress_at=self._clock()
        )
        with self._database.write_transaction() as connection:
            batch = self._lock_claimed(connection, claimed)
            if batch is None:
                return False
            body = msgspec.json.encode(details)
            _set(connection, batch.id, status="in_progress", holder="", body=body)
        return True

    def end(
        self,
        claimed: Batch,
        status: BatchStatus,
        errors: Sequence[BatchError] = (),
        output: WrittenBlob | None = None,
        error_output: WrittenBlob | None = None,
        *,
        keeps_lines: bool = False,
    ) -> bool:
        """End a claimed batch, add its files, and release its input file.

        Args:
            claimed: The batch.
            status: Its last status.
            errors: Errors of its input.
            output: Content of the output file; None for none.
            error_output: Content of the error file; None for none.
            keeps_lines: Whether the results stay in the store.

        Returns:
            Whether the batch has ended. False if the claim is lost.

        Raises:
            StorageQuotaError: The owner would store too many bytes.
        """
        owner = ItemOwner(claimed.organisation, claimed.owner)
        with self._database.write_transaction() as connection:
            batch = self._lock_claimed(connection, claimed)
            if batch is None:
                return False
            details = batch.details
            if not keeps_lines:
                self._delete_lines(connection, batch)
            for name, written in (("output", output), ("error", error_output)):
                if written is not None:
                    self._files.add(
                        *(connection, owner, written),
                        filename=f"{batch.id}_{name}.jsonl",
                        purpose="batch_output",
                        media_type="application/jsonl",
                        lifetime_s=details.output_expires_after_s,
                    )
            if details.input_file:
                self._files.release(connection, details.input_file)
            details = msgspec.structs.replace(
                details,
                errors=tuple(errors),
                output_file="" if output is None else output.file_id,
                error_file="" if error_output is None else error_output.file_id,
                ended_at=self._clock(),
            )
            _set(
                *(connection, batch.id),
                status=status,
                holder="",
                bytes=batch.bytes if keeps_lines else 0,
                body=msgspec.json.encode(details),
            )
        return True

    def release_batch(self, claimed: Batch) -> None:
        """Release the claim on a batch whose work failed, so that it is repeated."""
        with self._database.write_transaction() as connection:
            if self._lock_claimed(connection, claimed) is not None:
                _set(connection, claimed.id, holder="")

    # --- upkeep ----------------------------------------------------------------------------------

    def list_holders(self) -> set[str]:
        """Return the gateways that hold claims."""
        holders: set[str] = set()
        with self._database.read_transaction() as connection:
            for column in (_lines.holder, _batches.holder):
                holders |= set(connection.execute(select(column).distinct()).scalars())
        return holders - {""}

    def release_holder(self, holder: str) -> int:
        """Release all claims of a gateway that has stopped. Returns the number of lines that wait again.

        The claims do not count as attempts, since the end of a gateway is no failure of its lines.
        """
        with self._database.write_transaction() as connection:
            connection.execute(
                update(schema.batches).where(_batches.holder == holder).values(holder="")
            )
            return connection.execute(
                update(schema.batch_lines)
                .where(_lines.holder == holder, _lines.state == "running")
                .values(state="queued", holder="", attempts=_lines.attempts - 1)
            ).rowcount

    def release_unknown(self, holder: str, known: Collection[ClaimedLine]) -> None:
        """Release the lines of a gateway that it does not know of, because the answer to a claim was lost."""
        claims = {(claimed.batch, claimed.line): claimed.fence for claimed in known}
        held = select(_lines.batch, _lines.line, _lines.fence).where(
            _lines.holder == holder, _lines.state == "running"
        )
        with self._database.read_transaction() as connection:
            rows = connection.execute(held).all()
        lost = [
            (ClaimedLine(row.batch, row.line, row.fence, 0, b""), False)
            for row in rows
            if claims.get((row.batch, row.line)) != row.fence
        ]
        if lost:
            self.release_lines(lost)

    def delete_old(self) -> int:
        """Delete some batches that ended and are older than `RETENTION_S`. Returns their number."""
        is_old = and_(
            _batches.created_at < self._clock() - RETENTION_S, _batches.status.in_(ENDED_STATUSES)
        )
        return self._delete_where(is_old)

    def delete_owned(self, owner: ItemOwner) -> int:
        """Delete all batches of an owner, whatever their status. Returns their number."""
        count = 0
        while deleted := self._delete_where(owner.owns(schema.batches)):
            count += deleted
        return count

    # --- parts -----------------------------------------------------------------------------------

    def _require(
        self, connection: Connection, owner: ItemOwner, batch_id: str, *, is_locked: bool = False
    ) -> Row[Any]:
        # The end of the window is no expiry of the record.
        row = find_row(
            *(connection, schema.batches, owner, batch_id, float("-inf")), is_locked=is_locked
        )
        if row is None:
            raise NotFoundError(f"There is no batch {batch_id[:200]!r}.")
        return row

    @staticmethod
    def _lock_claimed(connection: Connection, claimed: Batch) -> Batch | None:
        query = select(schema.batches).where(
            _batches.id == claimed.id, _batches.fence == claimed.fence, _batches.holder != ""
        )
        row = connection.execute(query.with_for_update()).one_or_none()
        return None if row is None else _to_batch(row)

    def _insert_lines(
        self, connection: Connection, batch: Batch, lines: Sequence[BatchLine]
    ) -> None:
        if not lines:
            return
        size = sum(len(line.body) + ROW_OVERHEAD_BYTES for line in lines)
        self._stored_bytes.add(connection, ItemOwner(batch.organisation, batch.owner), size)
        rows = [
            {
                "batch": batch.id,
                **line._asdict(),
                "state": "queued",
                "holder": "",
                "fence": 0,
                "attempts": 0,
            }
            for line in lines
        ]
        connection.execute(insert(schema.batch_lines), rows)
        _set(connection, batch.id, bytes=_batches.bytes + size)

    @staticmethod
    def _close_lines(connection: Connection, batch_id: str, state: LineState) -> None:
        """End the open lines of a batch whose row is locked. Claims of these lines are lost."""
        closed = connection.execute(
            update(schema.batch_lines)
            .where(_lines.batch == batch_id, _lines.state.in_(_OPEN_LINES))
            .values(state=state, holder="")
        ).rowcount
        _set(connection, batch_id, closed=_batches.closed + closed)

    def _delete_where(self, condition: ColumnElement[bool]) -> int:
        query = select(schema.batches).where(condition).limit(10)
        with self._database.write_transaction() as connection:
            rows = connection.execute(query.with_for_update(skip_locked=True)).all()
            self._delete(connection, [_to_batch(row) for row in rows])
        return len(rows)

    def _delete(self, connection: Connection, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self._delete_lines(connection, batch)
        ids = [batch.id for batch in batches]
        connection.execute(delete(schema.batches).where(_batches.id.in_(ids)))

    def _delete_lines(self, connection: Connection, batch: Batch) -> None:
        connection.execute(delete(schema.batch_lines).where(_lines.batch == batch.id))
        owner = ItemOwner(batch.organisation, batch.owner)
        self._stored_bytes.change(connection, {owner: -batch.bytes})


class HolderMonitor:
    """Finds gateways that have stopped, by heartbeats that do not change.

    It compares no clocks of several machines: a holder has stopped if its heartbeat stays the same for
    `LAPSE_AFTER_S` of this process's own clock, or if it has no record.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, lapse_after_s: float = LAPSE_AFTER_S
    ) -> None:
        self._clock = clock
        self._lapse_after_s = lapse_after_s
        self._seen: dict[str, tuple[float | None, float]] = {}
        """Last heartbeat of each holder, and when it was first seen here."""

    def find_stopped(self, holders: Collection[str], heartbeats: Mapping[str, float]) -> list[str]:
        """Return the holders that have stopped.

        Args:
            holders: Gateways that hold claims.
            heartbeats: Last heartbeat of each gateway with a record.
        """
        now, stopped = self._clock(), []
        self._seen = {name: seen for name, seen in self._seen.items() if name in holders}
        for holder in sorted(holders):
            heartbeat = heartbeats.get(holder)
            last, since = self._seen.get(holder, (None, now))
            if holder not in self._seen or heartbeat != last:
                since = now
            self._seen[holder] = heartbeat, since
            if now - since >= self._lapse_after_s:
                stopped.append(holder)
        return stopped


def _set(connection: Connection, batch_id: str, **values: Any) -> None:  # noqa: ANN401 - of any column
    connection.execute(update(schema.batches).where(_batches.id == batch_id).values(**values))


def _is_held(line: ClaimedLine) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions that a claim is the last of its line, and that the line runs."""
    return (
        _lines.batch == line.batch,
        _lines.line == line.line,
        _lines.fence == line.fence,
        _lines.state == "running",
    )


def _end_line(connection: Connection, result: LineResult) -> bool:
    """End a line if the claim still holds."""
    return bool(
        connection.execute(
            update(schema.batch_lines)
            .where(*_is_held(result.claimed))
            .values(
                state="answered",
                holder="",
                body=b"",
                status_code=result.status_code,
                result=result.body,
            )
        ).rowcount
    )


def _to_row(batch: Batch) -> dict[str, Any]:
    row = {name: getattr(batch, name) for name in Batch.__struct_fields__ if name != "details"}
    return row | {"holder": "", "body": msgspec.json.encode(batch.details)}


def _to_batch(row: Row[Any]) -> Batch:
    values = row._asdict()
    del values["holder"]
    body = bytes(values.pop("body"))
    return Batch(**values, details=msgspec.json.decode(body, type=BatchDetails))
