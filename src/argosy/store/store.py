"""The store as a whole: opened by URL, migrated, copied, and read as one account snapshot."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from sqlalchemy import Connection, Table, delete, func, insert, literal, select

from argosy.blob_store import BlobStore
from argosy.folders import state_folder
from argosy.store import schema
from argosy.store.accounts import Accounts
from argosy.store.adapters import Adapters
from argosy.store.audit import AuditLog
from argosy.store.batch_store import BatchStore
from argosy.store.console_session_store import ConsoleSessionStore
from argosy.store.content_access import ContentAccess
from argosy.store.conversation_store import ConversationStore
from argosy.store.database import Database, parse_url, sqlite_path, sqlite_url
from argosy.store.erasure import Erasure
from argosy.store.errors import ConflictError, StoreError
from argosy.store.file_store import FileStore
from argosy.store.flags import Flags
from argosy.store.fleet_store import FleetStore
from argosy.store.gateway_registry import GatewayRegistry, SecretStore
from argosy.store.hardware_costs import HardwareCosts
from argosy.store.ledger import Ledger
from argosy.store.limits_and_prices import LimitsAndPrices
from argosy.store.migrations import migrate
from argosy.store.objective_hours import ObjectiveHours
from argosy.store.prompts import Prompts
from argosy.store.quality import Quality
from argosy.store.records import AccountSnapshot
from argosy.store.replicas import ReplicaLogStore, ReplicaSettings
from argosy.store.response_store import ResponseStore
from argosy.store.retention import RetentionRules
from argosy.store.snapshot_reader import read_snapshot
from argosy.store.stored_bytes import DEFAULT_MAX_STORED_BYTES, StoredBytes

EXPIRED_KEY_RETENTION_S = 30 * 86_400
"""How long an expired key stays in account snapshots."""
_POSTGRES_LOCATION_VARIABLES = {
    "host": "PGHOST",
    "port": "PGPORT",
    "dbname": "PGDATABASE",
    "hostaddr": "PGHOSTADDR",
    "service": "PGSERVICE",
    "options": "PGOPTIONS",
}
"""URL parameters and environment variables that select a PostgreSQL database.

`options` is one of them because tables may be in several schemas.
"""
COPY_BATCH_ROWS = 1000
_PASSING_TABLES = (schema.gateways, schema.console_sessions, schema.replica_logs)
"""Tables that are not copied: running processes with their secrets, people who are signed in, and logs."""


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of durable state."""

    url: str | None = None
    """`sqlite:///path` or `postgresql://user:password@host/database`. By default `default_store_url()`."""
    keep_usage_days: Annotated[int, msgspec.Meta(ge=1, le=36_500)] | None = None
    """Number of days to keep single usage records. Older ones are summed by day. None keeps them for ever."""
    keep_responses_days: Annotated[int, msgspec.Meta(ge=1, le=36_500)] = 30
    """Number of days to keep responses and conversations of the Responses API after their last use."""
    max_stored_bytes_per_project: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = (
        DEFAULT_MAX_STORED_BYTES
    )
    """Bytes of responses, conversations and files that a project may keep. Its limit on `stored_bytes` replaces the
    number."""
    blobs: str | None = None
    """Contents of files: the absolute path of a folder, or a URL such as `s3://bucket/prefix`, that all gateways of the
    store share. By default a folder beside an SQLite file. With PostgreSQL, files need it."""
    max_file_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**40)] = 512 * 1024 * 1024
    """Maximum size of a file."""


class Store:
    """Durable state, for any number of threads and processes.

    Every call may block on the database, so none may run on an event loop. Methods raise StoreError, with a message
    that says what to change, if the database cannot be used.
    """

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float],
        max_stored_bytes: int = DEFAULT_MAX_STORED_BYTES,
        blobs: BlobStore | None = None,
    ) -> None:
        self._database = database
        self._clock = clock
        self._last_snapshot: AccountSnapshot | None = None
        self.accounts = Accounts(database, clock)
        self.limits_and_prices = LimitsAndPrices(database, clock)
        self.replica_settings = ReplicaSettings(database, clock)
        self.adapters = Adapters(database, clock)
        self.prompts = Prompts(database, clock)
        self.quality = Quality(database, clock)
        self.flags = Flags(database, clock)
        self.audit_log = AuditLog(database)
        self.ledger = Ledger(database)
        self.hardware_costs = HardwareCosts(database)
        self.gateways = GatewayRegistry(database, clock)
        self.stored_bytes = StoredBytes(database, max_stored_bytes)
        self.responses = ResponseStore(database, clock, self.stored_bytes)
        self.files = FileStore(database, clock, self.stored_bytes, blobs)
        self.batches = BatchStore(database, clock, self.stored_bytes, self.files)
        kept = self.stored_bytes, self.ledger, self.files
        self.erasure = Erasure(database, clock, *kept, self.batches)
        self.retention = RetentionRules(database, clock, *kept)
        self.content_access = ContentAccess(database, clock)
        self.conversations = ConversationStore(database, clock, self.stored_bytes)
        self.secrets = SecretStore(database, clock)
        self.console_sessions = ConsoleSessionStore(database, clock)
        self.fleets = FleetStore(database, clock)
        self.replica_logs = ReplicaLogStore(database, clock)
        self.objective_hours = ObjectiveHours(database)

    def keep_reserve(self) -> None:
        """Occupy some space of the disk for `release_reserve`, if the database is an SQLite file."""
        self._database.keep_reserve()

    def release_reserve(self) -> bool:
        """Free that space for the last writes on a full disk. Return whether there was some."""
        return self._database.release_reserve()

    def migrate(self) -> None:
        """Migrate the tables to the newest version. Any number of processes may call this at the same time."""
        migrate(self._database)

    def copy_to(self, other: Store, *, with_secrets: bool = True) -> int:
        """Copy all rows, as of one moment, into an empty store, and return their number. Others may write meanwhile.

        Registered gateways, console sessions and logs of replicas are left out, and without `with_secrets` the keys of
        `secrets`. Raises ConflictError if the other store is not empty. Both must have the newest tables.
        """
        source, target = self._database, other._database
        left_out = _PASSING_TABLES if with_secrets else (*_PASSING_TABLES, schema.secrets)
        if not other.is_empty():
            raise ConflictError(
                f"{target.display_name} is not empty. Give a new or empty database."
            )
        if source.is_file and target.is_file:
            source.copy_pages_to(target)
            with target.erasing_deletions(), target.write_transaction() as connection:
                for table in left_out:
                    connection.execute(delete(table))
            return other.count_rows()
        with (
            source.read_transaction() as source_connection,
            target.write_transaction() as target_connection,
        ):
            target_connection.execute(delete(schema.state))  # creating the table inserted a row
            copied = 0
            for table in schema.metadata.sorted_tables:
                if table in left_out:
                    continue
                for batch in _read_batches(source, source_connection, table):
                    target_connection.execute(insert(table), batch)
                    copied += len(batch)
            return copied

    def is_empty(self) -> bool:
        """Return whether no table has a row that `copy_to` would have to replace."""
        with self._database.read_transaction() as connection:
            return not any(
                connection.execute(select(literal(1)).select_from(table).limit(1)).first()
                for table in schema.metadata.sorted_tables
                if table not in (schema.state, *_PASSING_TABLES)
            )

    def count_rows(self) -> int:
        """Count the rows of all tables that `copy_to` copies."""
        with self._database.read_transaction() as connection:
            return sum(
                connection.execute(select(func.count()).select_from(table)).scalar_one()
                for table in schema.metadata.sorted_tables
                if table not in _PASSING_TABLES
            )

    def find_damage(self) -> str:
        """Return what is wrong with the pages of an SQLite file; empty if nothing is. A server checks its own pages."""
        return self._database.find_damage()

    def close(self) -> None:
        """Close all connections."""
        self._database.close()

    def give_back_space(self) -> bool:
        """Give some space that deleted rows left back to the file system. Returns whether there may be more."""
        return self._database.give_back_space()

    def is_current(self, snapshot: AccountSnapshot) -> bool:
        """Return whether the snapshot is up to date, with one small query.

        The query compares the hash of the last audit entry. A version number would not suffice, because a restored
        backup may reach the same version by other changes.
        """
        with self._database.read_transaction() as connection:
            head = connection.execute(select(schema.state.c.audit_head)).scalar_one()
        return bytes(head) == snapshot.audit_head

    def load_snapshot(self) -> AccountSnapshot:
        """Read all accounts as of one version. Records unchanged since the previous call are not read again."""
        read_at, expired_before = time.monotonic(), self._clock() - EXPIRED_KEY_RETENTION_S
        with self._database.read_transaction() as connection:
            self._last_snapshot = snapshot = read_snapshot(
                connection, self._last_snapshot, read_at=read_at, expired_before=expired_before
            )
        return snapshot


def open_store(
    url: str,
    *,
    clock: Callable[[], float] = time.time,
    max_stored_bytes: int = DEFAULT_MAX_STORED_BYTES,
    blobs: BlobStore | None = None,
) -> Store:
    """Open the store at a URL. Creates an SQLite file that does not exist. Call `migrate` before anything else.

    Args:
        url: `sqlite:///path` or `postgresql://user:password@host:port/database`.
        clock: Source of seconds since the epoch.
        max_stored_bytes: Bytes that a project without a limit of its own may store.
        blobs: Contents of files; None for a process that reads and writes none.

    Raises:
        StoreError: The URL is not valid or the database cannot be used.
    """
    return Store(Database(url), clock, max_stored_bytes, blobs)


def open_existing_store(url: str) -> Store:
    """Open the store at a URL like `open_store`, but raise StoreError instead of creating one that does not exist."""
    return Store(Database.open_existing(url), time.time)


def open_memory_store() -> Store:
    """Open an empty store of fleets in the memory of this process. It has no accounts, and ends when it is closed."""
    database = Database(None)
    with database.write_transaction() as connection:
        schema.metadata.create_all(connection)
    return Store(database, time.time)


def default_store_url() -> str:
    """Return the URL of an SQLite file in the user's state folder. Raises StoreError for a user without a home."""
    try:
        return sqlite_url(state_folder() / "argosy.db")
    except FileNotFoundError as error:
        raise StoreError(
            f"There is no folder for a store: {error}, or give the URL of a database."
        ) from error


def default_blob_folder(url: str) -> str | None:
    """Return the folder for contents of files beside an SQLite file, or None for another database."""
    path = sqlite_path(url)
    return None if path is None else str(Path(f"{path}.files").absolute())


def usage_log_folder(url: str) -> Path:
    """Return the folder of the usage log for the store at a URL.

    The folder is next to an SQLite file. For PostgreSQL it is in the user's state folder, one for each database.

    Raises:
        StoreError: The URL is not valid, or the user has no home.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        return Path(f"{parsed.database}.usage")
    url_fields = {"host": parsed.host, "port": parsed.port, "dbname": parsed.database}
    host, port, database, *other_fields = (
        url_fields.get(name) or parsed.query.get(name) or os.environ.get(variable)
        for name, variable in _POSTGRES_LOCATION_VARIABLES.items()
    )
    location = f"postgresql://{host}:{port}/{database or parsed.username}"
    location = " ".join([location, *(str(field) for field in other_fields if field)])
    name = hashlib.sha256(location.encode()).hexdigest()[:16]
    try:
        return state_folder() / "usage" / name
    except FileNotFoundError as error:
        raise StoreError(f"There is no folder for the usage log: {error}.") from error


def _read_batches(
    source: Database, connection: Connection, table: Table
) -> Iterator[list[dict[str, Any]]]:
    """Yield all rows of a table in batches. Errors name the source database, not the target."""
    query = select(table).execution_options(yield_per=COPY_BATCH_ROWS)
    with source.translate_errors(), connection.execute(query) as rows:
        for batch in rows.mappings().partitions():
            yield [dict(row) for row in batch]
