"""Decisions about feature flags."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "flags",
        sa.Column("id", sa.Text, primary_key=True),
        *(sa.Column(name, sa.Text) for name in ("state", "default_variant", "targeting")),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("changed_at", sa.Double, nullable=False),
        sa.Column("changed_by", sa.Text, nullable=False),
    )
