"""The store as a whole: opened by its URL, migrated, and read as one directory."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
from sqlalchemy import select

from argosy.folders import state_folder
from argosy.store import schema
from argosy.store.accounts import Accounts
from argosy.store.audit import AuditLog
from argosy.store.database import Database, parse_url
from argosy.store.errors import StoreError
from argosy.store.ledger import Ledger
from argosy.store.limits_and_prices import LimitsAndPrices
from argosy.store.records import AccountSnapshot
from argosy.store.snapshot_reader import read_snapshot
from argosy.store.store_copy import copy_database

EXPIRED_KEY_RETENTION_S = 30 * 86_400
"""How long an expired key stays in the directory."""
_POSTGRES_LOCATION_VARIABLES = {
    "host": "PGHOST",
    "port": "PGPORT",
    "dbname": "PGDATABASE",
    "hostaddr": "PGHOSTADDR",
    "service": "PGSERVICE",
    "options": "PGOPTIONS",
}
"""What says which database of PostgreSQL is meant, in a URL or in the environment: tables may be in several schemas."""


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where durable state is kept."""

    url: str | None = None
    """`sqlite:///path` or `postgresql://user:password@host/database`; by default `default_url()`."""
    keep_usage_days: Annotated[int, msgspec.Meta(ge=1, le=36_500)] | None = None
    """Days that rows of the ledger are kept; older ones are summed by day. None: for ever."""


class Store:
    """Durable state, for any number of threads and processes.

    Every call may wait for the database, so none is for an event loop. Raises StoreError, saying what to
    change, whenever the database cannot be used.
    """

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock
        self._last_snapshot: AccountSnapshot | None = None
        self.accounts = Accounts(database, clock)
        self.limits_and_prices = LimitsAndPrices(database, clock)
        self.audit_log = AuditLog(database)
        self.ledger = Ledger(database)

    def migrate(self) -> None:
        """Bring the tables up to date. Any number of processes may do this at a time."""
        from argosy.store.migrations import migrate  # Alembic takes long to import

        migrate(self._database)

    def copy_to(self, other: Store) -> int:
        """Copy all that is kept into a store that keeps nothing yet; how many rows.

        They are as of one moment, whoever writes meanwhile. Raises ConflictError when the other is not empty.
        """
        return copy_database(self._database, other._database)

    def close(self) -> None:
        """Close its connections."""
        self._database.close()

    def is_current(self, snapshot: AccountSnapshot) -> bool:
        """Whether these are the accounts as they are now; one small query.

        The seal of the last change tells: a backup that was put back may come to the same version by other changes.
        """
        with self._database.read_transaction() as connection:
            head = connection.execute(select(schema.state.c.audit_head)).scalar_one()
        return bytes(head) == snapshot.audit_head

    def load_snapshot(self) -> AccountSnapshot:
        """All accounts, as of one version. What has not changed since this was last asked is not read again."""
        read_at, expired = time.monotonic(), self._clock() - EXPIRED_KEY_RETENTION_S
        with self._database.read_transaction() as connection:
            self._last_snapshot = found = read_snapshot(
                connection, self._last_snapshot, read_at=read_at, expired_before=expired
            )
        return found


def open_store(url: str, *, clock: Callable[[], float] = time.time) -> Store:
    """The store at a URL, made if it is an SQLite file that does not exist; call `migrate` before anything else.

    `sqlite:///path` or `postgresql://user:password@host:port/database`. Raises StoreError.
    """
    return Store(Database(url), clock)


def open_existing_store(url: str) -> Store:
    """The store at a URL, where there is one: a mistyped URL makes none. Raises StoreError; else as `open_store`."""
    return Store(Database.open_existing(url), time.time)


def default_store_url() -> str:
    """SQLite in the user's state folder. Raises StoreError for a user without a home."""
    try:
        return f"sqlite:///{state_folder() / 'argosy.db'}"
    except FileNotFoundError as error:
        raise StoreError(f"There is no place for a store: {error}, or name a database.") from error


def usage_log_folder(url: str) -> Path:
    """Where usage waits for the store: beside its file, or in the user's state folder, one folder for each database.

    Raises StoreError as `default_url` does, and for what is no URL.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        return Path(f"{parsed.database}.usage")
    written = {"host": parsed.host, "port": parsed.port, "dbname": parsed.database}
    host, port, database, *others = (
        written.get(name) or parsed.query.get(name) or os.environ.get(variable)
        for name, variable in _POSTGRES_LOCATION_VARIABLES.items()
    )
    place = f"postgresql://{host}:{port}/{database or parsed.username}"
    place = " ".join([place, *(str(other) for other in others if other)])
    name = hashlib.sha256(place.encode()).hexdigest()[:16]
    try:
        return state_folder() / "usage" / name
    except FileNotFoundError as error:
        raise StoreError(f"There is no place for usage: {error}.") from error
