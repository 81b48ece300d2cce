"""Files of clients: their rows in the store, their contents in the store of blobs, and uploads in parts.

A blob becomes a file in two steps. `write` puts the content where no client can see it, and `create` adds the row.
Every blob has either a row of a file or one of `blob_removals`, so a process that dies in between leaves nothing.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    and_,
    delete,
    insert,
    literal,
    or_,
    select,
    tuple_,
    update,
)

from argosy.blob_store import BlobStore, BlobStoreError, blob_key
from argosy.store import schema
from argosy.store.database import Database
from argosy.store.errors import FileInUseError, NotFoundError, StoreError, UploadError
from argosy.store.item_table import DELETION_BATCH_ROWS, find_row
from argosy.store.stored_bytes import ROW_OVERHEAD_BYTES, ItemOwner, StoredBytes

NEVER = math.inf
"""Expiry of a file that does not expire."""
UPLOAD_LIFETIME_S = 3600.0
ABANDONED_AFTER_S = 86_400.0
"""Time after which a blob that has not become a file is deleted."""
_PART_PURPOSE = "upload_part"
_HOLD_PREFIX = ".hold/"
"""Beginning of the keys of rows that keep blobs while they are not due. No part of a blob's key begins with a dot."""
_files, _uploads, _removals = schema.files.c, schema.uploads.c, schema.blob_removals.c

UploadStatus = Literal["pending", "completed", "cancelled"]


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file without its content."""

    id: str
    created_at: float
    expires_at: float
    """Seconds since the epoch, or `NEVER`."""
    filename: str
    purpose: str
    media_type: str
    size: int
    """Size in bytes."""
    sha256: str
    """In hexadecimal digits."""


class StoredUpload(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is uploaded in parts."""

    id: str
    created_at: float
    expires_at: float
    status: UploadStatus
    filename: str
    purpose: str
    media_type: str
    size: int
    """Size in bytes that all parts together must have."""
    lifetime_s: float | None
    """Lifetime of the file from its creation; None if it does not expire."""
    file: str | None
    """Id of the file, once the upload is complete."""


class WrittenBlob(NamedTuple):
    """Content that was written for a file that does not exist yet."""

    file_id: str
    sha256: str
    size: int


class FileContent(NamedTuple):
    """Content of a file or of a part of an upload, of any owner."""

    key: str
    """Key of its blob."""
    sha256: str
    size: int


class FileStore:
    """Files by tenant. Every call may block on the database or on the store of blobs.

    Methods that take an id raise NotFoundError if the owner has no such file or upload, or if it has expired. Methods
    that store raise StorageQuotaError beyond the owner's bound, and those that read or write contents BlobStoreError.

    Args:
        database: Database with the rows.
        clock: Source of seconds since the epoch.
        stored_bytes: Totals by tenant, which count files.
        blobs: Contents. None for a process that reads and writes none. What it deletes is deleted by a gateway.
    """

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float],
        stored_bytes: StoredBytes,
        blobs: BlobStore | None,
    ) -> None:
        self._database = database
        self._clock = clock
        self._stored_bytes = stored_bytes
        self._blobs = blobs

    @property
    def has_blobs(self) -> bool:
        """Whether contents can be read and written."""
        return self._blobs is not None

    # --- files -----------------------------------------------------------------------------------

    def write(
        self, owner: ItemOwner, stream: Iterable[bytes], *, id_prefix: str = "file-"
    ) -> WrittenBlob:
        """Write the content of a new file. Pass it to `create` or `add` within a day, or to `discard`.

        Memory does not grow with the stream. If the stream raises, nothing is left and the exception propagates.
        """
        file_id = id_prefix + secrets.token_hex(12)
        key = blob_key(*owner, file_id)
        row = {"key": key, "due_at": self._clock() + ABANDONED_AFTER_S}
        with self._database.write_transaction() as connection:
            connection.execute(insert(schema.blob_removals), row)
        try:
            sha256, size = self._require_blobs().put(key, stream)
        except BaseException:
            self._remove_blobs([key])
            raise
        return WrittenBlob(file_id, sha256, size)

    def discard(self, owner: ItemOwner, written: WrittenBlob) -> None:
        """Delete content that does not become a file."""
        self._remove_blobs([blob_key(*owner, written.file_id)])

    def create(
        self,
        owner: ItemOwner,
        written: WrittenBlob,
        *,
        filename: str,
        purpose: str,
        media_type: str,
        lifetime_s: float | None = None,
    ) -> StoredFile:
        """Create a file with content that was written.

        Args:
            owner: Its owner.
            written: The content.
            filename: Its name, which need not be unique.
            purpose: What clients may use it for.
            media_type: Media type of the content.
            lifetime_s: Seconds after which it is deleted; None for never.
        """
        with self._database.write_transaction() as connection:
            return self.add(
                *(connection, owner, written),
                filename=filename,
                purpose=purpose,
                media_type=media_type,
                lifetime_s=lifetime_s,
            )

    def add(
        self,
        connection: Connection,
        owner: ItemOwner,
        written: WrittenBlob,
        *,
        filename: str,
        purpose: str,
        media_type: str,
        lifetime_s: float | None = None,
    ) -> StoredFile:
        """Create a file like `create`, as a part of another transaction."""
        now = self._clock()
        file = StoredFile(
            id=written.file_id,
            created_at=now,
            expires_at=NEVER if lifetime_s is None else now + lifetime_s,
            filename=filename,
            purpose=purpose,
            media_type=media_type,
            size=written.size,
            sha256=written.sha256,
        )
        self._insert(connection, owner, file)
        return file

    def get(self, owner: ItemOwner, file_id: str) -> StoredFile:
        """Return a file."""
        with self._database.read_transaction() as connection:
            return _to_file(self._require(connection, owner, file_id))

    def list_files(
        self,
        owner: ItemOwner,
        *,
        after: str | None = None,
        limit: int,
        is_descending: bool = True,
        purpose: str | None = None,
    ) -> tuple[list[StoredFile], bool]:
        """Return a page of the files of an owner by their creation, and whether there are more.

        Args:
            owner: Their owner.
            after: Id of the file after which the page starts.
            limit: Most files of the page.
            is_descending: Whether the latest file is the first.
            purpose: Their purpose; None for all.
        """
        where = self._is_usable(owner)
        if purpose is not None:
            where.append(_files.purpose == purpose)
        place = tuple_(_files.created_at, _files.id)
        order = [column.desc() if is_descending else column for column in place.clauses]
        with self._database.read_transaction() as connection:
            if after is not None:
                row = self._require(connection, owner, after)
                start = tuple_(literal(row.created_at), literal(row.id))
                where.append(place < start if is_descending else place > start)
            query = select(schema.files).where(*where).order_by(*order).limit(limit + 1)
            rows = connection.execute(query).all()
        return [_to_file(row) for row in rows[:limit]], len(rows) > limit

    def open(
        self, owner: ItemOwner, file_id: str, start: int = 0, end: int | None = None
    ) -> Iterator[bytes]:
        """Open a file, and return its bytes from `start` to before `end` in blocks."""
        file = self.get(owner, file_id)
        end = file.size if end is None else min(end, file.size)
        if start >= end:
            return iter(())
        return self._require_blobs().open(blob_key(*owner, file_id), start, end)

    def delete(self, owner: ItemOwner, file_id: str) -> None:
        """Delete a file. Raises FileInUseError while others hold it."""
        with self._database.write_transaction() as connection:
            row = self._require(connection, owner, file_id, is_locked=True)
            if row.holds:
                raise FileInUseError(
                    f"The file {file_id[:200]!r} is in use. Cancel the batch or job that needs it, or wait for its end."
                )
            keys = self._delete_rows(connection, [file_id])
        self._remove_blobs(keys)

    def hold(self, connection: Connection, owner: ItemOwner, file_id: str) -> StoredFile:
        """Return a file, which is neither deleted nor expires until `release`, as a part of a transaction."""
        row = self._require(connection, owner, file_id, is_locked=True)
        self._change_holds(connection, file_id, 1)
        return _to_file(row)

    def release(self, connection: Connection, file_id: str) -> None:
        """End one `hold` of a file, as a part of a transaction."""
        self._change_holds(connection, file_id, -1)

    # --- uploads ---------------------------------------------------------------------------------

    def create_upload(
        self,
        owner: ItemOwner,
        *,
        filename: str,
        purpose: str,
        media_type: str,
        size: int,
        lifetime_s: float | None = None,
    ) -> StoredUpload:
        """Begin the upload of a file of `size` bytes in parts. It expires after an hour."""
        now = self._clock()
        upload = StoredUpload(
            id="upload_" + secrets.token_hex(12),
            created_at=now,
            expires_at=now + UPLOAD_LIFETIME_S,
            status="pending",
            filename=filename,
            purpose=purpose,
            media_type=media_type,
            size=size,
            lifetime_s=lifetime_s,
            file=None,
        )
        self._stored_bytes.check_room(owner, size)
        with self._database.write_transaction() as connection:
            row = msgspec.structs.asdict(upload) | owner._asdict()
            connection.execute(insert(schema.uploads), row)
        return upload

    def check_pending(self, owner: ItemOwner, upload_id: str) -> None:
        """Raise UploadError if an upload has ended."""
        with self._database.read_transaction() as connection:
            self._require_pending(connection, owner, upload_id)

    def add_part(self, owner: ItemOwner, upload_id: str, written: WrittenBlob) -> StoredFile:
        """Add content that was written as a part of an upload. Raises UploadError if it has ended."""
        with self._database.write_transaction() as connection:
            upload = self._require_pending(connection, owner, upload_id, is_locked=True)
            part = StoredFile(
                id=written.file_id,
                created_at=self._clock(),
                expires_at=upload.expires_at,
                filename="",
                purpose=_PART_PURPOSE,
                media_type="",
                size=written.size,
                sha256=written.sha256,
            )
            self._insert(connection, owner, part, upload_id)
        return part

    def complete_upload(
        self, owner: ItemOwner, upload_id: str, part_ids: Sequence[str], md5: str | None = None
    ) -> tuple[StoredUpload, StoredFile]:
        """Create the file of an upload from its parts in this order. A repeated call returns the same file.

        Args:
            owner: Its owner.
            upload_id: Id of the upload.
            part_ids: Ids of its parts. Others are deleted.
            md5: MD5 that the content must have, in hexadecimal digits; None for any.

        Raises:
            UploadError: The upload was cancelled, or the parts are not the file that was announced.
        """
        with self._database.read_transaction() as connection:
            row = self._require_upload(connection, owner, upload_id)
            if row.status == "completed":
                return _to_upload(row), _to_file(self._require(connection, owner, row.file))
            self._require_pending(connection, owner, upload_id)
            is_part = _files.upload == upload_id
            sizes = dict(
                map(
                    tuple[str, int],
                    connection.execute(select(_files.id, _files.size).where(is_part)),
                )
            )
        unknown = [part for part in part_ids if part not in sizes]
        if unknown or len(set(part_ids)) < len(part_ids):
            raise UploadError(
                f"The upload has no part {unknown[0][:200]!r}."
                if unknown
                else "A part is named twice. Name each part once, in their order."
            )
        size = sum(sizes[part] for part in part_ids)
        if size != row.size:
            raise UploadError(
                f"The parts have {size:,} bytes together, and the upload was announced with {row.size:,}. Add the rest,"
                " or cancel it."
            )
        written = self.write(owner, self._join_parts(owner, part_ids, md5))
        try:
            return self._finish_upload(owner, upload_id, written)
        except BaseException:
            self.discard(owner, written)
            raise

    def cancel_upload(self, owner: ItemOwner, upload_id: str) -> StoredUpload:
        """Cancel an upload and delete its parts. Raises UploadError if it is complete."""
        with self._database.write_transaction() as connection:
            row = self._require_upload(connection, owner, upload_id, is_locked=True)
            if row.status == "completed":
                raise UploadError("The upload is complete. Delete its file instead.")
            keys = self._end_upload(connection, upload_id, {"status": "cancelled"})
            cancelled = _to_upload(self._require_upload(connection, owner, upload_id))
        self._remove_blobs(keys)
        return cancelled

    # --- ends of files ---------------------------------------------------------------------------

    def delete_expired(self) -> int:
        """Delete a batch of expired files and uploads. Returns their number, 0 if no more have expired."""
        now = self._clock()
        with self._database.write_transaction() as connection:
            ended = delete(schema.uploads).where(_uploads.expires_at <= now)
            count = connection.execute(ended).rowcount
        return count + self._delete_batch(_files.expires_at <= now, _files.holds == 0)

    def delete_owned(self, owner: ItemOwner, *, before: float | None = None) -> int:
        """Delete files of an owner, and return their number.

        Args:
            owner: The owner.
            before: Time before which they were created, without those that are in use. None for all files and uploads.
        """
        where = [owner.owns(schema.files)]
        if before is None:
            with self._database.write_transaction() as connection:
                connection.execute(delete(schema.uploads).where(owner.owns(schema.uploads)))
        else:
            where += [_files.created_at < before, _files.holds == 0]
        deleted = 0
        while batch := self._delete_batch(*where):
            deleted += batch
        return deleted

    def iter_contents(self) -> Iterator[FileContent]:
        """Yield the contents of all files and parts of all owners, as of one moment."""
        columns = _files.organisation, _files.owner, _files.id, _files.sha256, _files.size
        query = select(*columns).execution_options(yield_per=DELETION_BATCH_ROWS)
        with self._database.read_transaction() as connection:
            for row in connection.execute(query):
                key = blob_key(row.organisation, row.owner, row.id)
                yield FileContent(key, row.sha256, row.size)

    @contextmanager
    def keeping_blobs(self) -> Iterator[None]:
        """Keep the blobs of files that any process deletes within the context, at most for a day.

        So the blobs of all files in a copy of the rows exist as long as the context in which the copy was made.
        """
        key = _HOLD_PREFIX + secrets.token_hex(8)
        row = {"key": key, "due_at": self._clock() + ABANDONED_AFTER_S}
        with self._database.write_transaction() as connection:
            connection.execute(insert(schema.blob_removals), row)
        try:
            yield
        finally:
            self._forget_removals([key])

    def remove_blobs(self) -> int:
        """Delete a batch of the blobs that are due. Returns their number, 0 if no more are, or if all are kept.

        Raises:
            BlobStoreError: The blobs cannot be deleted.
        """
        due = select(_removals.key).where(_removals.due_at <= self._clock())
        with self._database.read_transaction() as connection:
            keys = list(connection.execute(due.limit(DELETION_BATCH_ROWS)).scalars())
        if self._are_blobs_kept():
            return 0
        blobs = self._require_blobs()
        for key in keys:
            blobs.delete(key)
        self._forget_removals(keys)
        return len(keys)

    # --- rows and blobs --------------------------------------------------------------------------

    def _require_blobs(self) -> BlobStore:
        if self._blobs is None:
            raise BlobStoreError(
                "There is no place for contents of files. Set store.blobs to a folder or a URL that all gateways share."
            )
        return self._blobs

    def _insert(
        self, connection: Connection, owner: ItemOwner, file: StoredFile, upload: str | None = None
    ) -> None:
        """Insert the row of a file within the owner's bound of bytes. Its blob then has no removal any more."""
        self._stored_bytes.add(connection, owner, file.size + ROW_OVERHEAD_BYTES)
        row = msgspec.structs.asdict(file) | owner._asdict()
        connection.execute(insert(schema.files), row | {"holds": 0, "upload": upload})
        removal = delete(schema.blob_removals).where(_removals.key == blob_key(*owner, file.id))
        if not connection.execute(removal).rowcount:
            raise StoreError(
                "The content was written too long ago and is deleted. Upload it again."
            )

    def _delete_rows(self, connection: Connection, ids: Collection[str]) -> list[str]:
        """Delete the rows of files, and return the keys of their blobs, which are due for removal then."""
        statement = delete(schema.files).where(_files.id.in_(ids))
        rows = connection.execute(
            statement.returning(_files.id, _files.organisation, _files.owner, _files.size)
        ).all()
        freed: defaultdict[ItemOwner, int] = defaultdict(int)
        for row in rows:
            freed[ItemOwner(row.organisation, row.owner)] -= row.size + ROW_OVERHEAD_BYTES
        self._stored_bytes.change(connection, freed)
        keys = [blob_key(row.organisation, row.owner, row.id) for row in rows]
        if keys:
            due_at = self._clock()
            connection.execute(
                insert(schema.blob_removals), [{"key": key, "due_at": due_at} for key in keys]
            )
        return keys

    def _delete_batch(self, *where: ColumnElement[bool]) -> int:
        query = select(_files.id).where(*where).limit(DELETION_BATCH_ROWS)
        with self._database.write_transaction() as connection:
            ids = list(connection.execute(query.with_for_update(skip_locked=True)).scalars())
            keys = self._delete_rows(connection, ids)
        self._remove_blobs(keys)
        return len(ids)

    def _remove_blobs(self, keys: Sequence[str]) -> None:
        """Delete blobs now if that is possible. Otherwise they stay due for `remove_blobs`."""
        if self._blobs is None or not keys:
            return
        with suppress(BlobStoreError, StoreError):
            if self._are_blobs_kept():
                return
            for key in keys:
                self._blobs.delete(key)
            self._forget_removals(keys)

    def _are_blobs_kept(self) -> bool:
        """Return whether blobs of deleted files are kept. Call it after their rows were deleted, not before."""
        is_held = and_(
            _removals.key.startswith(_HOLD_PREFIX, autoescape=True),
            _removals.due_at > self._clock(),
        )
        with self._database.read_transaction() as connection:
            return (
                connection.execute(select(literal(1)).where(is_held).limit(1)).first() is not None
            )

    def _forget_removals(self, keys: Collection[str]) -> None:
        if keys:
            with self._database.write_transaction() as connection:
                connection.execute(delete(schema.blob_removals).where(_removals.key.in_(keys)))

    def _join_parts(
        self, owner: ItemOwner, part_ids: Iterable[str], md5: str | None
    ) -> Iterator[bytes]:
        blobs, digest = self._require_blobs(), hashlib.md5(usedforsecurity=False)
        for part in part_ids:
            for block in blobs.open(blob_key(*owner, part)):
                digest.update(block)
                yield block
        if md5 is not None and md5.lower() != digest.hexdigest():
            raise UploadError(
                f"The content has the MD5 {digest.hexdigest()}, not the one that was given. Upload it again."
            )

    def _finish_upload(
        self, owner: ItemOwner, upload_id: str, written: WrittenBlob
    ) -> tuple[StoredUpload, StoredFile]:
        with self._database.write_transaction() as connection:
            upload = self._require_pending(connection, owner, upload_id, is_locked=True)
            ended = {"status": "completed", "file": written.file_id}
            keys = self._end_upload(connection, upload_id, ended)
            file = self.add(
                *(connection, owner, written),
                filename=upload.filename,
                purpose=upload.purpose,
                media_type=upload.media_type,
                lifetime_s=upload.lifetime_s,
            )
        self._remove_blobs(keys)
        return msgspec.structs.replace(upload, status="completed", file=file.id), file

    def _end_upload(
        self, connection: Connection, upload_id: str, values: dict[str, Any]
    ) -> list[str]:
        connection.execute(update(schema.uploads).where(_uploads.id == upload_id).values(**values))
        parts = select(_files.id).where(_files.upload == upload_id)
        return self._delete_rows(connection, list(connection.execute(parts).scalars()))

    @staticmethod
    def _change_holds(connection: Connection, file_id: str, change: int) -> None:
        connection.execute(
            update(schema.files).where(_files.id == file_id).values(holds=_files.holds + change)
        )

    def _require(
        self, connection: Connection, owner: ItemOwner, file_id: str, *, is_locked: bool = False
    ) -> Row[Any]:
        """Return the row of a file."""
        query = select(schema.files).where(_files.id == file_id, *self._is_usable(owner))
        if is_locked:
            query = query.with_for_update()
        # PostgreSQL refuses NUL.
        row = connection.execute(query).one_or_none() if file_id.isprintable() else None
        if row is None:
            raise NotFoundError(
                f"The file {file_id[:200]!r} does not exist. It was deleted or has expired."
            )
        return row

    def _is_usable(self, owner: ItemOwner) -> list[ColumnElement[bool]]:
        """Return the conditions that a row is a file of this owner, and has not expired or is in use."""
        is_kept = or_(_files.expires_at > self._clock(), _files.holds > 0)
        return [owner.owns(schema.files), _files.upload.is_(None), is_kept]

    def _require_upload(
        self, connection: Connection, owner: ItemOwner, upload_id: str, *, is_locked: bool = False
    ) -> Row[Any]:
        row = find_row(
            *(connection, schema.uploads, owner, upload_id, self._clock()), is_locked=is_locked
        )
        if row is None:
            raise NotFoundError(
                f"The upload {upload_id[:200]!r} does not exist, or it has expired. Begin a new one."
            )
        return row

    def _require_pending(
        self, connection: Connection, owner: ItemOwner, upload_id: str, *, is_locked: bool = False
    ) -> StoredUpload:
        upload = _to_upload(self._require_upload(connection, owner, upload_id, is_locked=is_locked))
        if upload.status != "pending":
            raise UploadError(f"The upload is {upload.status}. Begin a new one.")
        return upload


def _to_file(row: Row[Any]) -> StoredFile:
    return StoredFile(**{name: getattr(row, name) for name in StoredFile.__struct_fields__})


def _to_upload(row: Row[Any]) -> StoredUpload:
    return StoredUpload(**{name: getattr(row, name) for name in StoredUpload.__struct_fields__})
