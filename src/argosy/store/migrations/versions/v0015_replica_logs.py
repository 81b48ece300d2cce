"""Add the ends of the logs of replicas, which outlive their processes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Create the table. Gateways and controllers of earlier versions ignore it."""
    op.create_table(
        "replica_logs",
        sa.Column("fleet", sa.Text, primary_key=True),
        sa.Column("replica", sa.Text, primary_key=True),
        sa.Column("started_at", sa.Double, primary_key=True),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("exited_at", sa.Double),
        sa.Column("exit_status", sa.Integer),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("read_at", sa.Double, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("log", sa.LargeBinary, nullable=False),
    )
    op.create_index("replica_logs_read_at", "replica_logs", ["fleet", "read_at"])
