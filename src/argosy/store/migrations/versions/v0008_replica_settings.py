"""Add what operators decide about replicas: state and weight."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Create the table. Gateways of earlier versions ignore it."""
    op.create_table(
        "replica_settings",
        sa.Column("id", sa.Text, primary_key=True),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("model", "replica")),
        sa.Column("state", sa.Text),
        sa.Column("weight", sa.Double),
        sa.Column("grace_s", sa.Double, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("changed_at", sa.Double, nullable=False),
        sa.Column("changed_by", sa.Text, nullable=False),
    )
