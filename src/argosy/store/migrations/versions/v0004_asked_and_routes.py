"""Add the requested model and the deciding route to the ledger. The former column `route` becomes `replica`."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

SAME = ("organisation", "project", "key", "user", "model")
COUNTED = ("requests", "input_tokens", "cached_tokens", "output_tokens", "nano_dollars")

OLDER_GATEWAYS = (
    """
    CREATE FUNCTION usage_of_older_gateways() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN NEW.replica := NEW.route; NEW.route := ''; RETURN NEW; END $$
    """,
    """
    CREATE TRIGGER usage_of_older_gateways BEFORE INSERT ON usage
    FOR EACH ROW WHEN (NEW.replica IS NULL) EXECUTE FUNCTION usage_of_older_gateways()
    """,
)
"""Statements for gateways of earlier versions that still run and write the replica as `route`."""


def upgrade() -> None:
    """Rename and add columns. Existing rows have empty values in the new columns."""
    op.alter_column("usage", "route", new_column_name="replica")
    for name in ("asked", "route"):
        op.add_column("usage", _added(name))
    if op.get_bind().dialect.name == "postgresql":
        for statement in OLDER_GATEWAYS:
            op.execute(statement)
    _days()


def _days() -> None:
    """The sums of days get a longer key, so they are written anew: SQLite changes none in place."""
    op.rename_table("usage_days", "usage_days_before")
    before = sa.table("usage_days_before", *map(sa.column, ("day", *SAME, "route", *COUNTED)))
    days = op.create_table(
        "usage_days",
        sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
        *(sa.Column(name, sa.Text, primary_key=True) for name in (*SAME, "replica")),
        *(_added(name, primary_key=True) for name in ("asked", "route")),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in COUNTED),
    )
    kept = sa.select(*(before.c[name] for name in ("day", *SAME, "route", *COUNTED)))
    op.execute(days.insert().from_select(["day", *SAME, "replica", *COUNTED], kept))
    op.drop_table("usage_days_before")


def _added(name: str, *, primary_key: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text, primary_key=primary_key, nullable=False, server_default="")
