"""Download of a model into the store: parallel, resumable, verified, and once for all processes of a machine."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import PurePosixPath

from argosy.model_store.file_hashes import CHUNK_BYTES, FileHashes, hash_file
from argosy.model_store.file_lock import file_lock
from argosy.model_store.manifest import Manifest, ModelFile, ModelStoreError
from argosy.model_store.model_source import ModelSource, SourceFile, canonical_source, open_source
from argosy.model_store.model_store import ModelStore, ModelVersion, check_name

DEFAULT_PARALLEL_FILES = 8
READ_BYTES = 8 << 20
"""Size of a read from a source. What was read before is not fetched again."""
_CLONE_FILE = 0x40049409
"""FICLONE of ioctl_ficlonerange(2): share the blocks of a file until one of the two is written."""


class PullObserver:
    """Receives the progress of a download, from several threads. This one ignores it."""

    def on_wait(self) -> None:
        """Another process downloads the same model, for which this one waits."""

    def on_files(self, files: Iterable[SourceFile]) -> None:
        """The files of the model are known."""

    def on_bytes(self, count: int) -> None:
        """Bytes have been stored or found in the store."""


def pull_model(
    store: ModelStore,
    source: str,
    *,
    name: str | None = None,
    revision: str | None = None,
    digest: str | None = None,
    licence: str | None = None,
    base_model: str | None = None,
    links_files: bool = False,
    parallel_files: int = DEFAULT_PARALLEL_FILES,
    observer: PullObserver | None = None,
) -> ModelVersion:
    """Download a model, or what is missing of it, and add it as a version.

    Args:
        store: The store of this machine.
        source: Directory, GGUF file, name on the hub, or URL.
        name: Name of the model; by default that of the source.
        revision: Branch, tag or commit on the hub. For other sources it is only recorded.
        digest: Digest that the model must have. Nothing becomes visible if it has another one.
        licence: Licence, if the model card should not decide.
        base_model: Model from which it was trained, if the model card should not decide.
        links_files: Link the files of a directory instead of copying them. They must not be changed in place then.
        parallel_files: Number of files that are fetched at the same time.
        observer: Receives the progress.

    Raises:
        ModelStoreError: The model cannot be fetched, stored or trusted. The message says what to do.
    """
    observer = observer or PullObserver()
    canonical = canonical_source(source)
    name = check_name(name or default_name(canonical))
    started_at = time.time()
    with store.writing():
        key = _key("pull", canonical, revision or "")
        with file_lock(store.lock_of(key), on_wait=observer.on_wait):
            known = store.find_by_source(canonical, revision)
            if (
                known is not None
                and known.pulled_at >= started_at  # by the process for which this one has waited
                and known.name == name
                and digest in {None, known.digest}
            ):
                return known
            found = open_source(canonical, revision)
            observer.on_files(found.files)
            files = _fetch_files(store, found, links_files, parallel_files, observer)
            manifest = Manifest.from_files(files)
            if digest is not None and manifest.digest != digest:
                raise ModelStoreError(
                    f"{source} has the digest {manifest.digest}, not {digest}. Check the source and its revision."
                )
            version = ModelVersion(
                name=name,
                digest=manifest.digest,
                source=canonical,
                revision=found.revision,
                licence=licence or found.card.get("licence", ""),
                base_model=base_model or found.card.get("base_model", ""),
                tokenizer_digest=manifest.tokenizer_digest,
                size=manifest.size,
                pulled_at=time.time(),
            )
            return store.publish(manifest, version, found.report)


def default_name(source: str) -> str:
    """Return the name of a model without one: the last part of its source, in what a name may contain."""
    last = PurePosixPath(source.partition("://")[2] or source).name.removesuffix(".gguf")
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in last)[:96]


def _fetch_files(
    store: ModelStore,
    source: ModelSource,
    links_files: bool,  # noqa: FBT001 - internal
    parallel_files: int,
    observer: PullObserver,
) -> list[ModelFile]:
    stopping = threading.Event()
    fetchers = [
        _FileFetcher(store, source, file, links_files or source.may_link, stopping, observer)
        for file in source.files
    ]
    _check_free_space(store, fetchers)
    with ThreadPoolExecutor(max(parallel_files, 1), "pull") as pool:
        results = [pool.submit(fetcher.fetch) for fetcher in fetchers]
        try:
            wait(results, return_when=FIRST_EXCEPTION)
        finally:
            stopping.set()  # the others stop at their next read; what they have stays
            for result in results:
                result.cancel()
    failed = [
        error for result in results if not result.cancelled() and (error := result.exception())
    ]
    if failed:
        raise next((e for e in failed if not isinstance(e, _StoppedError)), failed[0])
    return [result.result() for result in results]


class _StoppedError(Exception):
    """A file was not fetched because another one failed."""


def _check_free_space(store: ModelStore, fetchers: list[_FileFetcher]) -> None:
    needed = sum(fetcher.missing_bytes() for fetcher in fetchers)
    free = shutil.disk_usage(store.folder).free
    if needed > free:
        message = f"the model needs {needed:,} bytes, but {free:,} are free"
        raise OSError(errno.ENOSPC, message, str(store.folder))


class _FileFetcher:
    """Brings one file into the store."""

    def __init__(
        self,
        store: ModelStore,
        source: ModelSource,
        file: SourceFile,
        may_link: bool,  # noqa: FBT001 - internal
        stopping: threading.Event,
        observer: PullObserver,
    ) -> None:
        self._store = store
        self._name = f"{source.source}: {file.path}"
        self._file = file
        self._may_link = may_link
        self._stopping = stopping
        self._observer = observer
        self._hashes = FileHashes()
        key = _key(source.source, file.path, str(file.size), file.state)
        self._partial = store.partial / key
        self._fetched = store.fetched / key if file.state else None

    def missing_bytes(self) -> int:
        """Return how many bytes are to be fetched over a network, at most."""
        if self._file.local is not None or self._known_sha256() is not None:
            return 0
        return self._file.size - (self._partial.stat().st_size if self._partial.exists() else 0)

    def fetch(self) -> ModelFile:
        """Return the file's entry in the manifest when the store has the file.

        Raises:
            ModelStoreError: The file cannot be read, or is not the one that was listed.
            OSError: The store cannot be written.
        """
        sha256 = self._find_stored()
        if sha256 is None:
            sha256 = self._link() if self._may_link else None
            sha256 = sha256 or self._copy()
            if self._fetched is not None:
                self._fetched.write_text(sha256)
        return ModelFile(path=self._file.path, sha256=sha256, size=self._file.size)

    def _known_sha256(self) -> str | None:
        """Return the SHA-256 of the file if the store has a file of this content."""
        sha256 = self._file.sha256
        if sha256 is None and self._fetched is not None and self._fetched.is_file():
            sha256 = self._fetched.read_text()
        if sha256 is None or len(sha256) != 64 or not self._store.blob(sha256).is_file():
            return None
        return sha256

    def _find_stored(self) -> str | None:
        """Return the SHA-256 of the file if the store has it undamaged."""
        sha256 = self._known_sha256()
        if sha256 is None:
            return None
        blob = self._store.blob(sha256)
        if blob.stat().st_size != self._file.size or self._hashes.sha256(blob) != sha256:
            blob.unlink()
            return None
        self._observer.on_bytes(self._file.size)
        return sha256

    def _link(self) -> str | None:
        """Link a file of this machine. None if it is elsewhere, or on another file system."""
        local = self._file.local
        if local is None:
            return None
        self._partial.unlink(missing_ok=True)
        try:
            self._partial.hardlink_to(local)
        except OSError:
            return None
        return self._keep(hash_file(self._partial, self._observer.on_bytes))

    def _copy(self) -> str:
        """Read the file from where an earlier attempt has stopped, and hash it meanwhile."""
        digest = hashlib.sha256()
        with self._partial.open("a+b") as partial:
            if not self._clone(partial.fileno()):
                partial.truncate(min(partial.seek(0, os.SEEK_END), self._file.size))
            partial.seek(0)
            while chunk := partial.read(CHUNK_BYTES):
                digest.update(chunk)
                self._observer.on_bytes(len(chunk))
            while (start := partial.tell()) < self._file.size:
                if self._stopping.is_set():
                    raise _StoppedError
                chunk = self._file.read(start, min(start + READ_BYTES, self._file.size))
                if not chunk:
                    raise self._changed()
                partial.write(chunk)
                digest.update(chunk)
                self._observer.on_bytes(len(chunk))
            partial.flush()
            os.fsync(partial.fileno())
        return self._keep(digest.hexdigest())

    def _clone(self, descriptor: int) -> bool:
        """Share the blocks of a file of this machine, where the file system can. Return whether it did."""
        if self._file.local is None or os.fstat(descriptor).st_size:
            return False
        with self._file.local.open("rb") as original:
            try:
                fcntl.ioctl(descriptor, _CLONE_FILE, original.fileno())
            except OSError:
                return False
        return True

    def _keep(self, sha256: str) -> str:
        """Move the complete file to its place, if it is the right one.

        Raises:
            ModelStoreError: It is another one.
        """
        expected, size = self._file.sha256, self._partial.stat().st_size
        if size != self._file.size or (self._file.is_changed() and not self._is_linked()):
            raise self._changed()
        if expected not in {None, sha256}:
            self._partial.unlink()
            raise ModelStoreError(
                f"{self._name} has the SHA-256 {sha256}, but its publisher names {expected}. Do not trust it; pull it "
                "again, or from another source."
            )
        blob = self._store.blob(sha256)
        if not self._is_linked():
            self._partial.chmod(0o444)
        if not blob.is_file() or self._hashes.sha256(blob) != sha256:
            self._partial.rename(blob)
        self._partial.unlink(missing_ok=True)  # the content was in the store under another name
        return sha256

    def _is_linked(self) -> bool:
        """Return whether the partial file is a link to the original, whose times and mode are not ours."""
        return self._file.local is not None and self._partial.samefile(self._file.local)

    def _changed(self) -> ModelStoreError:
        self._partial.unlink(missing_ok=True)
        return ModelStoreError(f"{self._name} changed while it was read. Pull the model again.")


def _key(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
