"""Roles are held in an organisation or for the whole gateway; audit entries say whose they are."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Roles that were given before go on holding for the whole gateway; audit entries are the whole gateway's."""
    for name in ("users", "keys"):
        op.add_column(name, sa.Column("scope", sa.Text, nullable=False, server_default="gateway"))
        # Whoever only asks models gets no more than their organisation when they are given another role.
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
