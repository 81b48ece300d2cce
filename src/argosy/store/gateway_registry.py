"""The gateways that run on one store: what another gateway needs to ask them, and the random keys that they share."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

import msgspec
from sqlalchemy import delete, select

from argosy.store import schema
from argosy.store.database import Database, conflict_aware_insert

LIVENESS_TIMEOUT_S = 60.0
"""Time after its last heartbeat after which a gateway counts as gone."""
RECORD_RETENTION_S = 86_400.0
"""Time after which the record of a gateway that is gone is removed. Clocks of machines may differ."""


class GatewayRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A running gateway."""

    id: str
    url: str
    """Address at which other gateways reach it."""
    secret: str
    """Key with which other gateways sign questions to it. New for each process."""
    certificate: str = ""
    """Its TLS certificate (PEM), by which others recognise it. Empty without TLS."""
    seen_at: float = 0.0
    """Time of the last heartbeat, in seconds since the epoch. The registry sets it."""


class GatewayRegistry:
    """Records of running gateways. Every call may block on the database."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def record_heartbeat(self, record: GatewayRecord) -> None:
        """Insert or update the record of a running gateway, and remove records of gateways that are long gone."""
        now, table = self._clock(), schema.gateways
        values = msgspec.structs.asdict(record) | {"seen_at": now}
        with self._database.write_transaction() as connection:
            insert = conflict_aware_insert(connection, table).values(values)
            connection.execute(insert.on_conflict_do_update(index_elements=["id"], set_=values))
            connection.execute(delete(table).where(table.c.seen_at < now - RECORD_RETENTION_S))

    def list_running(self) -> list[GatewayRecord]:
        """Return the gateways whose last heartbeat is recent."""
        table = schema.gateways
        query = select(table).where(table.c.seen_at >= self._clock() - LIVENESS_TIMEOUT_S)
        with self._database.read_transaction() as connection:
            return [GatewayRecord(**row._asdict()) for row in connection.execute(query)]

    def list_known(self) -> list[GatewayRecord]:
        """Return the gateways that run, and those that were not stopped in order in the last day."""
        with self._database.read_transaction() as connection:
            return [
                GatewayRecord(**row._asdict())
                for row in connection.execute(select(schema.gateways))
            ]

    def remove(self, gateway_id: str) -> None:
        """Remove the record of a gateway that stops."""
        table = schema.gateways
        with self._database.write_transaction() as connection:
            connection.execute(delete(table).where(table.c.id == gateway_id))


BLOB_PLACE_KEY = "blobs"
"""Name of the key by which gateways recognise the place of their store's blobs. A restored store has a new place."""


class SecretStore:
    """Keys by name. Every call may block on the database."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def get_or_create(self, name: str, size_bytes: int = 0, *, value: bytes = b"") -> bytes:
        """Return the key with this name. The first call creates it with `value`, or `size_bytes` random bytes."""
        table = schema.secrets
        row = {
            "name": name,
            "value": value or secrets.token_bytes(size_bytes),
            "created_at": self._clock(),
        }
        with self._database.write_transaction() as connection:
            statement = conflict_aware_insert(connection, table).values(row)
            connection.execute(statement.on_conflict_do_nothing(index_elements=["name"]))
            query = select(table.c.value).where(table.c.name == name)
            return bytes(connection.execute(query).scalar_one())

    def read_all(self) -> dict[str, tuple[bytes, float]]:
        """Return all keys, with the time of creation of each in seconds since the epoch, for a backup."""
        with self._database.read_transaction() as connection:
            rows = connection.execute(select(schema.secrets)).all()
        return {row.name: (bytes(row.value), row.created_at) for row in rows}

    def add_all(self, keys: Mapping[str, tuple[bytes, float]]) -> None:
        """Add what `read_all` returned. Keys that exist stay."""
        table = schema.secrets
        with self._database.write_transaction() as connection:
            for name, (value, created_at) in keys.items():
                row = {"name": name, "value": value, "created_at": created_at}
                statement = conflict_aware_insert(connection, table).values(row)
                connection.execute(statement.on_conflict_do_nothing(index_elements=["name"]))
