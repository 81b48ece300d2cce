"""Projects and keys have flags."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Those that are there have none."""
    for table in ("projects", "keys"):
        op.add_column(table, sa.Column("flags", sa.Text, nullable=False, server_default="[]"))
