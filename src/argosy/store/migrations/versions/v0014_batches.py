"""Batches with their lines, and the service tier of usage records."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    """Create the tables, and add the column, empty for earlier requests."""
    op.add_column("usage", sa.Column("service_tier", sa.Text, nullable=False, server_default=""))
    op.create_table(
        "batches",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("organisation", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        *(
            sa.Column(name, sa.BigInteger, nullable=False)
            for name in (
                *("total", "completed", "failed", "closed"),
                *("input_tokens", "cached_tokens", "output_tokens", "bytes", "fence"),
            )
        ),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_index("batches_status", "batches", ["status"])
    op.create_index("batches_owner", "batches", ["organisation", "owner", "created_at", "id"])
    op.create_table(
        "batch_lines",
        sa.Column("batch", sa.Text, primary_key=True),
        sa.Column("line", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("custom_id", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("fence", sa.BigInteger, nullable=False),
        sa.Column("attempts", sa.BigInteger, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("status_code", sa.Integer),
        sa.Column("result", sa.LargeBinary),
    )
    op.create_index("batch_lines_open", "batch_lines", ["batch", "state", "model", "line"])
    op.create_index("batch_lines_holder", "batch_lines", ["holder"])
