"""Consent of projects to samples of their answers, and the samples."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Add the column, and create the table with its indexes."""
    op.add_column("projects", sa.Column("quality", sa.Text, nullable=False, server_default="off"))
    op.create_table(
        "quality_samples",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("organisation", sa.Text, sa.ForeignKey("organisations.id"), nullable=False),
        sa.Column("project", sa.Text, sa.ForeignKey("projects.id"), nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("model", "version", "judge")),
        sa.Column("score", sa.Double, nullable=False),
        sa.Column("has_passed", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        *(sa.Column(name, sa.Text) for name in ("reason", "question", "answer")),
    )
    for columns in ([], ["organisation"], ["project"]):
        name = "_".join(["quality_samples_listed", *columns])
        op.create_index(name, "quality_samples", [*columns, "created_at", "id"])
