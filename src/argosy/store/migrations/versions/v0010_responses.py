"""Add responses and conversations of the Responses API, and secrets that gateways share."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Create the tables. Gateways of earlier versions ignore them."""
    op.create_table(
        "responses",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("organisation", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("previous", sa.Text),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("heartbeat_at", sa.Double),
    )
    op.create_index("responses_expires_at", "responses", ["expires_at"])
    op.create_index("responses_heartbeat_at", "responses", ["heartbeat_at"])
    op.create_table(
        "conversations",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("organisation", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_index("conversations_expires_at", "conversations", ["expires_at"])
    op.create_table(
        "items",
        sa.Column("parent", sa.Text, primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("organisation", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("item", sa.Text, nullable=False),
        sa.Column("is_output", sa.Boolean, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_index("items_item", "items", ["item"])
    op.create_table(
        "secrets",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("value", sa.LargeBinary, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
    )
