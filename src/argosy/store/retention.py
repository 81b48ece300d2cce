"""Retention of projects: how long records of one kind are kept, where that is shorter than for others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
from sqlalchemy import delete, select

from argosy.store import schema
from argosy.store.database import Database, conflict_aware_insert
from argosy.store.file_store import FileStore
from argosy.store.item_table import DELETION_BATCH_ROWS, delete_with_items
from argosy.store.ledger import DAY_S, Ledger
from argosy.store.record_tables import AccountTransaction, begin_transaction
from argosy.store.records import Project
from argosy.store.stored_bytes import ItemOwner, StoredBytes

RetentionKind = Literal["usage", "responses", "samples", "files"]
MAX_SAMPLE_DAYS = 30
"""Days for which sampled answers are kept, if a project has no rule for fewer."""
MAX_KEEP_DAYS = 36_500
_rules, _projects = schema.retention.c, schema.projects.c


class RetentionRule(msgspec.Struct, frozen=True, kw_only=True):
    """Number of days that records of one kind are kept of one project."""

    project: str
    kind: RetentionKind
    """`usage` are single requests, which become sums by day; `responses` are responses and conversations; `samples` are
    sampled answers."""
    keep_days: int
    """Days after the end of a request, or the creation of a response, conversation or file, whatever its use."""


class RetentionRules:
    """Changes rules, and deletes what they no longer keep. Every call may block on the database."""

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float],
        stored_bytes: StoredBytes,
        ledger: Ledger,
        files: FileStore,
    ) -> None:
        self._database = database
        self._clock = clock
        self._stored_bytes = stored_bytes
        self._files = files
        self._ledger = ledger

    def set_rule(self, rule: RetentionRule, *, actor: str) -> None:
        """Set the rule of a project and kind.

        Raises:
            ValueError: The number of days is not from 1 to `MAX_KEEP_DAYS`.
            NotFoundError: There is no such project.
        """
        if not 1 <= rule.keep_days <= MAX_KEEP_DAYS:
            raise ValueError(f"Give a number of days from 1 to {MAX_KEEP_DAYS:,}.")
        with begin_transaction(self._database, actor, self._clock) as transaction:
            insert = conflict_aware_insert(transaction.connection, schema.retention)
            statement = insert.values(msgspec.structs.asdict(rule)).on_conflict_do_update(
                index_elements=["project", "kind"], set_={"keep_days": rule.keep_days}
            )
            project = transaction.get_record(Project, rule.project)
            transaction.connection.execute(statement)
            _append_entry(transaction, project, {"kind": rule.kind, "keep_days": rule.keep_days})

    def remove_rule(self, project: str, kind: RetentionKind, *, actor: str) -> None:
        """Remove a rule, so that the settings of the gateways hold again."""
        with begin_transaction(self._database, actor, self._clock) as transaction:
            found = transaction.get_record(Project, project)
            of_kind = (_rules.project == project) & (_rules.kind == kind)
            if transaction.connection.execute(delete(schema.retention).where(of_kind)).rowcount:
                _append_entry(transaction, found, {"kind": kind, "keep_days": None})

    def list_rules(self) -> list[RetentionRule]:
        """List all rules, by project."""
        query = select(schema.retention).order_by(_rules.project, _rules.kind)
        with self._database.read_transaction() as connection:
            return [RetentionRule(**row._asdict()) for row in connection.execute(query)]

    def delete_expired(self) -> int:
        """Delete in batches what the rules no longer keep, and old samples. Returns the number of records."""
        query = select(schema.retention, _projects.organisation).join(
            schema.projects, _projects.id == _rules.project
        )
        with self._database.read_transaction() as connection:
            rows = connection.execute(query).all()
        deleted = self._delete_samples(self._clock() - MAX_SAMPLE_DAYS * DAY_S)
        for row in rows:
            before = self._clock() - row.keep_days * DAY_S
            owner = ItemOwner(row.organisation, row.project)
            if row.kind == "usage":
                midnight = before // DAY_S * DAY_S
                deleted += self._ledger.roll_up_project(row.project, midnight)
            elif row.kind == "samples":
                deleted += self._delete_samples(before, row.project)
            elif row.kind == "files":
                deleted += self._files.delete_owned(owner, before=before)
            else:
                deleted += self._delete_stored(owner, before)
        return deleted

    def _delete_samples(self, before: float, project: str | None = None) -> int:
        samples = schema.quality_samples
        query = delete(samples).where(samples.c.created_at < before)
        if project is not None:
            query = query.where(samples.c.project == project)
        with self._database.write_transaction() as connection:
            return connection.execute(query).rowcount

    def _delete_stored(self, owner: ItemOwner, before: float) -> int:
        deleted = 0
        for table in (schema.responses, schema.conversations):
            query = select(table.c.id).where(owner.owns(table), table.c.created_at < before)
            query = query.limit(DELETION_BATCH_ROWS).with_for_update(skip_locked=True)
            ids: list[str] | None = None
            while ids is None or len(ids) == DELETION_BATCH_ROWS:
                with self._database.write_transaction() as connection:
                    ids = list(connection.execute(query).scalars())
                    delete_with_items(connection, self._stored_bytes, table, ids)
                deleted += len(ids)
        return deleted


def _append_entry(
    transaction: AccountTransaction, project: Project, details: dict[str, str | int | None]
) -> None:
    transaction.append_decision(
        "retention.set", project.id, details, organisation=project.organisation
    )
