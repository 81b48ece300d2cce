"""Parts of lists are found where the one before ended; for that keys and limits say whose they are."""

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
"""Nobody moves to another organisation, so what was once found stays."""

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
"""Older gateways, which go on meanwhile, do not say it; neither do we."""

LISTED = {
    "organisations": ((),),
    "projects": ((), ("organisation",)),
    "users": ((), ("organisation",)),
    "keys": ((), ("organisation",), ("project",)),
}


def upgrade() -> None:
    """Say it of those that are there, too."""
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
    # By the kind first, SQLite would go by it for a list of all of one kind, and sort them for each part.
    op.drop_index("limits_owner", "limits")
    op.create_index("limits_owner", "limits", ["owner", "owner_kind", "id"])
