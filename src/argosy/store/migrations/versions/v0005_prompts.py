"""Registry of prompts."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Create the table and its indexes."""
    op.create_table(
        "prompts",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("organisation", sa.Text, sa.ForeignKey("organisations.id")),
        sa.Column("project", sa.Text, sa.ForeignKey("projects.id")),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("labels", "content")),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("created_by", sa.Text, nullable=False),
        sa.Column("deleted_at", sa.Double),
    )
    op.create_index("prompts_listed", "prompts", ["created_at", "id"])
    op.create_index("prompts_listed_organisation", "prompts", ["organisation", "created_at", "id"])
