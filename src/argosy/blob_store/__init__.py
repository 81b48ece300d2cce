"""Store of blobs: contents of files by their keys, in a folder or in an object store.

`open_blob_store` opens one by its location. A blob becomes visible as a whole, after all of it is on the disk, and a
writer that fails or dies leaves nothing. Which blobs belong to which file is known by the store's tables only.
"""

from argosy.blob_store.blob_store import (
    BlobNotFoundError,
    BlobStore,
    BlobStoreError,
    BlobStoreFullError,
    blob_key,
)
from argosy.blob_store.opening import check_location, open_blob_store
