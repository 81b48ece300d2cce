"""Create the first tables: accounts, the audit log and the ledger."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

OWNERS = ("organisation", "project", "key", "user")
COUNTED = ("input_tokens", "cached_tokens", "output_tokens", "nano_dollars")

SQLITE_APPEND_ONLY = tuple(
    f"""
    CREATE TRIGGER audit_no_{what.lower()} BEFORE {what} ON audit
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END
    """
    for what in ("UPDATE", "DELETE")
)

POSTGRES_APPEND_ONLY = (
    """
    CREATE FUNCTION audit_append_only() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'the audit log is append-only'; END $$
    """,
    """
    CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit
    FOR EACH STATEMENT EXECUTE FUNCTION audit_append_only()
    """,
)


def upgrade() -> None:
    """Create the tables, indexes and triggers."""
    _accounts()
    _terms()
    _audit()
    _usage()


def _accounts() -> None:
    op.create_table(
        "organisations",
        _id(),
        _text("name"),
        _time("created_at"),
        _time("archived_at", optional=True),
    )
    _unique_name("organisations", ["name"], "archived_at")
    op.create_table(
        "projects",
        _id(),
        _text("organisation", "organisations.id"),
        _text("name"),
        _text("tier"),
        sa.Column("weight", sa.Double, nullable=False),
        sa.Column("share_cache", sa.Boolean, nullable=False),
        _text("when_unsure"),
        _text("networks"),
        _time("created_at"),
        _time("archived_at", optional=True),
    )
    _unique_name("projects", ["organisation", "name"], "archived_at")
    op.create_table(
        "users",
        _id(),
        _text("organisation", "organisations.id"),
        _text("email"),
        _text("role"),
        sa.Column("project", sa.Text, sa.ForeignKey("projects.id")),
        _time("created_at"),
        _time("disabled_at", optional=True),
    )
    _unique_name("users", ["email"], "disabled_at")
    op.create_table(
        "keys",
        _id(),
        _text("project", "projects.id"),
        sa.Column("user", sa.Text, sa.ForeignKey("users.id")),
        _text("name"),
        _text("prefix"),
        sa.Column("digest", sa.LargeBinary, nullable=False, unique=True),
        _text("role"),
        _text("models"),
        _text("networks"),
        _time("created_at"),
        _time("expires_at", optional=True),
        _time("revoked_at", optional=True),
        sa.Column("replaced_by", sa.Text),
    )
    op.create_index("ix_keys_project", "keys", ["project"])


def _terms() -> None:
    op.create_table(
        "limits",
        _id(),
        _text("owner_kind"),
        _text("owner"),
        _text("unit"),
        _count("amount"),
        sa.Column("window", sa.Text),
        sa.Column("model", sa.Text),
    )
    op.create_index("limits_owner", "limits", ["owner_kind", "owner"])
    op.create_table(
        "prices",
        _id(),
        _text("model"),
        sa.Column("tier", sa.Text),
        _count("input"),
        _count("cached_input"),
        _count("output"),
        _time("since"),
    )


def _audit() -> None:
    state = op.create_table(
        "state",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        _count("version"),
        _count("audit_entries"),
        sa.Column("audit_head", sa.LargeBinary, nullable=False),
    )
    op.bulk_insert(state, [{"id": 1, "version": 1, "audit_entries": 0, "audit_head": bytes(32)}])
    op.create_table(
        "audit",
        sa.Column("entry", sa.BigInteger, primary_key=True, autoincrement=False),
        _time("at"),
        _text("actor"),
        _text("action"),
        _text("subject"),
        _text("details"),
        sa.Column("hash", sa.LargeBinary, nullable=False),
    )
    op.create_index("audit_subject", "audit", ["subject"])
    sqlite = op.get_bind().dialect.name == "sqlite"
    for statement in SQLITE_APPEND_ONLY if sqlite else POSTGRES_APPEND_ONLY:
        op.execute(statement)


def _usage() -> None:
    op.create_table(
        "usage",
        sa.Column("request", sa.Text, primary_key=True),
        *(_text(name) for name in (*OWNERS, "model", "route")),
        _time("started_at"),
        _time("ended_at"),
        _text("status"),
        *(_count(name) for name in COUNTED),
        sa.Column("day", sa.Integer, nullable=False),
    )
    op.create_index("usage_ended_at", "usage", ["ended_at"])
    for owner in OWNERS:
        op.create_index(f"usage_{owner}", "usage", [owner, "ended_at"])
    op.create_table(
        "usage_days",
        sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
        *(sa.Column(name, sa.Text, primary_key=True) for name in (*OWNERS, "model", "route")),
        *(_count(name) for name in ("requests", *COUNTED)),
    )


def _id() -> sa.Column[str]:
    return sa.Column("id", sa.Text, primary_key=True)


def _text(name: str, refers_to: str | None = None) -> sa.Column[str]:
    keys = [] if refers_to is None else [sa.ForeignKey(refers_to)]
    return sa.Column(name, sa.Text, *keys, nullable=False)


def _time(name: str, *, optional: bool = False) -> sa.Column[float]:
    return sa.Column(name, sa.Double, nullable=optional)


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False)


def _unique_name(table: str, columns: Sequence[str], ended: str) -> None:
    living = sa.text(f"{ended} IS NULL")
    op.create_index(
        f"{table}_{columns[-1]}",
        table,
        list(columns),
        unique=True,
        sqlite_where=living,
        postgresql_where=living,
    )
