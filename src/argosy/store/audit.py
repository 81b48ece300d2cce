"""The audit log of account changes. A hash chain over the entries makes later alterations detectable."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import or_, select

from argosy.store import schema
from argosy.store.database import Database
from argosy.store.errors import StoreError
from argosy.store.numbered_rows import in_time_range
from argosy.store.schema import GENESIS_HASH


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Entry of the audit log, which describes one change of an account. Contains no secrets."""

    entry: int
    """Number of the entry: 1, 2, 3, ..."""
    at: float
    """Seconds since the epoch."""
    actor: str
    """Name of who made the change, as given by the caller of the store."""
    action: str
    """Record type and action, such as `key.create`."""
    subject: str
    """Id of the changed record."""
    organisation: str | None
    """Id of the organisation that the record belongs to. None for records of the whole gateway."""
    details: dict[str, Any]
    """Fields of a created or deleted record, or [old, new] of each changed field."""
    hash: str
    """SHA-256 in hex, see `hash_entry`."""

    @property
    def mentioned(self) -> set[str]:
        """Texts of the entry that may be ids of records, for their names."""
        values = self.details.values()
        texts = [
            text for value in values for text in (value if isinstance(value, list) else [value])
        ]
        ids = {text for text in texts if isinstance(text, str)}
        return ids | {self.subject, self.actor.partition(":")[2]}


class AuditVerification(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `AuditLog.verify`."""

    entries: int
    """Number of intact entries, up to the first broken one if any."""
    broken: int | None = None
    """Number of the first entry that is missing or altered."""
    problem: str | None = None
    """Description of what is wrong with that entry."""


class AuditLog:
    """Reads and verifies the audit log. Account changes write it in their own transaction."""

    def __init__(self, database: Database, organisation_id: str | None = None) -> None:
        self._database = database
        self._organisation_id = organisation_id

    def for_organisation(self, organisation_id: str | None) -> AuditLog:
        """Return the log restricted to the records of one organisation, or the whole log for None."""
        return AuditLog(self._database, organisation_id)

    def list_entries(
        self,
        *,
        subject: str | None = None,
        action_prefix: str | Sequence[str] = (),
        before: int | None = None,
        since: float | None = None,
        until: float | None = None,
        limit: int = 100,
    ) -> list[AuditEntry]:
        """List entries, newest first.

        The arguments select entries: about one record, whose actions begin so, such as `replica.`, with numbers below
        `before`, and from `since` to before `until`, in seconds since the epoch.
        """
        query = select(schema.audit).order_by(schema.audit.c.entry.desc()).limit(limit)
        if self._organisation_id is not None:
            query = query.where(schema.audit.c.organisation == self._organisation_id)
        if subject is not None:
            query = query.where(schema.audit.c.subject == subject)
        prefixes = (action_prefix,) if isinstance(action_prefix, str) else action_prefix
        if prefixes:
            action = schema.audit.c.action
            query = query.where(
                or_(*(action.startswith(each, autoescape=True) for each in prefixes))
            )
        if before is not None:
            query = query.where(schema.audit.c.entry < before)
        numbered = schema.audit.c.entry, schema.audit.c.at
        with self._database.read_transaction() as connection:
            query = query.where(*in_time_range(connection, *numbered, since, until))
            return [_decode_entry(row._asdict()) for row in connection.execute(query)]

    def verify(self) -> AuditVerification:
        """Verify the hash chain of all organisations from the first entry to the stored head."""
        query = (
            select(schema.audit).order_by(schema.audit.c.entry).execution_options(yield_per=1000)
        )
        count, head = 0, GENESIS_HASH
        with self._database.read_transaction() as connection:
            state = connection.execute(select(schema.state)).one()
            with connection.execute(query) as rows:
                for fields in (row._asdict() for row in rows):
                    if fields["entry"] != count + 1:
                        return _failed_verification(count, "missing")
                    if fields["hash"] != hash_entry(head, fields):
                        return _failed_verification(count, "altered")
                    count, head = count + 1, fields["hash"]
        if count < state.audit_entries:
            return _failed_verification(count, "missing")
        if count > state.audit_entries:
            return _failed_verification(state.audit_entries, "not written by Argosy")
        if head != state.audit_head:
            return _failed_verification(count - 1, "altered")
        return AuditVerification(entries=count)


def hash_entry(previous: bytes, entry: Mapping[str, Any]) -> bytes:
    """Compute SHA-256 over the previous hash and the entry as JSON.

    The JSON has sorted keys and no spaces, and its `details` are the stored string.
    """
    hashed = {
        name: entry[name]
        for name in ("entry", "at", "actor", "action", "subject", "organisation", "details")
    }
    return hashlib.sha256(previous + msgspec.json.encode(hashed, order="sorted")).digest()


def _decode_entry(fields: dict[str, Any]) -> AuditEntry:
    """Decode an entry. Raises StoreError if its stored form was altered and cannot be decoded."""
    try:
        details = msgspec.json.decode(fields["details"], type=dict[str, Any])
        return AuditEntry(**fields | {"details": details, "hash": bytes(fields["hash"]).hex()})
    except (ValueError, TypeError) as error:
        raise StoreError(
            f"Entry {fields['entry']} of the audit log was altered and cannot be read. Run `argosy audit verify`."
        ) from error


def _failed_verification(intact: int, problem: str) -> AuditVerification:
    return AuditVerification(entries=intact, broken=intact + 1, problem=problem)
