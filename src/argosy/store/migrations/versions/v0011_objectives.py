"""Counts of service level objectives."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "objective_hours",
        sa.Column("fleet", sa.Text, primary_key=True),
        sa.Column("hour", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("objective", sa.Text, primary_key=True),
        sa.Column("gateway", sa.Text, primary_key=True),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("misses", sa.BigInteger, nullable=False),
        sa.Column("slots", sa.LargeBinary, nullable=False),
        sa.Column("details", sa.LargeBinary, nullable=False),
    )
