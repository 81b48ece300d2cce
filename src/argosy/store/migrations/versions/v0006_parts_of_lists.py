"""Add the indexes of paged lists, and the organisation of keys and limits for these indexes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

WHOSE = {
    "keys": "(SELECT organisation FROM projects WHERE id = {row}.project)",
    "limits": """
        CASE {row}.owner_kind
        WHEN 'organisation' THEN {row}.owner
        WHEN 'project' THEN (SELECT organisation FROM projects WHERE id = {row}.owner)
        WHEN 'user' THEN (SELECT organisation FROM users WHERE id = {row}.owner)
        ELSE (SELECT organisation FROM keys WHERE id = {row}.owner)
        END
        """,
}
"""SQL expressions for the organisation of a row. Records never move to another organisation."""

SQLITE = """
    CREATE TRIGGER {table}_organisation AFTER INSERT ON {table} WHEN NEW.organisation IS NULL
    BEGIN UPDATE {table} SET organisation = {whose} WHERE id = NEW.id; END
    """
POSTGRES = (
    """
    CREATE FUNCTION {table}_organisation() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN NEW.organisation := {whose}; RETURN NEW; END $$
    """,
    """
    CREATE TRIGGER {table}_organisation BEFORE INSERT ON {table}
    FOR EACH ROW WHEN (NEW.organisation IS NULL) EXECUTE FUNCTION {table}_organisation()
    """,
)
"""Triggers that set the organisation, for gateways of all versions."""

LISTED = {
    "organisations": ((),),
    "projects": ((), ("organisation",)),
    "users": ((), ("organisation",)),
    "keys": ((), ("organisation",), ("project",)),
}


def upgrade() -> None:
    """Add columns, indexes and triggers, and set the organisation of existing rows."""
    sqlite = op.get_bind().dialect.name == "sqlite"
    for table, whose in WHOSE.items():
        op.add_column(table, sa.Column("organisation", sa.Text))
        op.execute(f"UPDATE {table} SET organisation = {whose.format(row=table)}")  # noqa: S608
        for statement in (SQLITE,) if sqlite else POSTGRES:
            op.execute(statement.format(table=table, whose=whose.format(row="NEW")))
    for table, lists in LISTED.items():
        for of in lists:
            op.create_index("_".join([table, "listed", *of]), table, [*of, "created_at", "id"])
    op.create_index("limits_listed_organisation", "limits", ["organisation", "id"])
    op.create_index("prices_listed", "prices", ["since", "id"])
    op.drop_index("ix_keys_project", "keys")
    # With owner_kind first, SQLite would use this index for a list of one kind and sort all of it for each page.
    op.drop_index("limits_owner", "limits")
    op.create_index("limits_owner", "limits", ["owner", "owner_kind", "id"])
