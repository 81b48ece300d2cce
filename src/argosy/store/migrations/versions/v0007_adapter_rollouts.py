"""Rollouts of adapters, and their evidence."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the columns. Persons set the shares of the candidates that exist."""
    for column in (
        sa.Column("rollout", sa.Text, nullable=False, server_default=""),
        sa.Column("step_s", sa.Double),
        sa.Column("rejected", sa.Text),
        sa.Column("rejection", sa.Text, nullable=False, server_default=""),
        sa.Column("evidence_version", sa.BigInteger),
        sa.Column("evidence", sa.LargeBinary),
    ):
        op.add_column("adapters", column)
    op.execute("UPDATE adapters SET rollout = 'rollout_' || id WHERE candidate IS NOT NULL")
