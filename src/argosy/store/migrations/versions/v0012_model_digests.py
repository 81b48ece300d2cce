"""Add the digest of the model that a replica has verified to the ledger."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Add the column. Existing rows, and those of gateways of earlier versions, have an empty digest."""
    op.add_column("usage", sa.Column("digest", sa.Text, nullable=False, server_default=""))
