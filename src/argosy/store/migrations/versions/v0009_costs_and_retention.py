"""Costs of hardware by day, and retention of projects."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Create the tables, and the index by which conversations of a project are found."""
    op.create_table(
        "hardware_days",
        sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
        *(sa.Column(name, sa.Text, primary_key=True) for name in ("fleet", "pool", "model")),
        *(
            sa.Column(name, sa.BigInteger, nullable=False)
            for name in ("replica_ms", "busy_ms", "nano_dollars")
        ),
    )
    op.create_table(
        "retention",
        *(sa.Column(name, sa.Text, primary_key=True) for name in ("project", "kind")),
        sa.Column("keep_days", sa.Integer, nullable=False),
    )
    columns = ["organisation", "owner", "created_at", "id"]
    op.create_index("conversations_owner", "conversations", columns)
