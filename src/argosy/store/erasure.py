"""Erasure of projects: everything that the store keeps of one, except sums of the ledger and the audit log."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec
from sqlalchemy import ColumnElement, Table, delete, func, insert, or_, select, update

from argosy.store import schema
from argosy.store.api_keys import hash_key
from argosy.store.batch_store import BatchStore
from argosy.store.database import Database
from argosy.store.file_store import FileStore
from argosy.store.item_table import DELETION_BATCH_ROWS, delete_with_items
from argosy.store.ledger import Ledger
from argosy.store.record_tables import begin_transaction
from argosy.store.records import Key, Project
from argosy.store.stored_bytes import ItemOwner, StoredBytes

SINGLE_ROWS_S = 3600.0
"""Age from which single requests become daily sums. A gateway may send younger ones again."""
_usage, _days = schema.usage.c, schema.usage_days.c
_NAMES = ("key", "user", "asked")
"""Columns of the ledger that say who sent requests, and what clients wrote."""
_SUMS = (
    *("requests", "input_tokens", "cached_tokens", "output_tokens"),
    *("nano_dollars", "unanswered"),
)


class ErasedProject(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of records that an erasure has removed, by kind."""

    responses: int = 0
    conversations: int = 0
    files: int = 0
    batches: int = 0
    requests: int = 0
    """Single requests of the ledger without their key, user and requested model, or rolled up to sums."""
    remaining_requests: int = 0
    """Part of them that are too recent to be rolled up. Erase the project again to do so."""
    keys: int = 0
    sessions: int = 0
    """Sessions of the console with these keys."""
    limits: int = 0
    adapters: int = 0
    prompts: int = 0
    samples: int = 0
    """Sampled answers."""
    users: int = 0
    """Users whose default project it was. They belong to the organisation and remain."""


class Erasure:
    """Erases projects in small transactions, so that others can write meanwhile."""

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float],
        stored_bytes: StoredBytes,
        ledger: Ledger,
        files: FileStore,
        batches: BatchStore,
    ) -> None:
        self._database = database
        self._clock = clock
        self._stored_bytes = stored_bytes
        self._files = files
        self._ledger = ledger
        self._batches = batches

    def erase_project(self, project: Project, *, actor: str) -> ErasedProject:
        """Archive a project and erase what the store has of it. It may be repeated, also after an error.

        Its id stays, since the sums of the ledger and the audit log refer to it.
        """
        with self._database.erasing_deletions():
            counts = self._erase_accounts(project, actor)
            owner = ItemOwner(project.organisation, project.id)
            counts["responses"] = self._erase_stored(schema.responses, owner)
            counts["conversations"] = self._erase_stored(schema.conversations, owner)
            counts["batches"] = self._batches.delete_owned(owner)
            counts["files"] = self._files.delete_owned(owner)
            with self._database.write_transaction() as connection:
                is_empty = owner.owns(schema.stored_bytes)
                connection.execute(delete(schema.stored_bytes).where(is_empty))
            counts["requests"] = self._erase_names(project.id)
            counts["requests"] += self._ledger.roll_up_project(
                project.id, self._clock() - SINGLE_ROWS_S
            )
            self._merge_days(project.id)
            counts["remaining_requests"] = self._count(schema.usage, _usage.project == project.id)
        return ErasedProject(**counts)

    def _erase_accounts(self, project: Project, actor: str) -> dict[str, int]:
        """Erase what belongs to accounts in one transaction, with one entry in the audit log."""
        keys, users = schema.keys, schema.users
        # Readers of accounts read all of them again after an entry about no type of record.
        with begin_transaction(self._database, actor, self._clock) as transaction:
            connection = transaction.connection
            found = transaction.get_record(Project, project.id)
            of_project = transaction.find_records(Key, project=project.id)
            sessions = schema.console_sessions
            digests = [key.digest for key in of_project]
            counts = {
                "sessions": connection.execute(
                    delete(sessions).where(sessions.c.key_digest.in_(digests))
                ).rowcount,
                "limits": connection.execute(
                    delete(schema.limits).where(
                        schema.limits.c.owner.in_([project.id, *(key.id for key in of_project)])
                    )
                ).rowcount,
                "users": connection.execute(
                    update(users).where(users.c.project == project.id).values(project=None)
                ).rowcount,
            }
            for name, table in (
                ("adapters", schema.adapters),
                ("prompts", schema.prompts),
                ("samples", schema.quality_samples),
            ):
                of_table = delete(table).where(table.c.project == project.id)
                counts[name] = connection.execute(of_table).rowcount
            # A key stays as a row, since a gateway without any would need none.
            counts["keys"] = sum(key.name != key.id for key in of_project)
            for key in of_project:
                fields = {"name": key.id, "prefix": "", "user": None, "networks": (), "flags": ()}
                ended = {"revoked_at": key.revoked_at or transaction.now, "models": ()}
                digest = hash_key(secrets.token_urlsafe(32))
                connection.execute(
                    update(keys).where(keys.c.id == key.id).values(**fields, **ended, digest=digest)
                )
            rules = schema.retention
            connection.execute(delete(rules).where(rules.c.project == project.id))
            archived_at = found.archived_at or transaction.now
            values = {"name": project.id, "networks": (), "flags": (), "archived_at": archived_at}
            values |= {"quality": "off"}
            connection.execute(
                update(schema.projects).where(schema.projects.c.id == project.id).values(**values)
            )
            transaction.append_decision(
                "tenant.erase", project.id, dict(counts), organisation=found.organisation
            )
        return counts

    def _erase_stored(self, table: Table, owner: ItemOwner) -> int:
        erased = 0
        while True:
            query = select(table.c.id).where(owner.owns(table)).limit(DELETION_BATCH_ROWS)
            with self._database.write_transaction() as connection:
                ids = list(connection.execute(query.with_for_update()).scalars())
                delete_with_items(connection, self._stored_bytes, table, ids)
            erased += len(ids)
            if len(ids) < DELETION_BATCH_ROWS:
                return erased

    def _erase_names(self, project: str) -> int:
        """Blank the names in single requests. They stay for now, so that none that is sent again counts twice."""
        has_names = or_(*(_usage[name] != "" for name in _NAMES))
        query = select(_usage.request).where(_usage.project == project, has_names)
        erased = 0
        while True:
            with self._database.write_transaction() as connection:
                ids = list(connection.execute(query.limit(DELETION_BATCH_ROWS)).scalars())
                blank = update(schema.usage).where(_usage.request.in_(ids))
                connection.execute(blank.values(dict.fromkeys(_NAMES, "")))
            erased += len(ids)
            if len(ids) < DELETION_BATCH_ROWS:
                return erased

    def _merge_days(self, project: str) -> None:
        """Replace the daily sums of a project by sums without names, one day at a time."""
        is_named = (_days.project == project) & or_(*(_days[name] != "" for name in _NAMES))
        groups = [
            _days[name] for name in ("day", "organisation", "project", "model", "route", "replica")
        ]
        sums = [func.sum(_days[name]).label(name) for name in _SUMS]
        while True:
            with self._database.write_transaction() as connection:
                day = connection.execute(select(func.min(_days.day)).where(is_named)).scalar()
                if day is None:
                    return
                of_day = (_days.project == project) & (_days.day == day)
                merged = connection.execute(select(*groups, *sums).where(of_day).group_by(*groups))
                rows = [dict(row) | dict.fromkeys(_NAMES, "") for row in merged.mappings()]
                connection.execute(delete(schema.usage_days).where(of_day))
                connection.execute(insert(schema.usage_days), rows)

    def _count(self, table: Table, where: ColumnElement[bool]) -> int:
        with self._database.read_transaction() as connection:
            return connection.execute(
                select(func.count()).select_from(table).where(where)
            ).scalar_one()
