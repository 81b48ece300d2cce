"""Audit of reads of what users sent and what models answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Connection, select

from argosy.store import schema
from argosy.store.database import Database
from argosy.store.record_tables import begin_transaction

CONTENT_READ = "content.read"
ENTRY_INTERVAL_S = 600.0
"""Time for which one entry stands for all reads of a subject by one actor."""
_audit = schema.audit.c


class ContentAccess:
    """Writes reads of content into the audit log. Every call may block on the database."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def record_read(
        self,
        subject: str,
        *,
        organisation: str | None = None,
        details: Mapping[str, Any],
        actor: str,
    ) -> None:
        """Record that `actor` reads content, unless an entry of the last 10 minutes says so. Call it before the read.

        Args:
            subject: Id of the request, or kind and name of something else, such as `replica_log:chat-1-0`.
            organisation: Organisation whose content it is, and which sees the entry. None if it has none.
            details: Kind of the content, and project and reason where they are known.
            actor: Reader, as in other entries of the audit log.

        Raises:
            StoreError: The entry cannot be written, so the content must not be read.
        """
        with self._database.read_transaction() as connection:
            if self._is_recorded(connection, subject, actor):
                return
        with begin_transaction(self._database, actor, self._clock) as transaction:
            if not self._is_recorded(transaction.connection, subject, actor):
                transaction.append_decision(
                    CONTENT_READ, subject, dict(details), organisation=organisation
                )

    def _is_recorded(self, connection: Connection, subject: str, actor: str) -> bool:
        query = select(_audit.entry).where(
            _audit.subject == subject,
            _audit.actor == actor,
            _audit.action == CONTENT_READ,
            _audit.at > self._clock() - ENTRY_INTERVAL_S,
        )
        return connection.execute(query.limit(1)).first() is not None
