"""The database: from a URL to an engine, and transactions that read or write."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from sqlite3 import SQLITE_BUSY, SQLITE_PROTOCOL, OperationalError
from sqlite3 import Connection as SqliteConnection
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoResultFound
from sqlalchemy.exc import OperationalError as ServerError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from argosy.store.errors import StoreError, StoreUnavailableError

SQLITE_BUSY_TIMEOUT_S = 15.0
"""How long a writer waits for other writers of an SQLite file."""
POSTGRES_IDLE_TIMEOUT_S = 15
"""How long a writer of PostgreSQL may do nothing: if its machine vanished, all others would wait for hours."""

_SQLITE_BUSY_CODES = frozenset({SQLITE_BUSY, SQLITE_PROTOCOL})
"""Errors of who comes while others use an SQLite file; its other ones do not pass by themselves."""
_SQLITE_WRITE_OPTIONS = {"begin": "BEGIN IMMEDIATE"}
_POSTGRES_SNAPSHOT_OPTIONS = {"isolation_level": "REPEATABLE READ"}
"""Reads too. Said to be read-only, they would have later writes of their connection insist on writing, whatever
`default_transaction_read_only` says, and refused by a standby before they ask anything."""
_POSTGRES_WRITE_OPTIONS = {"isolation_level": "READ COMMITTED"}
_POSTGRES_TIMEOUTS = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,  # milliseconds
}
"""A server that has vanished is noticed in seconds, not when TCP gives up."""
_POSTGRES_ENCODING = {"client_encoding": "utf8"}
"""Else text is what the database's encoding makes of it: bytes, where that is SQL_ASCII."""
_POSTGRES_POOLER_OPTIONS = {"prepare_threshold": None}
"""Nothing is prepared: behind PgBouncer the next transaction may be another connection's, where a name that was given
here is unknown, or stands for what somebody else has prepared."""

_READ_ONLY_ERRORS = ("read-only transaction", "during recovery")
"""What PostgreSQL says where only the primary may do something."""
_READ_ONLY_ADVICE = (
    "It is a standby: give the address of the primary, or all with target_session_attrs=read-write."
    " Or it was made read-only, as where its disk is full: see default_transaction_read_only."
)

_DISK_FULL_ERRORS = ("disk is full", "No space left on device", "SQLITE_IOERR_SHMSIZE")
_NO_TABLES_ADVICE = "It has no tables: put a backup back, or start a gateway, which makes them."
_RESTORING_ERROR = "no unique or exclusion constraint"
_SERVER_FULL_ERRORS = ("connection slots", "too many clients")
_POOLER_FULL_ERRORS = ("max_client_conn", "query_wait_timeout")

_ERROR_ADVICE = (
    *((words, _NO_TABLES_ADVICE) for words in ("no such table", "UndefinedTable")),
    (
        "No row was found",
        "It is damaged: put it back from a backup, or move it away to begin anew.",
    ),
    *(
        (words, "Somebody else did the same at this moment: try again.")
        for words in ("UniqueViolation", "SerializationFailure", "DeadlockDetected")
    ),
    ("already exists", "It has tables that are not ours: give another database."),
    ("not a database", "Move that file away, or give another path."),
    ("locked", "Another process has been writing to it for long: try again."),
    ("readonly", "Let this user write to the file and to its folder."),
    *((words, _READ_ONLY_ADVICE) for words in _READ_ONLY_ERRORS),
    ("statement timeout", "Let what this user asks take longer: raise its statement_timeout."),
    ("conflict with recovery", "A standby ends what takes long: ask the primary."),
    *((words, "Make room on its disk.") for words in _DISK_FULL_ERRORS),
    ("disk I/O error", "Look after its disk."),
    ("malformed", "It is damaged: put it back from a backup, or move it away to begin anew."),
    ("unable to open database file", "See that its folder is there, and descriptors are left."),
    ("no equivalent in encoding", "Copy it (`argosy store copy`) into one with ENCODING 'UTF8'."),
    ("permission denied", "Let this user make and change its tables: GRANT, or own its schema."),
    *((words, "Let more connect: raise its max_connections.") for words in _SERVER_FULL_ERRORS),
    *(
        (words, "Let PgBouncer have more: see its default_pool_size.")
        for words in _POOLER_FULL_ERRORS
    ),
    ("statement pooling", "Have PgBouncer pool otherwise: pool_mode = transaction."),
    ("unsupported startup parameter", "Leave it out of the URL: PgBouncer does not pass it on."),
    ("authentication failed", "Check the user and the password in the URL."),
    ("no password supplied", "Give its password, in the URL or as PGPASSWORD."),
    ("no pg_hba.conf entry", "Let this user in: see its pg_hba.conf."),
    (
        _RESTORING_ERROR,
        "It is being restored, or was so half way: wait, or look what pg_restore said.",
    ),
    ("does not exist", "Check the user and the database in the URL."),
    ("QueuePool", "Too many threads use it at a time: try again."),
    ("", "Is it running, and can it be reached at this address?"),
)
"""What to do about an error that has these words in it; the first that fits."""
_TRANSIENT_ERRORS = frozenset(
    {_RESTORING_ERROR, *_READ_ONLY_ERRORS, *_SERVER_FULL_ERRORS, *_POOLER_FULL_ERRORS, ""}
)
"""Those of them that a server of its own may get over by itself."""


class Database:
    """One database, for any number of threads. Raises StoreError whenever it cannot be used.

    An SQLite file is in WAL mode: one writer at a time, readers never wait, and a commit survives the death
    of the process (of the machine: all but the last ones).
    """

    def __init__(self, url: str) -> None:
        parsed = parse_url(url)
        self.display_name = parsed.database or "?"
        """For people; without user and password."""
        if parsed.get_backend_name() == "sqlite":
            self._engine = _create_sqlite_engine(parsed)
            self._read_options: dict[str, Any] = {}
            self._write_options: dict[str, Any] = _SQLITE_WRITE_OPTIONS
            self._snapshot_write_options = self._write_options
        else:
            plain = URL.create(
                "postgresql", host=parsed.host, port=parsed.port, database=parsed.database
            )
            self.display_name = plain.render_as_string()
            self._engine = _create_postgres_engine(parsed)
            self._read_options = self._snapshot_write_options = _POSTGRES_SNAPSHOT_OPTIONS
            self._write_options = _POSTGRES_WRITE_OPTIONS

    @classmethod
    def open_existing(cls, url: str) -> Database:
        """The database at a URL, which has tables of ours. Raises StoreError where there is none, and makes none."""
        path = parse_url(url).database or ""
        if url.startswith("sqlite"):
            try:
                Path(path).stat()
            except OSError as error:
                raise _missing_store_error(f"{path} ({error.strerror})") from error
        database = cls(url)
        with database.read_transaction() as connection:
            ours = inspect(connection).has_table("state")
        if not ours:
            database.close()
            raise _missing_store_error(database.display_name)
        return database

    @contextmanager
    def read_transaction(self) -> Iterator[Connection]:
        """A transaction that sees one state of the database, whatever others write meanwhile."""
        with self.translate_errors(), self._engine.connect() as connection:
            connection.execution_options(**self._read_options)
            yield connection

    @contextmanager
    def write_transaction(self, *, is_snapshot: bool = False) -> Iterator[Connection]:
        """A transaction, committed at the end, or rolled back when an exception comes out of it.

        A `steady` one sees one state of the database, that of its first query, and what it did itself.
        """
        with self.translate_errors(), self._engine.connect() as connection:
            connection.execution_options(
                **self._snapshot_write_options if is_snapshot else self._write_options
            )
            with connection.begin():
                if connection.dialect.name == "postgresql":
                    limit = f"SET LOCAL idle_in_transaction_session_timeout = '{POSTGRES_IDLE_TIMEOUT_S}s'"
                    connection.exec_driver_sql(limit)
                yield connection

    def close(self) -> None:
        """Close every connection. Used again, it opens new ones."""
        self._engine.dispose()

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Whatever its driver raises is told as a StoreError that names this database."""
        try:
            yield
        except NoResultFound as error:
            raise StoreError(
                f"The database {self.display_name} lacks its row of state, which nobody should remove: restore a backup."
            ) from error
        except (DBAPIError, PoolTimeoutError) as error:
            said = error.orig if isinstance(error, DBAPIError) else error
            told = f"{type(said).__name__} {getattr(said, 'sqlite_errorname', '')}: {said}"
            known, advice = next(known for known in _ERROR_ADVICE if known[0] in told)
            first = str(said).strip().partition("\n")[0]
            if known in _READ_ONLY_ERRORS:
                self._engine.dispose()  # its name may be the primary's by now
            away = known in _TRANSIENT_ERRORS and (known or isinstance(error, ServerError))
            remote = self._engine.dialect.name == "postgresql"
            kind = StoreUnavailableError if away and remote else StoreError
            raise kind(
                f"The database {self.display_name} cannot be used: {first}. {advice}"
            ) from error


def _missing_store_error(name: str) -> StoreError:
    return StoreError(
        f"Argosy keeps nothing in {name}: check the URL, or begin there with `argosy keys create`."
    )


def parse_url(url: str) -> URL:
    """Raises StoreError, not showing it, when it is none of a database that there is a driver for."""
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
            "An SQLite URL has a path only: write sqlite:///relative or sqlite:////absolute."
        )
    raise StoreError(
        "This is no URL of a database (it may have a password, so it is not shown): "
        "write sqlite:///path/to/argosy.db or postgresql://user:password@host/database."
    )


def _create_sqlite_engine(url: URL) -> Engine:
    path = Path(url.database or "")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise StoreError(
            f"The database {path} cannot be opened ({error.strerror}): give a path that this user may write to."
        ) from error
    engine = create_engine(
        url, connect_args={"timeout": SQLITE_BUSY_TIMEOUT_S}, hide_parameters=True
    )
    file = _FileGuard(path)
    event.listen(engine, "do_connect", file.check_unchanged)
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "checkout", file.check_unchanged)
    event.listen(engine, "begin", _begin_sqlite_transaction)
    return engine


def _create_postgres_engine(url: URL) -> Engine:
    logging.getLogger("psycopg").setLevel(logging.ERROR)  # what it warns of besides is raised too
    patience = {name: s for name, s in _POSTGRES_TIMEOUTS.items() if name not in url.query}
    args = patience | _POSTGRES_ENCODING | _POSTGRES_POOLER_OPTIONS
    try:
        return create_engine(url, connect_args=args, pool_pre_ping=True, hide_parameters=True)
    except ImportError as error:
        raise StoreError("PostgreSQL needs its driver: pip install 'argosy[postgres]'.") from error


def _configure_sqlite(connection: SqliteConnection, _: object) -> None:
    """Settings of a new SQLite connection. `_begin` begins transactions, not the driver."""
    connection.isolation_level = None
    _enable_wal(connection)
    for setting in ("synchronous=NORMAL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {setting}").close()


class _FileGuard:
    """Whoever goes on with a file that was removed or replaced loses what they write.

    Whoever opens what is there instead gives it what the old one had in its write-ahead log.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file_id = _get_file_id(path)

    def check_unchanged(self, *_: object) -> None:
        """Raises StoreError once it is another one, and from then on: that may get the old one's number."""
        if self._file_id is None or _get_file_id(self._path) != self._file_id:
            self._file_id = None
            raise StoreError(
                f"The database {self._path} was replaced or removed while it was in use: end this process, move away"
                f" what the old one left in {self._path}-wal and {self._path}-shm, and start it again."
            )


def _get_file_id(path: Path) -> tuple[int, int] | None:
    """What tells a file from all others; None: there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _enable_wal(connection: SqliteConnection) -> None:
    """WAL, which a file keeps; SQLite does not wait for others while a file changes over to it, so we do."""
    patience = time.monotonic() + SQLITE_BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL").close()
        except OperationalError as error:
            if (
                error.sqlite_errorcode & 0xFF not in _SQLITE_BUSY_CODES
                or time.monotonic() > patience
            ):
                raise
            time.sleep(0.01)
        else:
            return


def _begin_sqlite_transaction(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))
