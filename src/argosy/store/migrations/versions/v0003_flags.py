"""Add flags to projects and keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the columns. Existing rows have no flags."""
    for table in ("projects", "keys"):
        op.add_column(table, sa.Column("flags", sa.Text, nullable=False, server_default="[]"))
