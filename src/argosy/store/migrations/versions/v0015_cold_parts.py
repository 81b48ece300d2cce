"""Parts of the archive of usage."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "cold_parts",
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("organisation", sa.Text, nullable=False),
        sa.Column("day", sa.Integer, nullable=False),
        sa.Column("rows", sa.BigInteger, nullable=False),
        sa.Column("nano_dollars", sa.BigInteger, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("sha256", sa.Text, nullable=False),
    )
    op.create_index("cold_parts_organisation", "cold_parts", ["organisation", "day"])
