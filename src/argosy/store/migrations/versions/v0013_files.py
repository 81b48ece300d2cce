"""Files, uploads in parts, and blobs to delete."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    """Create the tables and their indexes."""
    op.create_table(
        "files",
        *_record_columns(),
        *_texts("filename", "purpose", "media_type", "sha256"),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("holds", sa.Integer, nullable=False),
        sa.Column("upload", sa.Text),
    )
    op.create_index("files_owner", "files", ["organisation", "owner", "created_at", "id"])
    op.create_index("files_expires_at", "files", ["expires_at"])
    op.create_index("files_upload", "files", ["upload"])
    op.create_table(
        "uploads",
        *_record_columns(),
        *_texts("status", "filename", "purpose", "media_type"),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("lifetime_s", sa.Double),
        sa.Column("file", sa.Text),
    )
    op.create_index("uploads_expires_at", "uploads", ["expires_at"])
    op.create_table(
        "blob_removals",
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("due_at", sa.Double, nullable=False),
    )


def _record_columns() -> list[sa.Column[Any]]:
    times = (sa.Column(name, sa.Double, nullable=False) for name in ("created_at", "expires_at"))
    return [sa.Column("id", sa.Text, primary_key=True), *_texts("organisation", "owner"), *times]


def _texts(*names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.Text, nullable=False) for name in names]
