"""Add the scope of roles and the organisation of audit entries."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the columns. Existing roles keep the scope of the whole gateway, as do existing audit entries."""
    for name in ("users", "keys"):
        op.add_column(name, sa.Column("scope", sa.Text, nullable=False, server_default="gateway"))
        # The lowest role gets the scope of the organisation, so that a later higher role is limited to it.
        table = sa.table(name, sa.column("role"), sa.column("scope"))
        op.execute(table.update().where(table.c.role == "caller").values(scope="organisation"))
    op.add_column("audit", sa.Column("organisation", sa.Text))
    op.create_index("audit_organisation", "audit", ["organisation", "entry"])
    op.drop_index("users_email", "users")
    living = sa.text("disabled_at IS NULL")
    op.create_index(
        "users_email",
        "users",
        ["organisation", "email"],
        unique=True,
        sqlite_where=living,
        postgresql_where=living,
    )
