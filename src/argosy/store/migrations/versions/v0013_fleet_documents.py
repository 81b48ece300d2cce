"""Add versioned documents of fleets, which hold the routes and rollouts of their pools."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    """Create the table. Gateways and controllers of earlier versions ignore it."""
    op.create_table(
        "fleet_documents",
        sa.Column("fleet", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("document", sa.LargeBinary, nullable=False),
    )
