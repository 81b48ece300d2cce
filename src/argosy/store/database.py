"""Database access: an SQLAlchemy engine for a URL, read and write transactions, and errors with advice."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from sqlite3 import SQLITE_BUSY, SQLITE_PROTOCOL, OperationalError
from sqlite3 import Connection as SqliteConnection
from sqlite3 import Error as SqliteError
from typing import Any

from sqlalchemy import URL, Connection, Engine, Table, create_engine, event, inspect, make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, NoResultFound
from sqlalchemy.exc import OperationalError as ServerError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool

from argosy.extras import install_command
from argosy.store.errors import QueryTimeoutError, StoreError, StoreUnavailableError

SQLITE_BUSY_TIMEOUT_S = 15.0
"""Maximum time that a writer waits for other writers of an SQLite file."""
PROBE_TIMEOUT_S = 1.0
"""Maximum time that `Database.find_write_problem` waits for other writers of an SQLite file."""
_PROBE_STATEMENTS = (
    """INSERT INTO state (id, version, audit_entries, audit_head)
    SELECT -1, version, audit_entries, audit_head FROM state WHERE id = 1""",
    "DELETE FROM state WHERE id = -1",
)
"""Changes that leave everything as it was. SQLite would not write a row that is updated to its own values."""
RESERVE_BYTES = 4 * 1024 * 1024
"""Space that is kept for `argosy down`: its revision, and the last records of the controller and the gateways."""
SQLITE_LOG_BYTES = 16 * 1024 * 1024
"""Size to which SQLite's write-ahead log is cut after larger transactions."""
SQLITE_VACUUM_PAGES = 1000
"""Pages that one transaction gives back to the file system, so that other writers wait for a short time only."""
MEMORY_URL = "sqlite://"
"""SQLAlchemy's URL of a database in memory. No setting may name it, since no other process could see the data."""
POSTGRES_IDLE_TIMEOUT_S = 15
"""Idle time after which PostgreSQL ends a write transaction.

Without it the transaction of a machine that vanished would block all other writers for hours.
"""

_SQLITE_TIME_CHECK_STEPS = 100_000
"""Steps of SQLite's virtual machine, some milliseconds, after which it checks the time limit of a query."""
_TIMEOUT_ERRORS = ("interrupted", "statement timeout")
"""Parts of the messages for queries that exceeded a time limit, in SQLite and PostgreSQL."""

_SQLITE_BUSY_CODES = frozenset({SQLITE_BUSY, SQLITE_PROTOCOL})
"""Errors while other processes use an SQLite file. They are transient, unlike all other SQLite errors."""
_SQLITE_WRITE_OPTIONS = {"begin": "BEGIN IMMEDIATE"}
_POSTGRES_SNAPSHOT_OPTIONS = {"isolation_level": "REPEATABLE READ"}
"""Options of reads and of snapshot writes.

Reads are not declared read-only. That would make later writes on the same connection insist on a writable transaction
despite `default_transaction_read_only`, and a standby would reject them before their first query.
"""
_POSTGRES_WRITE_OPTIONS = {"isolation_level": "READ COMMITTED"}
_POSTGRES_TIMEOUTS = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,  # milliseconds
}
"""Connection settings that detect a vanished server in seconds instead of after the TCP timeout."""
_POSTGRES_ENCODING = {"client_encoding": "utf8"}
"""Client encoding. By default it is that of the database, and with SQL_ASCII text would be returned as bytes."""
_POSTGRES_POOLER_OPTIONS = {"prepare_threshold": None}
"""Settings that disable prepared statements.

Behind PgBouncer the next transaction may use another server connection, in which the name of a prepared statement is
unknown or belongs to another client's statement.
"""

_READ_ONLY_ERRORS = ("read-only transaction", "during recovery")
"""Parts of PostgreSQL's messages for operations that only a writable primary can do."""
_READ_ONLY_ADVICE = (
    "If it is a standby, give the address of the primary, or all addresses with target_session_attrs=read-write."
    " If it was made read-only, for example because its disk is full, check default_transaction_read_only."
)

_DISK_FULL_ERRORS = ("disk is full", "No space left on device", "SQLITE_IOERR_SHMSIZE")
_NO_TABLES_ADVICE = "It has no tables. Restore a backup, or start a gateway, which creates them."
_OTHER_COLUMNS_ADVICE = (
    "A build before the first release created it. Move it away, or give another one."
)
_RESTORING_ERROR = "no unique or exclusion constraint"
_SERVER_FULL_ERRORS = ("connection slots", "too many clients")
_POOLER_FULL_ERRORS = ("max_client_conn", "query_wait_timeout")

_ERROR_ADVICE = (
    *((words, _NO_TABLES_ADVICE) for words in ("no such table", "UndefinedTable")),
    *(
        (words, _OTHER_COLUMNS_ADVICE)
        for words in ("no such column", "has no column", "UndefinedColumn")
    ),
    (
        "No row was found",
        "It is damaged. Restore a backup, or move it away to start with an empty one.",
    ),
    *(
        (words, "Another process made the same change at the same time. Try again.")
        for words in ("UniqueViolation", "SerializationFailure", "DeadlockDetected")
    ),
    ("already exists", "It contains tables of another program. Use another database."),
    ("not a database", "Move that file away, or give another path."),
    ("locked", "Another process has been writing to it for too long. Try again."),
    ("readonly", "Give this user write access to the file and its folder."),
    *((words, _READ_ONLY_ADVICE) for words in _READ_ONLY_ERRORS),
    ("statement timeout", "A query took too long. Raise the statement_timeout of this user."),
    ("conflict with recovery", "A standby cancels long queries. Use the primary."),
    *((words, "Free space on its disk.") for words in _DISK_FULL_ERRORS),
    ("disk I/O error", "Check its disk for errors."),
    ("malformed", "It is damaged. Restore a backup, or move it away to start with an empty one."),
    (
        "unable to open database file",
        "Check that its folder exists and that file descriptors are available.",
    ),
    (
        "no equivalent in encoding",
        "Copy it with `argosy store copy` into a database with ENCODING 'UTF8'.",
    ),
    (
        "permission denied",
        "Let this user create and change its tables, by GRANT or by owning the schema.",
    ),
    *(
        (words, "It has too many connections. Raise its max_connections.")
        for words in _SERVER_FULL_ERRORS
    ),
    *(
        (words, "PgBouncer has too few connections. Raise its default_pool_size.")
        for words in _POOLER_FULL_ERRORS
    ),
    ("statement pooling", "Set pool_mode = transaction in PgBouncer."),
    (
        "unsupported startup parameter",
        "Remove the parameter from the URL, because PgBouncer does not forward it.",
    ),
    ("authentication failed", "Check the user and the password in the URL."),
    ("no password supplied", "Give the password in the URL or in PGPASSWORD."),
    ("no pg_hba.conf entry", "Allow this user in its pg_hba.conf."),
    (
        _RESTORING_ERROR,
        "It is being restored, or a restore ended early. Wait, or check the output of pg_restore.",
    ),
    ("does not exist", "Check the user and the database in the URL."),
    ("QueuePool", "Too many threads use it at the same time. Try again."),
    ("", "Check that it is running and reachable at this address."),
)
"""Parts of error messages with the advice for them. The first match is used."""
_TRANSIENT_ERRORS = frozenset(
    {_RESTORING_ERROR, *_READ_ONLY_ERRORS, *_SERVER_FULL_ERRORS, *_POOLER_FULL_ERRORS, ""}
)
"""Errors among them from which a database server may recover without intervention."""


_query_time_limit_s: ContextVar[float | None] = ContextVar("query_time_limit_s", default=None)


@contextmanager
def limit_query_time(limit_s: float) -> Iterator[None]:
    """Limit the time of read transactions within the context, which threads with a copy of it share.

    A transaction that takes longer raises QueryTimeoutError.
    """
    token = _query_time_limit_s.set(limit_s)
    try:
        yield
    finally:
        _query_time_limit_s.reset(token)


@contextmanager
def _limit_time(connection: Connection) -> Iterator[None]:
    """Apply the time limit of the context to a transaction that begins."""
    limit_s = _query_time_limit_s.get()
    if limit_s is None:
        yield
        return
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SET LOCAL statement_timeout = '{limit_s * 1000:.0f}ms'")
        yield
        return
    driver_connection: Any = connection.connection.driver_connection
    deadline = time.monotonic() + limit_s
    driver_connection.set_progress_handler(
        lambda: time.monotonic() > deadline, _SQLITE_TIME_CHECK_STEPS
    )
    try:
        yield
    finally:
        driver_connection.set_progress_handler(None, 0)


class Database:
    """A database, usable from any number of threads. Methods raise StoreError if it cannot be used.

    An SQLite file is in WAL mode, so there is one writer at a time and readers never wait. A commit survives the death
    of the process. The most recent commits may be lost if the machine crashes.

    Args:
        url: URL of the database. None for one in this process's memory, which ends with this object.
    """

    def __init__(self, url: str | None) -> None:
        is_in_memory = url is None
        parsed = make_url(MEMORY_URL) if url is None else parse_url(url)
        self.display_name = parsed.database or "in memory"
        """Name for messages, without user and password."""
        if parsed.get_backend_name() == "sqlite":
            self._engine = (
                _create_memory_engine() if is_in_memory else _create_sqlite_engine(parsed)
            )
            self._read_options: dict[str, Any] = {}
            self._write_options: dict[str, Any] = _SQLITE_WRITE_OPTIONS
            self._snapshot_write_options = self._write_options
        else:
            public_url = URL.create(
                "postgresql", host=parsed.host, port=parsed.port, database=parsed.database
            )
            self.display_name = public_url.render_as_string()
            self._engine = _create_postgres_engine(parsed)
            self._read_options = self._snapshot_write_options = _POSTGRES_SNAPSHOT_OPTIONS
            self._write_options = _POSTGRES_WRITE_OPTIONS

    @classmethod
    def open_existing(cls, url: str) -> Database:
        """Open a database that already has Argosy's tables, without creating anything. Raises StoreError otherwise."""
        path = sqlite_path(url)
        if path is not None:
            try:
                path.stat()
            except OSError as error:
                raise _missing_store_error(f"{path} ({error.strerror})") from error
        database = cls(url)
        with database.read_transaction() as connection:
            has_tables = inspect(connection).has_table("state")
        if not has_tables:
            database.close()
            raise _missing_store_error(database.display_name)
        return database

    @contextmanager
    def read_transaction(self) -> Iterator[Connection]:
        """Open a transaction that sees one state of the database, unaffected by concurrent writes."""
        with self.translate_errors(), self._engine.connect() as connection:
            connection.execution_options(**self._read_options)
            with _limit_time(connection):
                yield connection

    @contextmanager
    def write_transaction(
        self, *, is_snapshot: bool = False, idle_timeout_s: float | None = None
    ) -> Iterator[Connection]:
        """Open a transaction that is committed at the end, or rolled back if the block raises.

        A snapshot sees only the state of the database at its first query and its own writes. PostgreSQL ends the
        transaction after `idle_timeout_s` between two queries, by default `POSTGRES_IDLE_TIMEOUT_S`.
        """
        with self.translate_errors(), self._engine.connect() as connection:
            connection.execution_options(
                **self._snapshot_write_options if is_snapshot else self._write_options
            )
            with connection.begin():
                if connection.dialect.name == "postgresql":
                    timeout_s = idle_timeout_s or POSTGRES_IDLE_TIMEOUT_S
                    connection.exec_driver_sql(
                        f"SET LOCAL idle_in_transaction_session_timeout = '{timeout_s * 1000:.0f}ms'"
                    )
                yield connection

    def find_write_problem(self) -> str:
        """Try a write that changes nothing. Return why it fails, with what to do; empty if it succeeds."""
        try:
            with self.translate_errors(), self._engine.connect() as connection:
                driver_connection: Any = connection.connection.driver_connection
                if connection.dialect.name == "sqlite":
                    driver_connection.execute(f"PRAGMA busy_timeout = {PROBE_TIMEOUT_S * 1000:.0f}")
                connection.execution_options(**self._write_options)
                try:
                    with connection.begin():
                        for statement in _PROBE_STATEMENTS:
                            connection.exec_driver_sql(statement)
                finally:
                    if connection.dialect.name == "sqlite":
                        driver_connection.execute(
                            f"PRAGMA busy_timeout = {SQLITE_BUSY_TIMEOUT_S * 1000:.0f}"
                        )
        except StoreError as error:
            return str(error)
        return ""

    @property
    def _reserve(self) -> Path | None:
        """File that occupies space for the time when the disk is full; None for a server's database."""
        name = self._engine.url.database
        is_file = self._engine.dialect.name == "sqlite" and name is not None
        return Path(f"{name}-reserve") if is_file else None

    @property
    def is_file(self) -> bool:
        """Whether the database is an SQLite file."""
        return self._reserve is not None

    def copy_pages_to(self, target: Database) -> None:
        """Replace an SQLite file by the pages of this one, as of one moment. Writers of this one do not wait."""
        with (
            self.translate_errors(),
            self._engine.connect() as source,
            target.translate_errors(),
            target._engine.connect() as copy,
        ):
            driver_connection: Any = source.connection.driver_connection
            try:
                driver_connection.backup(copy.connection.driver_connection)
            except SqliteError as error:
                raise StoreError(
                    f"{self.display_name} cannot be copied to {target.display_name}: {error}."
                    " Check both disks for errors and free space."
                ) from error

    def find_damage(self) -> str:
        """Return the first damage of an SQLite file's pages; empty if there is none, or a server has the database."""
        if not self.is_file:
            return ""
        with self.read_transaction() as connection:
            found = str(connection.exec_driver_sql("PRAGMA integrity_check(1)").scalar_one())
        return "" if found == "ok" else found

    def keep_reserve(self) -> None:
        """Occupy space beside an SQLite file, which `release_reserve` frees. Without room for it there is none."""
        path = self._reserve
        if path is None or path.exists():
            return
        try:
            with path.open("xb") as file:
                file.write(bytes(RESERVE_BYTES))
        except OSError:
            path.unlink(missing_ok=True)

    def release_reserve(self) -> bool:
        """Free the reserved space, so that a full disk takes a few more writes. Return whether there was some."""
        path = self._reserve
        if path is None or not path.exists():
            return False
        path.unlink()
        return True

    def give_back_space(self) -> bool:
        """Give some unused pages of an SQLite file back to the file system. Returns whether there may be more.

        Files that were created without `auto_vacuum` keep their pages, and use them again. PostgreSQL does both itself.
        """
        if self._engine.dialect.name != "sqlite":
            return False
        with self.translate_errors(), self._engine.connect() as connection:
            unused = connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()
            connection.rollback()
            driver_connection: Any = connection.connection.driver_connection
            try:  # a script, since a statement without rows is stepped only once, which gives back one page
                driver_connection.executescript(
                    f"PRAGMA incremental_vacuum({SQLITE_VACUUM_PAGES});"
                )
            except OperationalError as error:
                raise StoreError(
                    f"Space of {self.display_name} cannot be given back: {error}."
                ) from error
            left = connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()
        return bool(0 < left < unused)

    @contextmanager
    def erasing_deletions(self) -> Iterator[None]:
        """Overwrite what transactions of this process delete from an SQLite file, and then its log and unused pages.

        PostgreSQL does so in its VACUUM.
        """
        if self._engine.dialect.name != "sqlite":
            yield
            return
        event.listen(self._engine, "checkout", _overwrite_deletions)
        try:
            yield
        finally:
            event.remove(self._engine, "checkout", _overwrite_deletions)
            self._engine.dispose()
        while self.give_back_space():
            pass
        with self.translate_errors(), self._engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").close()

    def close(self) -> None:
        """Close all connections. Later transactions, such as those of other threads, open and close their own."""
        event.listen(self._engine, "checkin", _close_connection)
        self._engine.dispose()

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Raise driver errors as StoreError or StoreUnavailableError, with the name of this database and advice."""
        try:
            yield
        except NoResultFound as error:
            raise StoreError(
                f"The database {self.display_name} lacks its row in the table 'state'. Restore a backup."
            ) from error
        except (DBAPIError, PoolTimeoutError) as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            text = f"{type(cause).__name__} {getattr(cause, 'sqlite_errorname', '')}: {cause}"
            limit_s = _query_time_limit_s.get()
            if limit_s is not None and any(words in text for words in _TIMEOUT_ERRORS):
                message = f"The query takes longer than {limit_s:g} s. Choose a shorter time or fewer groups."
                raise QueryTimeoutError(message) from error
            known, advice = next(known for known in _ERROR_ADVICE if known[0] in text)
            first_line = str(cause).strip().partition("\n")[0]
            if known in _READ_ONLY_ERRORS:
                self._engine.dispose()  # the host name may resolve to the primary by now
            is_transient = known in _TRANSIENT_ERRORS and (known or isinstance(error, ServerError))
            is_remote = self._engine.dialect.name == "postgresql"
            error_type = StoreUnavailableError if is_transient and is_remote else StoreError
            raise error_type(
                f"The database {self.display_name} cannot be used: {first_line}. {advice}"
            ) from error


def _missing_store_error(name: str) -> StoreError:
    return StoreError(
        f"There is no Argosy store in {name}. Check the URL, or create a store with `argosy keys create`."
    )


def conflict_aware_insert(
    connection: Connection, table: Table
) -> sqlite.Insert | postgresql.Insert:
    """Return an insert of the connection's dialect, which can name what happens if a row exists."""
    insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    return insert(table)


def parse_url(url: str) -> URL:
    """Parse a database URL.

    Raises:
        StoreError: The URL is not valid or names an unsupported database. The message does not show the URL, which may
            contain a password.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        parsed = URL.create("none")
    if parsed.drivername in {"postgres", "postgresql", "postgresql+psycopg"}:
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername == "sqlite" and parsed.database not in {None, "", ":memory:"}:
        if parsed.host is None and not parsed.query:
            return parsed
        raise StoreError(
            "An SQLite URL has only a path. Write sqlite:///relative or sqlite:////absolute."
        )
    raise StoreError(
        "The database URL is not valid (it may contain a password, so it is not shown). "
        "Write sqlite:///path/to/argosy.db or postgresql://user:password@host/database."
    )


def sqlite_path(url: str) -> Path | None:
    """Return the file of an SQLite URL, or None for another database. Raises StoreError like `parse_url`."""
    parsed = parse_url(url)
    return Path(parsed.database or "") if parsed.get_backend_name() == "sqlite" else None


def sqlite_url(path: Path) -> str:
    """Return the URL of an SQLite file. Characters that mean something in a URL are quoted."""
    return URL.create("sqlite", database=str(path)).render_as_string()


def _create_sqlite_engine(url: URL) -> Engine:
    path = Path(url.database or "")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.is_file():
            # Closing a file that exists would drop the locks that this process has of it (fcntl(2)). Another process
            # could then delete the write-ahead log.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        elif not os.access(path, os.R_OK | os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise StoreError(
            f"The database {path} cannot be opened ({error.strerror}). Give a path that this user can write to."
        ) from error
    engine = create_engine(
        url, connect_args={"timeout": SQLITE_BUSY_TIMEOUT_S}, hide_parameters=True
    )
    guard = _FileGuard(path)
    event.listen(engine, "do_connect", guard.check_unchanged)
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "checkout", guard.check_unchanged)
    event.listen(engine, "begin", _begin_sqlite_transaction)
    return engine


def _create_memory_engine() -> Engine:
    """Create the engine of a database in memory, whose only connection the threads use in turn."""
    engine = create_engine(
        MEMORY_URL,
        connect_args={"check_same_thread": False},
        poolclass=QueuePool,
        pool_size=1,
        max_overflow=0,
    )
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite_transaction)
    return engine


def _close_connection(_connection: object, record: ConnectionPoolEntry) -> None:
    record.close()


def _create_postgres_engine(url: URL) -> Engine:
    logging.getLogger("psycopg").setLevel(
        logging.ERROR
    )  # psycopg also raises what it logs as warnings
    timeouts = {name: value for name, value in _POSTGRES_TIMEOUTS.items() if name not in url.query}
    args = timeouts | _POSTGRES_ENCODING | _POSTGRES_POOLER_OPTIONS
    try:
        engine = create_engine(url, connect_args=args, pool_pre_ping=True, hide_parameters=True)
    except ImportError as error:
        raise StoreError(f"PostgreSQL needs its driver: {install_command('postgres')}") from error

    # `Engine.dispose` replaces the pool, and forgets the connections that another thread uses at that moment.
    def remember_pool(_connection: object, record: ConnectionPoolEntry, proxy: Any) -> None:  # noqa: ANN401 - private
        record.info["pool"] = proxy._pool  # noqa: SLF001 - that of the engine may be another one by now

    def close_if_replaced(_connection: object, record: ConnectionPoolEntry) -> None:
        if record.info.get("pool") is not engine.pool:
            record.close()

    event.listen(engine, "checkout", remember_pool)
    event.listen(engine, "checkin", close_if_replaced)
    return engine


def _configure_sqlite(connection: SqliteConnection, _: object) -> None:
    """Configure a new SQLite connection. `_begin_sqlite_transaction` begins transactions instead of the driver."""
    connection.isolation_level = None
    (num_pages,) = connection.execute("PRAGMA page_count").fetchone()
    if (
        not num_pages
    ):  # that of a file with tables cannot change, and its setting needs space on the disk
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL").close()
    _enable_wal(connection)
    limits_log = f"journal_size_limit={SQLITE_LOG_BYTES}"
    for setting in ("synchronous=NORMAL", "foreign_keys=ON", limits_log):
        connection.execute(f"PRAGMA {setting}").close()


def _overwrite_deletions(connection: SqliteConnection, *_: object) -> None:
    connection.execute("PRAGMA secure_delete=ON").close()


class _FileGuard:
    """Detects that an SQLite file was removed or replaced while in use.

    Writes to a removed file would be lost. A connection to the replacement would apply the old file's write-ahead log
    to it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file_id = _get_file_id(path)

    def check_unchanged(self, *_: object) -> None:
        """Raise StoreError if the file has been removed or replaced.

        Once that happened every later call raises too, because a new file may reuse the inode number of the old one.
        """
        if self._file_id is None or _get_file_id(self._path) != self._file_id:
            self._file_id = None
            raise StoreError(
                f"The database {self._path} was replaced or removed while it was in use. Stop this process, move away"
                f" the old files {self._path}-wal and {self._path}-shm, and start it again."
            )


def _get_file_id(path: Path) -> tuple[int, int] | None:
    """Return the device and inode number of a file, or None if it does not exist."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _enable_wal(connection: SqliteConnection) -> None:
    """Switch the file to WAL mode, which is persistent.

    SQLite's busy timeout does not cover the switch, so this function retries while other processes use the file.
    """
    deadline = time.monotonic() + SQLITE_BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL").close()
        except OperationalError as error:
            if (
                error.sqlite_errorcode & 0xFF not in _SQLITE_BUSY_CODES
                or time.monotonic() > deadline
            ):
                raise
            time.sleep(0.01)
        else:
            return


def _begin_sqlite_transaction(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))
