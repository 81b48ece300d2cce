"""Add the gateways that run, so that they can ask each other about requests."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Create the table. Gateways of earlier versions ignore it."""
    op.create_table(
        "gateways",
        sa.Column("id", sa.Text, primary_key=True),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("url", "secret", "certificate")),
        sa.Column("seen_at", sa.Double, nullable=False),
    )
