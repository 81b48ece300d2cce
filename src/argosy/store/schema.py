"""SQLAlchemy tables of the store, with their triggers. `migrations` creates them, or changes older ones to be equal.

Tables of records have a column for each field of their type in `records.py`. Other columns are documented here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.inspect import (
    BoolType,
    BytesType,
    FloatType,
    IntType,
    LiteralType,
    Metadata,
    StrType,
    UnionType,
    VarTupleType,
)
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    event,
    insert,
    text,
)

from argosy.store.records import (
    Adapter,
    Flag,
    Key,
    Limit,
    Organisation,
    Price,
    Project,
    Prompt,
    QualityRun,
    QualitySample,
    QualitySet,
    ReplicaSetting,
    SampledTexts,
    UsageRecord,
    User,
)

if TYPE_CHECKING:
    from sqlalchemy import Dialect
    from sqlalchemy.types import TypeEngine


class StringTuple(TypeDecorator[tuple[str, ...]]):
    """Column type for a tuple of strings, stored as a JSON array."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: tuple[str, ...] | None, dialect: Dialect) -> str | None:  # noqa: ARG002 - SQLAlchemy's signature
        """Encode a value for the database."""
        return None if value is None else msgspec.json.encode(value).decode()

    def process_result_value(self, value: str | None, dialect: Dialect) -> tuple[str, ...] | None:  # noqa: ARG002 - SQLAlchemy's signature
        """Decode a stored value."""
        if value is None or value == "[]":
            return ()
        return msgspec.json.decode(value, type=tuple[str, ...])


_COLUMN_TYPES: dict[type, type[TypeEngine[Any]]] = {
    BoolType: Boolean,
    BytesType: LargeBinary,
    FloatType: Double,
    IntType: BigInteger,
    LiteralType: Text,
    StrType: Text,
    VarTupleType: StringTuple,
}
"""Column type by the type of a record's field. Tuples are of strings."""

GENESIS_HASH = bytes(32)
"""Stands in for the previous hash in the first entry of the audit log."""

metadata = MetaData()


def _unique_name_index(table: str, *columns: str, ended_column: str) -> Index:
    """Index that makes names unique among the records that have not ended."""
    is_active = text(f"{ended_column} IS NULL")
    name = f"{table}_{columns[-1]}"
    return Index(name, *columns, unique=True, sqlite_where=is_active, postgresql_where=is_active)


def _list_index(table: str, *columns: str) -> Index:
    """Index for keyset pagination of a list, of all records or of those with the same values in `columns`."""
    return Index("_".join([table, "listed", *columns]), *columns, "created_at", "id")


def _record_columns(record_type: type[msgspec.Struct], **references: str) -> list[Column[Any]]:
    """Columns for the fields of a record, the first of which is the primary key.

    Args:
        record_type: Type of the record.
        references: Referenced column by the name of a field.
    """
    columns: list[Column[Any]] = []
    for field in msgspec.structs.fields(record_type):
        described = msgspec.inspect.type_info(field.type)
        if isinstance(described, Metadata):  # has examples
            described = described.type
        types = described.types if isinstance(described, UnionType) else (described,)
        stored = next(_COLUMN_TYPES[type(each)] for each in types if type(each) in _COLUMN_TYPES)
        keys = [ForeignKey(references[field.name])] if field.name in references else []
        is_optional = len(types) > 1
        columns.append(
            Column(field.name, stored, *keys, primary_key=not columns, nullable=is_optional)
        )
    return columns


def _organisation_column() -> Column[str]:
    """Id of the record's organisation, for the lists of one organisation. No record has it."""
    return Column("organisation", Text)


def _named_at_column() -> Column[float]:
    """Time when the current name or email was set; NULL if it is unchanged since creation. No record has it."""
    return Column("named_at", Double)


def _columns(**types: type[TypeEngine[Any]]) -> list[Column[Any]]:
    """Columns that are never NULL, by their names."""
    return [Column(name, each, nullable=False) for name, each in types.items()]


def _primary_key(**types: type[TypeEngine[Any]]) -> list[Column[Any]]:
    """Columns of a primary key, whose values the caller gives."""
    return [
        Column(name, each, primary_key=True, autoincrement=False) for name, each in types.items()
    ]


state = Table(
    "state",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    *_columns(version=BigInteger, audit_entries=BigInteger, audit_head=LargeBinary),
)
"""Table of one row. Each account change locks it first, so changes and their audit entries are serialised."""


@event.listens_for(state, "after_create")
def _insert_state(table: Table, connection: Connection, **_: object) -> None:
    connection.execute(
        insert(table).values(id=1, version=1, audit_entries=0, audit_head=GENESIS_HASH)
    )


organisations = Table(
    "organisations",
    metadata,
    *_record_columns(Organisation),
    _unique_name_index("organisations", "name", ended_column="archived_at"),
    _list_index("organisations"),
)

projects = Table(
    "projects",
    metadata,
    *_record_columns(Project, organisation="organisations.id"),
    _named_at_column(),
    _unique_name_index("projects", "organisation", "name", ended_column="archived_at"),
    _list_index("projects"),
    _list_index("projects", "organisation"),
)

users = Table(
    "users",
    metadata,
    *_record_columns(User, organisation="organisations.id", project="projects.id"),
    _named_at_column(),
    _unique_name_index("users", "organisation", "email", ended_column="disabled_at"),
    _list_index("users"),
    _list_index("users", "organisation"),
)

keys = Table(
    "keys",
    metadata,
    *_record_columns(Key, project="projects.id", user="users.id"),
    UniqueConstraint("digest"),
    _organisation_column(),
    _list_index("keys"),
    _list_index("keys", "organisation"),
    _list_index("keys", "project"),
)

limits = Table(
    "limits",
    metadata,
    *_record_columns(Limit),
    _organisation_column(),
    Index("limits_owner", "owner", "owner_kind", "id"),
    Index("limits_listed_organisation", "organisation", "id"),
)

prices = Table("prices", metadata, *_record_columns(Price), Index("prices_listed", "since", "id"))

replica_settings = Table("replica_settings", metadata, *_record_columns(ReplicaSetting))

adapters = Table(
    "adapters",
    metadata,
    *_record_columns(Adapter, organisation="organisations.id", project="projects.id"),
    Column("evidence_version", BigInteger),
    Column("evidence", LargeBinary),
    _list_index("adapters"),
    _list_index("adapters", "organisation"),
)
"""The evidence is that of the last rollout, as JSON with a version, which gateways replace. NULL before the first."""

prompts = Table(
    "prompts",
    metadata,
    *_record_columns(Prompt, organisation="organisations.id", project="projects.id"),
    _list_index("prompts"),
    _list_index("prompts", "organisation"),
)

quality_sets = Table(
    "quality_sets",
    metadata,
    *_record_columns(QualitySet, organisation="organisations.id"),
    Column("content", LargeBinary),
    _list_index("quality_sets"),
    _list_index("quality_sets", "organisation"),
)
"""The content is JSON; NULL once it is deleted."""

quality_runs = Table(
    "quality_runs",
    metadata,
    *_record_columns(QualityRun, organisation="organisations.id", quality_set="quality_sets.id"),
    _list_index("quality_runs"),
    _list_index("quality_runs", "organisation"),
    _list_index("quality_runs", "quality_set"),
)

quality_samples = Table(
    "quality_samples",
    metadata,
    *_record_columns(QualitySample, organisation="organisations.id", project="projects.id"),
    *(Column(name, Text) for name in SampledTexts.__struct_fields__),
    _list_index("quality_samples"),
    _list_index("quality_samples", "organisation"),
    _list_index("quality_samples", "project"),
)

flags = Table("flags", metadata, *_record_columns(Flag))

audit = Table(
    "audit",
    metadata,
    Column("entry", BigInteger, primary_key=True, autoincrement=False),
    *_columns(at=Double, actor=Text, action=Text, subject=Text, details=Text, hash=LargeBinary),
    Column("organisation", Text),
    Index("audit_subject", "subject"),
    Index("audit_organisation", "organisation", "entry"),
)
"""Append-only table. Triggers reject updates and deletions."""

_APPEND_ONLY_TRIGGERS = {
    "sqlite": tuple(
        f"""
        CREATE TRIGGER audit_no_{change.lower()} BEFORE {change} ON audit
        BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END
        """
        for change in ("UPDATE", "DELETE")
    ),
    "postgresql": (
        """
        CREATE FUNCTION audit_append_only() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE EXCEPTION 'the audit log is append-only'; END $$
        """,
        """
        CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit
        FOR EACH STATEMENT EXECUTE FUNCTION audit_append_only()
        """,
    ),
}


@event.listens_for(audit, "after_create")
def _create_triggers(_table: Table, connection: Connection, **_: object) -> None:
    for statement in _APPEND_ONLY_TRIGGERS[connection.dialect.name]:
        connection.exec_driver_sql(statement)


gateways = Table(
    "gateways",
    metadata,
    Column("id", Text, primary_key=True),
    *(Column(name, Text, nullable=False) for name in ("url", "secret", "certificate")),
    Column("seen_at", Double, nullable=False),
)
"""The gateways that run, by their heartbeats. Copies of a store leave them out."""

_USAGE_OWNERS = ("organisation", "project", "key", "user")

usage = Table(
    "usage",
    metadata,
    *_record_columns(UsageRecord),
    Column("day", Integer, nullable=False),
    Index("usage_ended_at", "ended_at"),
    *(Index(f"usage_{owner}", owner, "ended_at") for owner in _USAGE_OWNERS),
)
"""Usage records of single requests. `day` is the day of `ended_at`, in days since the epoch (UTC)."""

usage_days = Table(
    "usage_days",
    metadata,
    Column("day", Integer, primary_key=True, autoincrement=False),
    *(
        Column(name, Text, primary_key=True)
        for name in (*_USAGE_OWNERS, "model", "asked", "route", "replica")
    ),
    *_columns(
        requests=BigInteger,
        input_tokens=BigInteger,
        cached_tokens=BigInteger,
        output_tokens=BigInteger,
        nano_dollars=BigInteger,
        unanswered=BigInteger,
    ),
)
"""Daily sums of the usage records that were rolled up. Limits do not count the `unanswered` requests among them."""

cold_parts = Table(
    "cold_parts",
    metadata,
    Column("key", Text, primary_key=True),
    *_columns(organisation=Text, day=Integer, rows=BigInteger, nano_dollars=BigInteger),
    *_columns(size_bytes=BigInteger, sha256=Text),
    Index("cold_parts_organisation", "organisation", "day"),
)
"""Files of the archive with single usage records that `usage_days` has as sums. Days are as there."""


def _owner_columns() -> tuple[Column[str], Column[str]]:
    """Organisation, and project, or user or key without a project, to which a record belongs."""
    return Column("organisation", Text, nullable=False), Column("owner", Text, nullable=False)


def _expiring_record_columns() -> tuple[Column[Any], ...]:
    """Id, owner and times of a record that is kept for some time."""
    return (
        Column("id", Text, primary_key=True),
        *_owner_columns(),
        Column("created_at", Double, nullable=False),
        Column("expires_at", Double, nullable=False),
    )


responses = Table(
    "responses",
    metadata,
    *_expiring_record_columns(),
    Column("status", Text, nullable=False),
    Column("previous", Text),
    Column("body", LargeBinary, nullable=False),
    Column("heartbeat_at", Double),
    Index("responses_expires_at", "expires_at"),
    Index("responses_owner", "organisation", "owner", "created_at", "id"),
    Index("responses_heartbeat_at", "heartbeat_at"),
)
"""Responses of the Responses API without their output, which `items` has, and whole stored chats. `body` is JSON.

`heartbeat_at` is the last sign of the gateway that runs a background response; NULL if none does.
"""

conversations = Table(
    "conversations",
    metadata,
    *_expiring_record_columns(),
    Column("body", LargeBinary, nullable=False),
    Index("conversations_expires_at", "expires_at"),
    Index("conversations_owner", "organisation", "owner", "created_at", "id"),
)
"""Conversations of the Responses API. `body` is the client's metadata as JSON."""

items = Table(
    "items",
    metadata,
    *_primary_key(parent=Text, position=Integer),
    *_owner_columns(),
    *_columns(item=Text, is_output=Boolean, body=LargeBinary),
    Index("items_item", "item"),
)
"""Input and output items of responses, and items of conversations, as JSON. `item` is the item's own id."""

files = Table(
    "files",
    metadata,
    *_expiring_record_columns(),
    *_columns(filename=Text, purpose=Text, media_type=Text, size=BigInteger, sha256=Text),
    *_columns(holds=Integer),
    Column("upload", Text),
    Index("files_owner", "organisation", "owner", "created_at", "id"),
    Index("files_expires_at", "expires_at"),
    Index("files_upload", "upload"),
)
"""Files of clients, and parts of the uploads that `upload` names. Their contents are in the store of blobs.

`expires_at` is infinite for files that do not expire, and `holds` counts those who need the file.
"""

uploads = Table(
    "uploads",
    metadata,
    *_expiring_record_columns(),
    *_columns(status=Text, filename=Text, purpose=Text, media_type=Text, size=BigInteger),
    Column("lifetime_s", Double),
    Column("file", Text),
    Index("uploads_expires_at", "expires_at"),
)
"""Files that clients upload in parts. `lifetime_s` is that of the file, and `file` its id once it is complete."""

blob_removals = Table(
    "blob_removals",
    metadata,
    Column("key", Text, primary_key=True),
    Column("due_at", Double, nullable=False),
)
"""Blobs to delete from a time on: those of deleted files, and those whose file may never be created."""

batches = Table(
    "batches",
    metadata,
    *_expiring_record_columns(),
    *_columns(
        status=Text,
        total=BigInteger,
        completed=BigInteger,
        failed=BigInteger,
        closed=BigInteger,
        input_tokens=BigInteger,
        cached_tokens=BigInteger,
        output_tokens=BigInteger,
        bytes=BigInteger,
        fence=BigInteger,
        holder=Text,
        body=LargeBinary,
    ),
    Index("batches_status", "status"),
    Index("batches_owner", "organisation", "owner", "created_at", "id"),
)
"""Batches of requests, with counts of their lines: all, answered, failed, and ended without an answer.

`expires_at` is the end of the completion window, and `bytes` is what the lines count of the owner's stored bytes. The
`holder` is the gateway that validates or finalises the batch, and `fence` numbers such claims.
"""

batch_lines = Table(
    "batch_lines",
    metadata,
    *_primary_key(batch=Text, line=Integer),
    *_columns(
        custom_id=Text,
        model=Text,
        state=Text,
        holder=Text,
        fence=BigInteger,
        attempts=BigInteger,
        body=LargeBinary,
    ),
    Column("status_code", Integer),
    Column("result", LargeBinary),
    Index("batch_lines_open", "batch", "state", "model", "line"),
    Index("batch_lines_holder", "holder"),
)
"""Requests of batches. `fence` numbers the claims of a line, and only the last claim may end it.

A line that ended has the status code and the body of its response, or neither of them.
"""

stored_bytes = Table(
    "stored_bytes",
    metadata,
    *_primary_key(organisation=Text, owner=Text),
    Column("bytes", BigInteger, nullable=False),
)
"""Bytes of each owner's responses, conversations, items and files: their contents, and a number for each row."""

retention = Table(
    "retention",
    metadata,
    *_primary_key(project=Text, kind=Text),
    *_columns(keep_days=Integer),
)
"""Days that records of a kind are kept of a project, instead of those of the settings."""

secrets = Table(
    "secrets",
    metadata,
    Column("name", Text, primary_key=True),
    *_columns(value=LargeBinary, created_at=Double),
)
"""Random keys that all gateways on the store share."""

fleet_revisions = Table(
    "fleet_revisions",
    metadata,
    *_primary_key(fleet=Text, number=Integer),
    *_columns(applied_at=Double, author=Text, reason=Text),
    Column("rollback_of", Integer),
    *_columns(declaration=LargeBinary, generations=LargeBinary),
)
"""Applied declarations of each fleet, as JSON. `generations` has a `PoolGeneration` for each pool of any revision."""

fleet_events = Table(
    "fleet_events",
    metadata,
    *_primary_key(fleet=Text, number=Integer),
    *_columns(at=Double, epoch=Integer),
    *(Column(name, Text, nullable=False) for name in ("kind", "pool", "replica", "reason")),
    Column("outcome", Text, nullable=False),
)
"""Events of each fleet: actions of controllers with their outcomes, and changes of replicas."""

fleet_leases = Table(
    "fleet_leases",
    metadata,
    Column("fleet", Text, primary_key=True),
    *_columns(
        epoch=Integer, holder=Text, renewals=BigInteger, renewed_at=Double, last_event=Integer
    ),
)
"""The controller that leads each fleet. `epoch` counts the leaders, and `last_event` numbers the fleet's events.

`renewed_at` is shown to operators. No decision depends on it.
"""

fleet_records = Table(
    "fleet_records",
    metadata,
    *_primary_key(fleet=Text, name=Text),
    Column("record", LargeBinary, nullable=False),
)
"""Memory of each fleet's controllers, as JSON, about replicas, gateways and start-up times."""

fleet_documents = Table(
    "fleet_documents",
    metadata,
    *_primary_key(fleet=Text, name=Text),
    *_columns(version=BigInteger, document=LargeBinary),
)
"""Versioned documents of each fleet, as JSON, that any process may replace, such as the routes of its pools."""

hardware_days = Table(
    "hardware_days",
    metadata,
    *_primary_key(day=Integer, fleet=Text, pool=Text, model=Text),
    *_columns(replica_ms=BigInteger, busy_ms=BigInteger, nano_dollars=BigInteger),
)
"""Time of the replicas of each pool with a price, and its cost. Days are as in `usage_days`, and are never deleted."""

replica_logs = Table(
    "replica_logs",
    metadata,
    *_primary_key(fleet=Text, replica=Text, started_at=Double),
    Column("attempt", Integer, nullable=False),
    Column("exited_at", Double),
    Column("exit_status", Integer),
    *_columns(reason=Text, read_at=Double, error=Text, log=LargeBinary),
    Index("replica_logs_read_at", "fleet", "read_at"),
)
"""End of the log of each recent run of a replica: of those that ended, and of those that people look at. Copies of a
store leave it out."""

objective_hours = Table(
    "objective_hours",
    metadata,
    *_primary_key(fleet=Text, hour=BigInteger, objective=Text, gateway=Text),
    *_columns(requests=BigInteger, misses=BigInteger, slots=LargeBinary, details=LargeBinary),
)
"""Counts of each service level objective by hour and gateway process.

Rows without an objective have the times at which a process reported. Each `hour` is a start in seconds since the epoch.
The `slots` are the packed counts of the hour's parts, empty once no window is that fine. The `details` are the causes
of misses as JSON.
"""

console_sessions = Table(
    "console_sessions",
    metadata,
    Column("digest", LargeBinary, primary_key=True),
    Column("key_digest", LargeBinary),
    Column("claims", LargeBinary),
    *_columns(created_at=Double, last_used_at=Double, expires_at=Double),
)
"""Sessions of the console, by the SHA-256 digest of their id. A session has either the digest of the API key with
which it was opened, or the claims of an issuer's token, as JSON."""
