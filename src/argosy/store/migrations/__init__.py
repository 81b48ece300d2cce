"""Brings a database's tables to where `schema.py` has them, step by step, by the files in `versions`."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import func, select

from argosy.store.database import Database
from argosy.store.errors import StoreError

log = logging.getLogger("argosy.store")
"""Commands migrate too, and what they print is no place for this."""

LOCK_TIMEOUT_S = 2
"""How long a step waits for those who use a table of PostgreSQL: whoever comes after waits for both."""
RETRY_INTERVAL_S = 5.0
"""Then all others have so long."""
_LOCK_NOT_AVAILABLE = "55P03"
"""What PostgreSQL says then."""
_ADVISORY_LOCK_ID = 0x4172676F7379
"""Of PostgreSQL's advisory locks, the one that migrations hold."""

_alembic_lock = threading.Lock()
"""Alembic's context is one for the whole process."""


def migrate(database: Database) -> None:
    """Run the migrations that have not run yet, all of them or none. Several processes wait for each other.

    Who uses a table for long (a backup does) is waited for, without keeping others from it meanwhile. Raises
    StoreError when the tables are those of a newer Argosy.
    """
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
                "The tables of %s are used by somebody: waiting for that.", database.display_name
            )
        time.sleep(RETRY_INTERVAL_S)


def _run_migrations(database: Database) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    scripts = ScriptDirectory.from_config(config)
    with _alembic_lock, database.write_transaction() as connection:
        postgresql = connection.dialect.name == "postgresql"
        if postgresql:
            connection.execute(select(func.pg_advisory_xact_lock(_ADVISORY_LOCK_ID)))
        found = MigrationContext.configure(connection).get_current_revision()
        if found == scripts.get_current_head():
            return
        if found is not None and found not in {step.revision for step in scripts.walk_revisions()}:
            raise StoreError(
                f"The tables of {database.display_name} are those of a newer Argosy ({found}): update this one."
            )
        if postgresql:
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'")
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
