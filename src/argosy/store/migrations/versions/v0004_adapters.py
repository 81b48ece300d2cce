"""Registry of adapters."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Create the table and its indexes."""
    op.create_table(
        "adapters",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("organisation", sa.Text, sa.ForeignKey("organisations.id")),
        sa.Column("project", sa.Text, sa.ForeignKey("projects.id")),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("name", "base_model", "digest")),
        sa.Column("candidate", sa.Text),
        sa.Column("candidate_percent", sa.BigInteger, nullable=False),
        sa.Column("base_digest", sa.Text),
        sa.Column("pinned", sa.Boolean, nullable=False),
        sa.Column("min_replicas", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
    )
    op.create_index("adapters_listed", "adapters", ["created_at", "id"])
    op.create_index(
        "adapters_listed_organisation", "adapters", ["organisation", "created_at", "id"]
    )
