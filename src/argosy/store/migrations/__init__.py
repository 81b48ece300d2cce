"""Brings a database's tables to where `schema.py` has them, step by step, by the files in `versions`."""

from __future__ import annotations

import threading
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import func, select

from argosy.store.database import Database
from argosy.store.errors import StoreError

_LOCK = 0x4172676F7379
"""Of PostgreSQL's advisory locks, the one that migrations hold."""

_alone = threading.Lock()
"""Alembic's context is one for the whole process."""


def migrate(database: Database) -> None:
    """Run the migrations that have not run yet, all of them or none. Several processes wait for each other.

    Raises StoreError when the tables are those of a newer Argosy.
    """
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    scripts = ScriptDirectory.from_config(config)
    with _alone, database.write() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))
        found = MigrationContext.configure(connection).get_current_revision()
        if found == scripts.get_current_head():
            return
        if found is not None and found not in {step.revision for step in scripts.walk_revisions()}:
            raise StoreError(
                f"The tables of {database.name} are those of a newer Argosy ({found}): update this one."
            )
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
