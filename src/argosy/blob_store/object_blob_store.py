"""Blobs in an object store such as S3, which the extra `s3` reaches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

from argosy.blob_store.blob_store import (
    BLOCK_BYTES,
    BlobNotFoundError,
    BlobStoreError,
    DigestedStream,
)

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult

CHUNK_BYTES = 5 * 1024 * 1024
"""Size of the parts in which a blob is uploaded, the smallest that S3 accepts."""
MAX_CONCURRENT_CHUNKS = 2


class ObjectBlobStore:
    """Blobs as objects below a URL. Credentials come from the environment, as those for models do.

    Args:
        url: URL of the objects, such as `s3://bucket/prefix`.

    Raises:
        BlobStoreError: The URL is not valid.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        with self._translate_errors():
            self._store: ObjectStore = from_url(url)

    def put(self, key: str, stream: Iterable[bytes]) -> tuple[str, int]:
        digested = DigestedStream(stream)
        try:
            with self._translate_errors():
                obstore.put(
                    self._store,
                    key,
                    iter(digested),
                    chunk_size=CHUNK_BYTES,
                    max_concurrency=MAX_CONCURRENT_CHUNKS,
                )
        except BlobStoreError:
            if digested.error is not None:  # which obstore has replaced by one of its own
                raise digested.error from None
            raise
        return digested.summary()

    def open(self, key: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        wanted: GetOptions = {"range": {"offset": start} if end is None else (start, end)}
        with self._translate_errors():
            found = obstore.get(self._store, key, options=wanted if start or end else None)
        return self._read(found)

    def delete(self, key: str) -> None:
        with self._translate_errors(), suppress(FileNotFoundError):
            obstore.delete(self._store, key)

    def _read(self, found: GetResult) -> Iterator[bytes]:
        with self._translate_errors():
            for block in found.stream(min_chunk_size=BLOCK_BYTES):
                yield bytes(block)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            message = f"{error}. Restore it from a backup."
            raise BlobNotFoundError(message) from error
        except (BaseError, OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:500]
            raise BlobStoreError(
                f"The files at {self._url} cannot be used: {reason}. Check the URL, the credentials and the network."
            ) from error
