"""Exceptions of the store. Invalid field values raise a plain ValueError that names the field."""

from __future__ import annotations


class StoreError(ValueError):
    """The database cannot be used. The message says what to change: the URL, the driver, the tables or the server."""


class StoreUnavailableError(StoreError):
    """The database server is temporarily unreachable or not accepting work. A later attempt may succeed."""


class QueryTimeoutError(ValueError):
    """A query took longer than `limit_query_time` allows."""


class NotFoundError(ValueError):
    """No record has this id."""


class HistoryTooLongError(ValueError):
    """Stored items, or one to be stored, exceed what one request may have."""


class StorageQuotaError(ValueError):
    """The tenant would store more bytes than it may."""


class ConflictError(ValueError):
    """The change conflicts with an existing record: a name is taken, a key is revoked or a project is archived."""


class FileInUseError(ValueError):
    """The file cannot be deleted while others need it."""


class UploadError(ValueError):
    """The upload has ended, or its parts are not the file that was announced."""
