"""Totals of the bytes that each tenant stores, as of now. Each row counts 512 bytes beside its body."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Create the table and sum up what is stored."""
    op.create_table(
        "stored_bytes",
        *(sa.Column(name, sa.Text, primary_key=True) for name in ("organisation", "owner")),
        sa.Column("bytes", sa.BigInteger, nullable=False),
    )
    rows = " UNION ALL ".join(
        f"SELECT organisation, owner, length(body) + 512 AS size FROM {table}"  # noqa: S608 - constants
        for table in ("responses", "conversations", "items")
    )
    op.execute(
        f"INSERT INTO stored_bytes SELECT organisation, owner, SUM(size) FROM ({rows}) AS stored"  # noqa: S608 - constants
        " GROUP BY organisation, owner"
    )
