"""Interface of stores of blobs, and what its implementations share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Protocol
from urllib.parse import quote

BLOCK_BYTES = 256 * 1024
"""Size of the blocks in which blobs are read."""


class BlobStoreError(ValueError):
    """The blobs cannot be read or written. The message says what to change."""


class BlobNotFoundError(BlobStoreError):
    """There is no blob with this key."""


class BlobStoreFullError(BlobStoreError):
    """There is no space for the blob."""


class BlobStore(Protocol):
    """Blobs by their keys, as `blob_key` builds them. Every call may block, and any thread may call.

    Methods, and the iterator of `open`, raise BlobStoreError if the place of the blobs cannot be used.
    """

    def put(self, key: str, stream: Iterable[bytes]) -> tuple[str, int]:
        """Write a blob, and replace one with this key. It is durable when the call returns.

        Memory does not grow with the stream. If the stream raises, nothing is written and the exception propagates.

        Returns:
            SHA-256 of the blob in hexadecimal digits, and its size in bytes.

        Raises:
            BlobStoreFullError: There is no space.
        """

    def open(self, key: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Open a blob, and return its bytes from `start` to before `end` in blocks.

        Raises:
            BlobNotFoundError: There is no blob with this key.
        """

    def delete(self, key: str) -> None:
        """Delete a blob, if there is one with this key."""


def blob_key(organisation: str, owner: str, file_id: str) -> str:
    """Return the key of a file's blob. No other owner's key equals it, or leads out of the owner's folder."""
    parts = (
        quote(part, safe="").replace(".", "%2E") or "-" for part in (organisation, owner, file_id)
    )
    return "/".join(parts)


class DigestedStream:
    """Passes a stream on, and computes size and hash of what has passed.

    Args:
        stream: The stream.
    """

    def __init__(self, stream: Iterable[bytes]) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()
        self._size = 0
        self.error: BaseException | None = None
        """Exception that the stream has raised."""

    def __iter__(self) -> Iterator[bytes]:
        try:
            for block in self._stream:
                self._hash.update(block)
                self._size += len(block)
                yield block
        except BaseException as error:
            self.error = error
            raise

    def summary(self) -> tuple[str, int]:
        """Return SHA-256 and size of what has passed."""
        return self._hash.hexdigest(), self._size
