"""Random keys that all gateways on one store share, created by the first gateway that needs them."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from sqlalchemy import select

from argosy.store import schema
from argosy.store.database import Database, conflict_aware_insert


class SecretStore:
    """Keys by name. Every call may block on the database."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def get_or_create(self, name: str, size_bytes: int) -> bytes:
        """Return the key with this name. The first call creates it with `size_bytes` random bytes."""
        table = schema.secrets
        row = {
            "name": name,
            "value": secrets.token_bytes(size_bytes),
            "created_at": self._clock(),
        }
        with self._database.write_transaction() as connection:
            statement = conflict_aware_insert(connection, table).values(row)
            connection.execute(statement.on_conflict_do_nothing(index_elements=["name"]))
            query = select(table.c.value).where(table.c.name == name)
            return bytes(connection.execute(query).scalar_one())
