"""What the store refuses, and why; whatever else it is given wrong is a ValueError that names the field."""

from __future__ import annotations


class StoreError(ValueError):
    """The database cannot be used; the message says what to change: its URL, its driver, its tables, or the server."""


class StoreUnavailableError(StoreError):
    """The server of the database cannot be reached, or does not do it now: it may be back soon."""


class NotFoundError(ValueError):
    """There is nothing with this id."""


class ConflictError(ValueError):
    """It cannot be done to what there is: a name is taken, a key is revoked, a project is archived."""
