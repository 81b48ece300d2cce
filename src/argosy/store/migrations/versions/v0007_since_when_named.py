"""Add the time since when projects have their name and users their email. Tokens match the oldest holder."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

NAMES = {"projects": "name", "users": "email"}

BEFORE = """
    UPDATE {table} SET named_at = (
        SELECT max(at) FROM audit
        WHERE subject = {table}.id AND action = '{noun}.change' AND details LIKE '%"{name}":[%'
    )
    """
"""Sets the time of earlier renames from the audit log, where quotes inside texts are always escaped."""

SQLITE = """
    CREATE TRIGGER {table}_named_at AFTER UPDATE OF {name} ON {table}
    WHEN NEW.{name} <> OLD.{name} AND NEW.named_at IS OLD.named_at
    BEGIN UPDATE {table} SET named_at = (julianday('now') - 2440587.5) * 86400 WHERE id = NEW.id; END
    """
POSTGRES = """
    CREATE TRIGGER {table}_named_at BEFORE UPDATE OF {name} ON {table} FOR EACH ROW
    WHEN (NEW.{name} <> OLD.{name} AND NEW.named_at IS NOT DISTINCT FROM OLD.named_at)
    EXECUTE FUNCTION named_at()
    """
POSTGRES_NOW = """
    CREATE FUNCTION named_at() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN NEW.named_at := extract(epoch FROM clock_timestamp()); RETURN NEW; END $$
    """
"""Triggers for gateways of earlier versions, which do not set the time. They use the database's clock."""


def upgrade() -> None:
    """Add columns and triggers. NULL means that the name is unchanged since creation."""
    sqlite = op.get_bind().dialect.name == "sqlite"
    if not sqlite:
        op.execute(POSTGRES_NOW)
    for table, name in NAMES.items():
        op.add_column(table, sa.Column("named_at", sa.Double))
        op.execute(BEFORE.format(table=table, name=name, noun=table.removesuffix("s")))
        op.execute((SQLITE if sqlite else POSTGRES).format(table=table, name=name))
