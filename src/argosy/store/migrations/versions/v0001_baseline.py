"""Tables of the first version. A new database gets those of `schema.py` instead, so this step has nothing to do."""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Change nothing."""
