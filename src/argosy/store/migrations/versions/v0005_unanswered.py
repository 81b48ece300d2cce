"""Add to the daily sums the number of requests that count against no limit."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add the column with the value 0 for existing rows and for rows of gateways of earlier versions."""
    column = sa.Column("unanswered", sa.BigInteger, nullable=False, server_default="0")
    op.add_column("usage_days", column)
