"""Add the sessions of people who are signed in to the console."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    """Create the table. Gateways of earlier versions ignore it."""
    op.create_table(
        "console_sessions",
        sa.Column("digest", sa.LargeBinary, primary_key=True),
        sa.Column("key_digest", sa.LargeBinary),
        sa.Column("claims", sa.LargeBinary),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("last_used_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
    )
