"""Creates a database's tables as in `schema.py`, or changes older ones by the steps in `versions`, which Alembic runs.

A change of `schema.py` after a release needs a step for the databases that exist. Alembic takes long to import, and is
imported only if tables are not the newest ones.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from pathlib import Path

from sqlalchemy import func, inspect, select, text

from argosy.store import schema
from argosy.store.database import Database
from argosy.store.errors import StoreError

log = logging.getLogger("argosy.store")
"""Standard logger instead of structlog, because commands migrate too and must keep their output clean."""

LOCK_TIMEOUT_S = 2
"""Maximum wait for a PostgreSQL table lock. Later queries of the table queue behind the waiting migration."""
RETRY_INTERVAL_S = 5.0
"""Pause before the next attempt, in which queued queries can run."""
_LOCK_NOT_AVAILABLE = "55P03"
"""SQLSTATE of PostgreSQL's lock timeout."""
_ADVISORY_LOCK_ID = 0x4172676F7379
"""Id of the PostgreSQL advisory lock that migrations hold."""

NEWEST_REVISION = "0015"
"""Revision of the last step in `versions`."""
STEP_FOLDERS = (Path(__file__).parent / "versions",)

_alembic_lock = threading.Lock()
"""Serialises migrations, because Alembic's context is global to the process."""


def migrate(database: Database) -> None:
    """Create the tables or run all pending steps, in one transaction. Concurrent processes wait for each other.

    A long user of a table, such as a backup, delays the migration but not other users of the table.

    Raises:
        StoreError: The tables belong to a newer version of Argosy, or the database cannot be used.
    """
    if _read_revision(database) == NEWEST_REVISION:
        return
    for attempt in itertools.count():
        try:
            _run_migrations(database)
        except StoreError as error:
            if (
                getattr(getattr(error.__cause__, "orig", None), "sqlstate", None)
                != _LOCK_NOT_AVAILABLE
            ):
                raise
        else:
            return
        if not attempt:
            log.warning(
                "The tables of %s are in use. Waiting until they are free.", database.display_name
            )
        time.sleep(RETRY_INTERVAL_S)


def _read_revision(database: Database) -> str | None:
    """Return the revision of the tables without Alembic, or None if there are none."""
    with database.read_transaction() as connection:
        if not inspect(connection).has_table("alembic_version"):
            return None
        revision: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
        return revision


def _run_migrations(database: Database) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    config = Config()
    folders = "\n".join(map(str, STEP_FOLDERS))
    for option, value in (
        ("script_location", str(Path(__file__).parent)),
        ("version_locations", folders),
        ("path_separator", "newline"),
    ):
        config.set_main_option(option, value.replace("%", "%%"))
    scripts = ScriptDirectory.from_config(config)
    with _alembic_lock, database.write_transaction() as connection:
        is_postgresql = connection.dialect.name == "postgresql"
        if is_postgresql:
            connection.execute(select(func.pg_advisory_xact_lock(_ADVISORY_LOCK_ID)))
        revision = MigrationContext.configure(connection).get_current_revision()
        if revision == scripts.get_current_head():
            return
        if revision is not None and revision not in {
            step.revision for step in scripts.walk_revisions()
        }:
            raise StoreError(
                f"The tables of {database.display_name} belong to a newer Argosy ({revision}). Update this one."
            )
        if is_postgresql:
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'")
        config.attributes["connection"] = connection
        if revision is None:
            schema.metadata.create_all(connection, checkfirst=False)
            command.stamp(config, "head")
        else:
            command.upgrade(config, "head")
