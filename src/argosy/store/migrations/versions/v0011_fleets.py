"""Add declared fleets: their revisions, events, leases and records."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Create the tables. Gateways of earlier versions ignore them."""
    op.create_table(
        "fleet_revisions",
        sa.Column("fleet", sa.Text, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("applied_at", sa.Double, nullable=False),
        sa.Column("author", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("rollback_of", sa.Integer),
        sa.Column("declaration", sa.LargeBinary, nullable=False),
        sa.Column("generations", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "fleet_events",
        sa.Column("fleet", sa.Text, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("pool", sa.Text, nullable=False),
        sa.Column("replica", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
    )
    op.create_table(
        "fleet_leases",
        sa.Column("fleet", sa.Text, primary_key=True),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("renewals", sa.BigInteger, nullable=False),
        sa.Column("renewed_at", sa.Double, nullable=False),
        sa.Column("last_event", sa.Integer, nullable=False),
    )
    op.create_table(
        "fleet_records",
        sa.Column("fleet", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("record", sa.LargeBinary, nullable=False),
    )
