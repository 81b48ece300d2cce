"""Golden sets, and the results of their runs."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Create the tables and their indexes."""
    op.create_table(
        "quality_sets",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("organisation", sa.Text, sa.ForeignKey("organisations.id")),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("items", sa.BigInteger, nullable=False),
        sa.Column("judge", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("created_by", sa.Text, nullable=False),
        sa.Column("deleted_at", sa.Double),
        sa.Column("content", sa.LargeBinary),
    )
    op.create_table(
        "quality_runs",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("organisation", sa.Text, sa.ForeignKey("organisations.id")),
        sa.Column("quality_set", sa.Text, sa.ForeignKey("quality_sets.id"), nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("model", "against", "verdict")),
        sa.Column("score", sa.Double, nullable=False),
        sa.Column("result", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("created_by", sa.Text, nullable=False),
    )
    for table, columns in (
        ("quality_sets", ["organisation"]),
        ("quality_runs", ["organisation", "quality_set"]),
    ):
        op.create_index(f"{table}_listed", table, ["created_at", "id"])
        for column in columns:
            op.create_index(f"{table}_listed_{column}", table, [column, "created_at", "id"])
