"""The audit log: who changed what, when; each entry seals all before it, so nothing can be altered unseen."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import select

from argosy.store import schema
from argosy.store.database import Database
from argosy.store.errors import StoreError

GENESIS_HASH = bytes(32)
"""What the first entry is sealed with in place of a hash before it."""


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One change. Holds no secret."""

    entry: int
    """1, 2, 3, ..."""
    at: float
    """Seconds since the epoch."""
    actor: str
    """Who did it, as whoever called the store named them."""
    action: str
    """As in `key.create`."""
    subject: str
    """Id of what was changed."""
    organisation: str | None
    """Id of the one that it belongs to; None: the whole gateway's."""
    details: dict[str, Any]
    """Of something new its fields; of a change each field's [old, new]."""
    hash: str
    """SHA-256 in hex, see `seal`."""


class AuditVerification(msgspec.Struct, frozen=True, kw_only=True):
    """What `verify` found."""

    entries: int
    """How many are as they were written."""
    broken: int | None = None
    """The first entry that is not."""
    problem: str | None = None
    """What is wrong with it."""


class AuditLog:
    """Reads and checks the log. It is written by the changes themselves, in the same transaction."""

    def __init__(self, database: Database, organisation_id: str | None = None) -> None:
        self._database = database
        self._organisation_id = organisation_id

    def for_organisation(self, organisation_id: str | None) -> AuditLog:
        """The log of what belongs to one organisation; None: all of it."""
        return AuditLog(self._database, organisation_id)

    def list_entries(
        self, *, subject: str | None = None, before: int | None = None, limit: int = 100
    ) -> list[AuditEntry]:
        """The newest entries first: those about `subject`, and with numbers less than `before`."""
        query = select(schema.audit).order_by(schema.audit.c.entry.desc()).limit(limit)
        if self._organisation_id is not None:
            query = query.where(schema.audit.c.organisation == self._organisation_id)
        if subject is not None:
            query = query.where(schema.audit.c.subject == subject)
        if before is not None:
            query = query.where(schema.audit.c.entry < before)
        with self._database.read_transaction() as connection:
            return [_decode_entry(row._asdict()) for row in connection.execute(query)]

    def verify(self) -> AuditVerification:
        """Follow the chain from the first entry to the head that the last change left, whosever they are."""
        query = (
            select(schema.audit).order_by(schema.audit.c.entry).execution_options(yield_per=1000)
        )
        count, head = 0, GENESIS_HASH
        with self._database.read_transaction() as connection:
            state = connection.execute(select(schema.state)).one()
            with connection.execute(query) as rows:
                for entry in (row._asdict() for row in rows):
                    if entry["entry"] != count + 1:
                        return _failed_verification(count, "it is missing")
                    if entry["hash"] != hash_entry(head, entry):
                        return _failed_verification(count, "it is not what was written")
                    count, head = count + 1, entry["hash"]
        if count < state.audit_entries:
            return _failed_verification(count, "it is missing")
        if count > state.audit_entries:
            return _failed_verification(state.audit_entries, "it was added by hand")
        if head != state.audit_head:
            return _failed_verification(count - 1, "it is not what was written")
        return AuditVerification(entries=count)


def hash_entry(previous: bytes, entry: Mapping[str, Any]) -> bytes:
    """SHA-256 of the hash before and of the entry as JSON: sorted keys, no spaces, `details` a string as stored.

    Without `organisation` where it is None, as in entries that are older than the column.
    """
    told = {name: entry[name] for name in ("entry", "at", "actor", "action", "subject", "details")}
    if entry["organisation"] is not None:
        told["organisation"] = entry["organisation"]
    return hashlib.sha256(previous + msgspec.json.encode(told, order="sorted")).digest()


def _decode_entry(fields: dict[str, Any]) -> AuditEntry:
    """Raises StoreError for what can no longer be read: it is not what was written."""
    try:
        details = msgspec.json.decode(fields["details"], type=dict[str, Any])
        return AuditEntry(**fields | {"details": details, "hash": bytes(fields["hash"]).hex()})
    except (ValueError, TypeError) as error:
        raise StoreError(
            f"Entry {fields['entry']} of the audit log is not what was written: see `argosy audit verify`."
        ) from error


def _failed_verification(intact: int, problem: str) -> AuditVerification:
    return AuditVerification(entries=intact, broken=intact + 1, problem=problem)
