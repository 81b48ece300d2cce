"""Opens a store of blobs by its location: the path of a folder, or a URL."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from argosy.blob_store.blob_store import BlobStore, BlobStoreError
from argosy.blob_store.folder_blob_store import FolderBlobStore
from argosy.extras import install_command

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://.", re.IGNORECASE)
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "az", "azure", "abfs", "abfss"})


def check_location(location: str) -> None:
    """Raise ValueError if a location is neither the absolute path of a folder nor the URL of a known object store."""
    url = _URL.match(location)
    if url is None and not Path(location).is_absolute():
        raise ValueError(
            f"{location!r} is no absolute path and no URL. Write /folder or s3://bucket/prefix."
        )
    if url is not None and url[1].lower() not in _OBJECT_STORES:
        known = ", ".join(sorted(_OBJECT_STORES))
        raise ValueError(f"{url[1]}:// is not supported. Use a folder, or one of {known}.")


def open_blob_store(location: str) -> BlobStore:
    """Open the blobs at the path of a folder, or at the URL of an object store.

    Raises:
        BlobStoreError: The URL is not valid, or the extra `s3` is missing.
    """
    if _URL.match(location) is None:
        return FolderBlobStore(Path(location))
    if find_spec("obstore") is None:
        raise BlobStoreError(f"Object stores are not installed. Run {install_command('s3')}.")
    from argosy.blob_store.object_blob_store import ObjectBlobStore

    return ObjectBlobStore(location)
