"""Declared fleets: numbered revisions, the lease of the leading controller, its records, and the event log."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, Select, Table, delete, insert, or_, select, update

from argosy.store import schema
from argosy.store.database import Database, conflict_aware_insert
from argosy.store.errors import ConflictError, NotFoundError, StoreError
from argosy.store.numbered_rows import in_time_range
from argosy.store.record_tables import AccountTransaction

IDLE_TIMEOUT_S = 2.0
"""Time between two queries after which PostgreSQL ends a transaction. A leader that is stopped inside one holds the
lock of the fleet, without which no standby can take over."""

MAX_REVISIONS = 1000
"""Latest revisions of a fleet that are kept. A generation of a pool without one of them may get its number again."""
MAX_INSERTED_ROWS = 500
"""Number of rows of one statement, below the limits of both databases for its parameters."""

DECISION = "decision"
"""Kind of the events about what people decided. Their reason names author, force and reason."""

_revisions = schema.fleet_revisions.c
_events = schema.fleet_events.c
_leases = schema.fleet_leases.c
_records = schema.fleet_records.c
_documents = schema.fleet_documents.c


class DeposedError(StoreError):
    """Another controller leads the fleet now. The caller must stop acting for it."""


class PoolGeneration(msgspec.Struct, frozen=True):
    """Version of the replica settings of a pool. Names of replicas contain its number."""

    generation: int
    digest: str
    """Digest of the settings that the replicas' processes depend on."""


class FleetRevision(msgspec.Struct, frozen=True, kw_only=True):
    """A declaration that was applied."""

    number: int
    applied_at: float
    """Seconds since the epoch."""
    author: str
    reason: str = ""
    rollback_of: int | None = None
    """Number of the revision whose declaration this one repeats."""
    declaration: bytes
    """The declaration as JSON."""
    generations: Mapping[str, PoolGeneration]
    """Generation of each pool, by name. Removed pools keep theirs, so that a replica's name never has two versions."""


class FleetEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Entry of a fleet's event log."""

    number: int = 0
    """1, 2, 3, ... The store sets it."""
    at: float = 0.0
    """Seconds since the epoch. The store sets it."""
    epoch: int = 0
    """Epoch of the controller. The store sets it."""
    kind: str
    """Kind of the event, such as `replica_start` or `replica_phase`."""
    pool: str = ""
    replica: str = ""
    reason: str = ""
    """Why, as a sentence."""
    outcome: str = ""
    """`ok`, an error message, the new phase of a replica, or the arithmetic of a scaling decision as JSON."""


class FleetDocument(msgspec.Struct, frozen=True):
    """Document that any process may replace, unless another one did so since it was read."""

    version: int
    """1 or more. A replacement has a larger version."""
    content: bytes
    """The document as JSON."""


class AuditedDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Decision of a person, which events and audit log record in the transaction that carries it out."""

    actor: str
    action: str
    """Kind of the subject and verb, such as `pool.scale`."""
    pool: str = ""
    reason: str
    is_forced: bool = False
    """Whether the person overrode a check."""
    details: Mapping[str, Any] = {}
    """Further fields of the entry in the audit log."""


class FleetLease(msgspec.Struct, frozen=True, kw_only=True):
    """Right of one controller to act for a fleet, as long as it renews it.

    Clocks of machines differ, so a lease has no time of expiry. A standby takes it over once it has seen the same
    `renewals` for as long as the lease lasts.
    """

    fleet: str
    epoch: int
    """Number of the leader: 1, 2, 3, ... Launchers and the store refuse actions with a lower one."""
    holder: str
    renewals: int


class FleetStore:
    """State of declared fleets by name. Every call may block on the database."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    # --- revisions -------------------------------------------------------------------------------

    def apply(
        self,
        fleet: str,
        declaration: bytes,
        digests: Mapping[str, str],
        *,
        author: str,
        reason: str = "",
        rollback_of: int | None = None,
        after: int | None = None,
        action: str = "fleet.apply",
        pool: str = "",
        details: Mapping[str, Any] = {},
        renewed: Collection[str] = (),
    ) -> FleetRevision:
        """Add a revision with a declaration as JSON. Events and audit log record who did so.

        `action`, `pool` and `details` describe the decision, see `AuditedDecision`.
        `digests` are those of the replica settings of each declared pool. One that the pool never had is a new
        generation. `renewed` pools get a new one for the same settings, so that all their replicas are replaced.
        Raises ConflictError unless the author has seen the latest revision as `after` (0: none). None replaces any.
        """
        with self._write_transaction() as connection:
            _lock(connection, fleet)
            latest = self._read_latest(connection, fleet)
            number = latest.number if latest else 0
            if after not in {None, number}:
                raise ConflictError(
                    f"Revision {number} of the fleet {fleet!r} was applied meanwhile. Look at `argosy diff` and repeat."
                )
            revision = FleetRevision(
                number=number + 1,
                applied_at=self._clock(),
                author=author,
                reason=reason,
                rollback_of=rollback_of,
                declaration=declaration,
                generations=self._advance_generations(connection, latest, fleet, digests, renewed),
            )
            row = msgspec.structs.asdict(revision) | {
                "fleet": fleet,
                "generations": msgspec.json.encode(revision.generations),
            }
            connection.execute(insert(schema.fleet_revisions), row)
            too_old = _revisions.number <= revision.number - MAX_REVISIONS
            connection.execute(
                delete(schema.fleet_revisions).where(_revisions.fleet == fleet, too_old)
            )
            decision = AuditedDecision(
                actor=author, action=action, pool=pool, reason=reason, details=details
            )
            self._record(connection, fleet, decision)
        return revision

    @staticmethod
    def _advance_generations(
        connection: Connection,
        latest: FleetRevision | None,
        fleet: str,
        digests: Mapping[str, str],
        renewed: Collection[str],
    ) -> dict[str, PoolGeneration]:
        """Return the generations of a new revision.

        Settings that a pool had before have their latest number again, so that replicas that still run with them are
        kept, and a number never stands for two versions.
        """
        advanced = {} if latest is None else dict(latest.generations)
        changed = {
            pool: digest
            for pool, digest in digests.items()
            if pool not in advanced or advanced[pool].digest != digest or pool in renewed
        }
        known: dict[str, dict[str, int]] = {pool: {} for pool in changed}
        if advanced.keys() & changed.keys():
            query = select(_revisions.generations).where(_revisions.fleet == fleet)
            for encoded in connection.execute(query).scalars():
                generations = _decode_generations(encoded)
                for pool in changed.keys() & generations.keys():
                    number, digest = generations[pool].generation, generations[pool].digest
                    known[pool][digest] = max(number, known[pool].get(digest, 0))
        for pool, digest in changed.items():
            number = 0 if pool in renewed else known[pool].get(digest, 0)
            number = number or max(known[pool].values(), default=0) + 1
            advanced[pool] = PoolGeneration(number, digest)
        return advanced

    def latest_revision(self, fleet: str) -> FleetRevision | None:
        """Return the revision in force, or None if the fleet was never applied."""
        with self._database.read_transaction() as connection:
            return self._read_latest(connection, fleet)

    def get_revision(self, fleet: str, number: int) -> FleetRevision:
        """Return one revision. Raises NotFoundError if the fleet has no such revision."""
        query = select(schema.fleet_revisions).where(
            _revisions.fleet == fleet, _revisions.number == number
        )
        with self._database.read_transaction() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            raise NotFoundError(
                f"The fleet {fleet!r} has no revision {number}. `argosy history` lists them."
            )
        return _decode_revision(row)

    def list_fleets(self) -> list[str]:
        """Return the names of all fleets that were ever applied."""
        query = select(_revisions.fleet).distinct().order_by(_revisions.fleet)
        with self._database.read_transaction() as connection:
            return list(connection.execute(query).scalars())

    def list_revisions(
        self, fleet: str, limit: int = 100, before: int | None = None, author: str | None = None
    ) -> list[FleetRevision]:
        """Return the latest revisions, or those with numbers below `before`, newest first, of all or of one author."""
        query = _latest_revisions(fleet).limit(limit)
        if author is not None:
            query = query.where(_revisions.author == author)
        if before is not None:
            query = query.where(_revisions.number < before)
        with self._database.read_transaction() as connection:
            return [_decode_revision(row) for row in connection.execute(query)]

    # --- lease -----------------------------------------------------------------------------------

    def read_lease(self, fleet: str) -> FleetLease:
        """Return the current lease. Before the first controller its epoch is 0."""
        with self._database.read_transaction() as connection:
            row = _read_lease_row(connection, fleet)
        return _decode_lease(row, fleet)

    def acquire_lease(
        self, holder: str, expired: FleetLease, newer_epoch: int = 0
    ) -> FleetLease | None:
        """Take the lease over, with the next epoch. Returns None if it was renewed or taken over meanwhile.

        Args:
            holder: Name of the controller.
            expired: The lease whose renewal the holder has waited for, without success.
            newer_epoch: Epoch that the new one shall be later than as well.
        """
        fleet = expired.fleet
        with self._write_transaction() as connection:
            _lock(connection, fleet)
            if _decode_lease(_read_lease_row(connection, fleet), fleet) != expired:
                return None
            epoch = max(expired.epoch, newer_epoch) + 1
            lease = FleetLease(fleet=fleet, epoch=epoch, holder=holder, renewals=0)
            connection.execute(
                update(schema.fleet_leases)
                .where(_leases.fleet == fleet)
                .values(epoch=lease.epoch, holder=holder, renewals=0, renewed_at=self._clock())
            )
        return lease

    def renew_lease(self, lease: FleetLease) -> FleetLease:
        """Renew the lease. Raises DeposedError if another controller has taken it over."""
        with self._write_transaction() as connection:
            require_leader(connection, lease)
            renewed = connection.execute(
                update(schema.fleet_leases)
                .where(_leases.fleet == lease.fleet)
                .values(renewals=_leases.renewals + 1, renewed_at=self._clock())
                .returning(_leases.renewals)
            ).scalar_one()
        return msgspec.structs.replace(lease, renewals=renewed)

    def release_lease(self, lease: FleetLease) -> None:
        """Let a standby take over at once. Does nothing if another controller has the lease."""
        with self._write_transaction() as connection:
            connection.execute(
                update(schema.fleet_leases)
                .where(_leases.fleet == lease.fleet, _leases.epoch == lease.epoch)
                .values(holder="")
            )

    def lease_age_s(self, fleet: str) -> float | None:
        """Return the seconds since the lease was last renewed, by the clocks of this machine and the leader's.

        Returns None before the first controller.
        """
        with self._database.read_transaction() as connection:
            row = _read_lease_row(connection, fleet)
        return None if row is None or not row.epoch else self._clock() - row.renewed_at

    def find_write_problem(self) -> str:
        """Return why the store cannot be written, with what to do; empty if it can. Waits up to a second for a lock."""
        return self._database.find_write_problem()

    # --- records ---------------------------------------------------------------------------------

    def read_records(self, fleet: str) -> dict[str, bytes]:
        """Return the records that controllers saved, by name."""
        query = select(_records.name, _records.record).where(_records.fleet == fleet)
        with self._database.read_transaction() as connection:
            return {row.name: bytes(row.record) for row in connection.execute(query)}

    def save_records(self, lease: FleetLease, records: Mapping[str, bytes | None]) -> None:
        """Replace records. None deletes one. Raises DeposedError, and saves nothing, if another controller leads."""
        if not records:
            return
        with self._write_transaction() as connection:
            require_leader(connection, lease)
            connection.execute(
                delete(schema.fleet_records).where(
                    _records.fleet == lease.fleet, _records.name.in_(records)
                )
            )
            rows = [
                {"fleet": lease.fleet, "name": name, "record": record}
                for name, record in records.items()
                if record is not None
            ]
            _insert_rows(connection, schema.fleet_records, rows)

    # --- documents -------------------------------------------------------------------------------

    def read_documents(self, fleet: str, prefix: str = "") -> dict[str, FleetDocument]:
        """Return the documents whose names begin with a prefix, by name."""
        query = select(_documents.name, _documents.version, _documents.document).where(
            _documents.fleet == fleet, _documents.name.startswith(prefix, autoescape=True)
        )
        with self._database.read_transaction() as connection:
            return {
                row.name: FleetDocument(row.version, bytes(row.document))
                for row in connection.execute(query)
            }

    def replace_document(
        self,
        fleet: str,
        name: str,
        document: FleetDocument | None,
        *,
        after: int,
        decision: AuditedDecision | None = None,
    ) -> bool:
        """Replace a document unless another process has done so meanwhile. Any process may call it, without a lease.

        The new document has a version above `after`, that of the replaced one (0: none); None deletes it. Events
        and audit log record the decision. Returns False, and changes nothing, if the stored version is not `after`.
        """
        with self._write_transaction() as connection:
            _lock(connection, fleet)
            where = (_documents.fleet == fleet) & (_documents.name == name)
            version = connection.execute(
                select(_documents.version).where(where)
            ).scalar_one_or_none()
            if (version or 0) != after:
                return False
            connection.execute(delete(schema.fleet_documents).where(where))
            if document is not None:
                row = {"fleet": fleet, "name": name, "version": document.version}
                connection.execute(
                    insert(schema.fleet_documents), row | {"document": document.content}
                )
            if decision is not None:
                self._record(connection, fleet, decision)
        return True

    # --- events ----------------------------------------------------------------------------------

    def append_events(self, lease: FleetLease, events: Sequence[FleetEvent]) -> None:
        """Append events. Raises DeposedError, and appends nothing, if another controller leads by now."""
        if not events:
            return
        with self._write_transaction() as connection:
            last = require_leader(connection, lease, new_events=len(events))
            stamp = {"fleet": lease.fleet, "epoch": lease.epoch, "at": self._clock()}
            rows = [
                msgspec.structs.asdict(event) | stamp | {"number": number}
                for number, event in enumerate(events, last - len(events) + 1)
            ]
            _insert_rows(connection, schema.fleet_events, rows)

    def list_events(
        self,
        fleet: str,
        *,
        after: int = 0,
        limit: int = 100,
        replica: str | None = None,
        pool: str | None = None,
        kinds: Sequence[str] = (),
        outcome: str | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> list[FleetEvent]:
        """Return at most `limit` events with numbers above `after`, oldest first; with `after` 0 the latest ones.

        The other arguments select events. Times are in seconds since the epoch, `until` is exclusive, and no kinds mean
        all.
        """
        is_of_fleet = _events.fleet == fleet
        query = select(schema.fleet_events).where(is_of_fleet, _events.number > after)
        for column, value in (
            (_events.replica, replica),
            (_events.pool, pool),
            (_events.outcome, outcome),
        ):
            if value is not None:
                query = query.where(column == value)
        if kinds:
            query = query.where(_events.kind.in_(kinds))
        order = _events.number if after else _events.number.desc()
        numbered = _events.number, _events.at
        with self._database.read_transaction() as connection:
            query = query.where(*in_time_range(connection, *numbered, since, until, is_of_fleet))
            rows = connection.execute(query.order_by(order).limit(limit)).all()
        events = [_decode_event(row) for row in rows]
        return events if after else events[::-1]

    def prune_events(self, lease: FleetLease, *, keep_s: float, max_count: int) -> int:
        """Delete events that are older than `keep_s` or more than `max_count`, and return how many.

        Raises DeposedError, and deletes nothing, if another controller leads by now.
        """
        with self._write_transaction() as connection:
            last = require_leader(connection, lease)
            is_old = or_(_events.at < self._clock() - keep_s, _events.number <= last - max_count)
            pruned = delete(schema.fleet_events).where(_events.fleet == lease.fleet, is_old)
            return connection.execute(pruned).rowcount

    def record_replica_decision(self, replica: str, decision: AuditedDecision) -> None:
        """Add a decision about a replica, which the audit log has already, to the events of its fleets."""
        query = select(_records.fleet).where(_records.name == f"replica/{replica}")
        with self._write_transaction() as connection:
            for fleet in connection.execute(query).scalars().all():
                self._append_decision_event(connection, fleet, decision, replica)

    def _record(self, connection: Connection, fleet: str, decision: AuditedDecision) -> None:
        """Add a decision to the audit log and the events. Every change that a person wants comes through here."""
        details = {**decision.details, "reason": decision.reason}
        if decision.is_forced:
            details["force"] = True
        subject = f"{fleet}/{decision.pool}" if decision.pool else fleet
        self._append_decision_event(connection, fleet, decision)
        transaction = AccountTransaction(connection, decision.actor, self._clock)
        transaction.append_decision(decision.action, subject, details)
        transaction.save_version()

    def _append_decision_event(
        self, connection: Connection, fleet: str, decision: AuditedDecision, replica: str = ""
    ) -> None:
        _lock(connection, fleet)
        row = connection.execute(
            update(schema.fleet_leases)
            .where(_leases.fleet == fleet)
            .values(last_event=_leases.last_event + 1)
            .returning(_leases.last_event, _leases.epoch)
        ).one()
        forced = " by force" if decision.is_forced else ""
        event = FleetEvent(
            number=row.last_event,
            at=self._clock(),
            epoch=row.epoch,
            kind=DECISION,
            pool=decision.pool,
            replica=replica,
            reason=": ".join(
                filter(None, (f"{decision.action}{forced} by {decision.actor}", decision.reason))
            ),
            outcome="ok",
        )
        fields = msgspec.structs.asdict(event) | {"fleet": fleet}
        connection.execute(insert(schema.fleet_events), fields)

    def _write_transaction(self) -> AbstractContextManager[Connection]:
        return self._database.write_transaction(idle_timeout_s=IDLE_TIMEOUT_S)

    @staticmethod
    def _read_latest(connection: Connection, fleet: str) -> FleetRevision | None:
        row = connection.execute(_latest_revisions(fleet).limit(1)).one_or_none()
        return None if row is None else _decode_revision(row)


def _latest_revisions(fleet: str) -> Select[Any]:
    query = select(schema.fleet_revisions).where(_revisions.fleet == fleet)
    return query.order_by(_revisions.number.desc())


def _insert_rows(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows, many by one statement.

    A separate statement for each would be pipelined by psycopg, after which PostgreSQL (15.18) does not apply the idle
    timeout to the transaction.
    """
    for start in range(0, len(rows), MAX_INSERTED_ROWS):
        connection.execute(insert(table).values(rows[start : start + MAX_INSERTED_ROWS]))


def _lock(connection: Connection, fleet: str) -> None:
    """Lock the fleet's row until the end of the transaction, after creating it where it does not exist."""
    statement = conflict_aware_insert(connection, schema.fleet_leases).values(
        fleet=fleet, epoch=0, holder="", renewals=0, renewed_at=0.0, last_event=0
    )
    connection.execute(statement.on_conflict_do_nothing(index_elements=["fleet"]))
    connection.execute(select(_leases.epoch).where(_leases.fleet == fleet).with_for_update())


def require_leader(connection: Connection, lease: FleetLease, *, new_events: int = 0) -> int:
    """Lock the fleet's row, count new events, and return the number of the last one.

    Raises:
        DeposedError: The lease has another epoch.
    """
    last_event: int | None = connection.execute(
        update(schema.fleet_leases)
        .where(_leases.fleet == lease.fleet, _leases.epoch == lease.epoch)
        .values(last_event=_leases.last_event + new_events)
        .returning(_leases.last_event)
    ).scalar_one_or_none()
    if last_event is None:
        raise DeposedError(
            f"Another controller leads the fleet {lease.fleet!r} since epoch {lease.epoch} ended. This one stands by."
        )
    return last_event


def _read_lease_row(connection: Connection, fleet: str) -> Row[Any] | None:
    query = select(schema.fleet_leases).where(_leases.fleet == fleet)
    return connection.execute(query).one_or_none()


def _decode_lease(row: Row[Any] | None, fleet: str) -> FleetLease:
    if row is None:
        return FleetLease(fleet=fleet, epoch=0, holder="", renewals=0)
    return FleetLease(fleet=fleet, epoch=row.epoch, holder=row.holder, renewals=row.renewals)


def _decode_generations(encoded: bytes) -> dict[str, PoolGeneration]:
    return msgspec.json.decode(encoded, type=dict[str, PoolGeneration])


def _decode_revision(row: Row[Any]) -> FleetRevision:
    fields = row._asdict()
    del fields["fleet"]
    generations = _decode_generations(fields.pop("generations"))
    declaration = bytes(fields.pop("declaration"))
    return FleetRevision(**fields, declaration=declaration, generations=generations)


def _decode_event(row: Row[Any]) -> FleetEvent:
    fields = row._asdict()
    del fields["fleet"]
    return FleetEvent(**fields)
