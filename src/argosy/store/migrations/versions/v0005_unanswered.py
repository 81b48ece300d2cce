"""Sums of days say how many of their requests count against no limit."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Of those that are there it is not known; older gateways, which go on meanwhile, do not say it either."""
    column = sa.Column("unanswered", sa.BigInteger, nullable=False, server_default="0")
    op.add_column("usage_days", column)
