"""Index by which the stored chats of a tenant are listed."""

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Create the index."""
    columns = ["organisation", "owner", "created_at", "id"]
    op.create_index("responses_owner", "responses", columns, if_not_exists=True)
