"""Findings of content rules in the ledger."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Add the column, empty for earlier requests."""
    op.add_column("usage", sa.Column("findings", sa.Text, nullable=False, server_default=""))
