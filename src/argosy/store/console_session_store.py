"""Sessions of people who are signed in to the console. The store keeps only digests of the ids that browsers send."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec
from sqlalchemy import delete, insert, or_, select, update

from argosy.store import schema
from argosy.store.api_keys import hash_key
from argosy.store.database import Database

SESSION_LIFETIME_S = 12 * 3600.0
SESSION_IDLE_TIMEOUT_S = 3600.0
USE_RECORDING_INTERVAL_S = 60.0
"""How often the use of a session is written. The idle timeout is as inexact."""
MAX_SESSIONS_OF_CREDENTIAL = 100
"""Sessions of one key or token. Further ones end those that were used least recently, so that they fill no disk."""
_SESSION_ID_BYTES = 32


class ConsoleSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session: the credential with which it was opened, and its times in seconds since the epoch."""

    digest: bytes
    key_digest: bytes | None = None
    """Digest of the API key. None if a token opened the session."""
    claims: bytes | None = None
    """Claims of the token, as JSON."""
    created_at: float
    last_used_at: float
    expires_at: float


class ConsoleSessionStore:
    """Sessions by id. Every call may block on the database."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def create(self, *, key_digest: bytes | None = None, claims: bytes | None = None) -> str:
        """Open a session and return its id. Removes the sessions that have ended."""
        now, table = self._clock(), schema.console_sessions
        session_id = secrets.token_urlsafe(_SESSION_ID_BYTES)
        session = ConsoleSession(
            digest=hash_key(session_id),
            key_digest=key_digest,
            claims=claims,
            created_at=now,
            last_used_at=now,
            expires_at=now + SESSION_LIFETIME_S,
        )
        has_ended = or_(
            table.c.expires_at <= now, table.c.last_used_at <= now - SESSION_IDLE_TIMEOUT_S
        )
        column, credential = (
            (table.c.claims, claims) if key_digest is None else (table.c.key_digest, key_digest)
        )
        surplus = select(table.c.digest).where(column == credential)
        surplus = surplus.order_by(table.c.last_used_at.desc())
        surplus = surplus.offset(MAX_SESSIONS_OF_CREDENTIAL - 1)
        with self._database.write_transaction() as connection:
            connection.execute(delete(table).where(has_ended))
            ended = list(connection.execute(surplus).scalars())
            connection.execute(delete(table).where(table.c.digest.in_(ended)))
            connection.execute(insert(table).values(msgspec.structs.asdict(session)))
        return session_id

    def find(self, session_id: str, *, is_use: bool = True) -> ConsoleSession | None:
        """Return the session with this id. None if there is none, or it has ended. A use restarts the idle timeout."""
        now, table, digest = self._clock(), schema.console_sessions, hash_key(session_id)
        with self._database.read_transaction() as connection:
            row = connection.execute(select(table).where(table.c.digest == digest)).one_or_none()
        if row is None:
            return None
        session = ConsoleSession(**row._asdict())
        if session.expires_at <= now or session.last_used_at <= now - SESSION_IDLE_TIMEOUT_S:
            return None
        if is_use and session.last_used_at <= now - USE_RECORDING_INTERVAL_S:
            used = update(table).where(table.c.digest == digest).values(last_used_at=now)
            with self._database.write_transaction() as connection:
                connection.execute(used)
        return session

    def delete(self, session_id: str) -> None:
        """End a session."""
        table = schema.console_sessions
        with self._database.write_transaction() as connection:
            connection.execute(delete(table).where(table.c.digest == hash_key(session_id)))
