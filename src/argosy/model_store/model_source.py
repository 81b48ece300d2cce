"""Sources of models: a directory or GGUF file, the hub, or a URL that fsspec opens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from argosy.extras import install_command
from argosy.model_store.hub import (
    HubName,
    download_model,
    fetch_model_card,
    hub_commit,
    is_hub_url,
    read_model_card,
)
from argosy.model_store.manifest import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    Manifest,
    ModelStoreError,
    parse_manifest,
)
from argosy.model_store.model_files import (
    QUALITY_FILE,
    gguf_part_names,
    list_model_files,
    select_model_files,
)
from argosy.model_store.quality_report import MAX_REPORT_BYTES
from argosy.models import BUNDLED_MODELS

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_SHA256 = re.compile("[0-9a-f]{64}")
_OBJECT_STORES = frozenset(
    {"s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "http", "https"}
)
"""Protocols of obstore, which the extra `s3` installs."""
_STATE_KEYS = (
    *("e_tag", "ETag", "etag", "md5Hash", "content_md5"),
    *("LastModified", "mtime", "updated", "created"),
)
"""Names of the tag of a file's content in different file systems, then those of the time of its last change."""


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file to fetch."""

    path: str
    """Path in the manifest."""
    size: int
    state: str
    """Text that changes with the file, such as its ETag. Empty if nothing is known."""
    read: Callable[[int, int], bytes]
    """Returns the bytes from one offset to another."""
    is_changed: Callable[[], bool]
    """Returns whether the file has changed since it was listed."""
    sha256: str | None = None
    """Its SHA-256 according to the publisher's manifest."""
    local: Path | None = None
    """The file, if it is on this machine."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model that can be fetched, and what is known about it."""

    source: str
    """Canonical name of the source, which is equal for every process that means it."""
    files: tuple[SourceFile, ...]
    revision: str = ""
    card: Mapping[str, str] = field(default_factory=dict)
    """`licence` and `base_model`, as far as the publisher says so."""
    report: bytes | None = None
    """Quality report beside the model, which is not a part of it."""
    may_link: bool = False
    """Whether the files never change in place, so that the store may link them."""


def is_url(source: str) -> bool:
    """Return whether a source is a URL other than that of a model on the hub."""
    return _URL.match(source) is not None and not is_hub_url(source)


def canonical_source(source: str) -> str:
    """Return the name of a source that is equal for every process that means it.

    Raises:
        ModelStoreError: The source contains a password.
    """
    if is_url(source):
        parts = urlsplit(source)
        if parts.scheme == "file":
            return str(Path(unquote(parts.path)).absolute())
        if parts.username or parts.password:
            raise ModelStoreError(
                "the URL contains credentials, which would be stored. Remove them, and use the variables or files of "
                "the store's client, such as AWS_ACCESS_KEY_ID."
            )
        return source.rstrip("/")
    path = Path(source).expanduser()
    if path.exists():
        return str(path.absolute())
    if source in BUNDLED_MODELS:
        return str(BUNDLED_MODELS[source])
    if HubName.parse(source) is None or source.startswith((".", "~", "/")):
        raise ModelStoreError(f"there is no directory or file {path}. Check the path.")
    return source


def open_source(source: str, revision: str | None) -> ModelSource:
    """Find the files of a model. A model on the hub is downloaded into the cache of huggingface_hub.

    Args:
        source: Canonical name of the source.
        revision: Branch, tag or commit on the hub, or a note about another source.

    Raises:
        ModelStoreError: The source has no model, or cannot be read.
        OSError: A file of this machine cannot be read.
    """
    if is_url(source):
        return _open_url(source, revision)
    if Path(source).is_absolute():
        path = Path(source)
        card_folder = path if path.is_dir() else path.parent
        card = read_model_card(_read_text(card_folder / "README.md"))
        return ModelSource(
            source=source,
            files=_local_files(path),
            revision=revision or "",
            card=card,
            report=_read_local_report(path),
        )
    name = HubName.parse(source)
    if name is None:
        raise ModelStoreError(f"{source!r} is neither a path nor a name on the hub.")
    try:
        path = download_model(name, revision)
    except ValueError as error:
        raise ModelStoreError(str(error)) from error
    commit = hub_commit(path)
    return ModelSource(
        source=source,
        files=tuple(map(_with_hub_hash, _local_files(path))),
        revision=commit or revision or "",
        card=fetch_model_card(name.repository, commit),
        report=_read_local_report(path),
        may_link=True,
    )


def _with_hub_hash(file: SourceFile) -> SourceFile:
    """Expect the SHA-256 by which the cache of huggingface_hub names a large file."""
    name = "" if file.local is None else file.local.name
    return replace(file, sha256=name) if _SHA256.fullmatch(name) else file


def _local_files(path: Path) -> tuple[SourceFile, ...]:
    manifest = _read_local_manifest(path)
    if manifest is not None:
        files = {file.path: path / file.path for file in manifest.files}
        missing = sorted(name for name, file in files.items() if not file.is_file())
        if missing:
            raise ModelStoreError(f"{path} lacks {missing[0]}, which its {MANIFEST_FILE} lists.")
    else:
        files = list_model_files(path)
    hashes = {file.path: file.sha256 for file in manifest.files} if manifest else {}
    return tuple(
        _local_file(name, file.resolve(), hashes.get(name)) for name, file in files.items()
    )


def _local_file(name: str, file: Path, sha256: str | None) -> SourceFile:
    def read(start: int, end: int) -> bytes:
        with file.open("rb") as stream:
            stream.seek(start)
            return stream.read(end - start)

    def state() -> str:
        found = file.stat()
        return f"{found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"

    listed = state()
    return SourceFile(
        path=name,
        size=file.stat().st_size,
        state=listed,
        read=read,
        is_changed=lambda: state() != listed,
        sha256=sha256,
        local=file,
    )


def _read_local_manifest(path: Path) -> Manifest | None:
    file = path / MANIFEST_FILE
    return parse_manifest(file.read_bytes(), str(file)) if file.is_file() else None


def _read_local_report(path: Path) -> bytes | None:
    file = path / QUALITY_FILE
    return file.read_bytes()[:MAX_REPORT_BYTES] if file.is_file() else None


def _open_url(url: str, revision: str | None) -> ModelSource:
    file_system, root = find_file_system(url)
    try:
        details = _list_files(file_system, root)
        manifest = None
        if MANIFEST_FILE in details:
            file = str(details[MANIFEST_FILE]["name"])
            content = file_system.cat_file(file, start=0, end=MAX_MANIFEST_BYTES + 1)
            manifest = parse_manifest(content, f"{url}/{MANIFEST_FILE}")
        card = {}
        if "README.md" in details:
            content = file_system.cat_file(str(details["README.md"]["name"]), start=0, end=1 << 16)
            card = read_model_card(content.decode(errors="replace"))
        report: bytes | None = None
        if QUALITY_FILE in details:
            file = str(details[QUALITY_FILE]["name"])
            report = bytes(file_system.cat_file(file, start=0, end=MAX_REPORT_BYTES))
    except ModelStoreError:
        raise
    except Exception as error:
        raise _source_error(url, error) from error
    hashes = {file.path: file.sha256 for file in manifest.files} if manifest else {}
    try:
        is_file = url.endswith(".gguf")
        names = (
            list(hashes) if manifest else list(details) if is_file else select_model_files(details)
        )
        missing = [name for name in names if name not in details]
        if missing:
            raise ModelStoreError(f"it lacks {missing[0]}, which its {MANIFEST_FILE} lists.")  # noqa: TRY301
    except ModelStoreError as error:
        raise ModelStoreError(f"{url}: {error}") from error
    files = tuple(
        _remote_file(file_system, url, name, details[name], hashes.get(name)) for name in names
    )
    return ModelSource(source=url, files=files, revision=revision or "", card=card, report=report)


def find_file_system(url: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a URL and the path in it: obstore's where it is installed, or fsspec's own.

    Raises:
        ModelStoreError: What opens the URL is not installed, or the URL is not valid.
    """
    from fsspec.core import url_to_fs

    protocol = urlsplit(url).scheme.lower()
    try:
        if protocol in _OBJECT_STORES and find_spec("obstore") is not None:
            from obstore.fsspec import FsspecStore

            store: AbstractFileSystem = FsspecStore(protocol, skip_instance_cache=True)  # type: ignore[call-overload]
            return store, url if protocol.startswith("http") else url.partition("://")[2]
        file_system, root = url_to_fs(url)
    except ImportError as error:
        remedy = (
            f"Run {install_command('s3')}" if protocol in _OBJECT_STORES else "Install the package"
        )
        raise ModelStoreError(f"{protocol}:// is not installed ({error}). {remedy}.") from error
    except Exception as error:  # each file system has its own
        raise _source_error(url, error) from error
    return file_system, str(root)


def _list_files(file_system: AbstractFileSystem, root: str) -> dict[str, dict[str, Any]]:
    """Return the details of each file by its path in the directory `root`, or of the parts of the GGUF file `root`."""
    file_system.invalidate_cache()
    root = root.rstrip("/")
    if root.endswith(".gguf"):
        folder, _, name = root.rpartition("/")
        paths = {part: f"{folder}/{part}" for part in gguf_part_names(name)}
        return {part: file_system.info(path) | {"name": path} for part, path in paths.items()}
    found = file_system.find(root, maxdepth=2, detail=True)
    details = {
        name.removeprefix(root).lstrip("/"): detail
        for name, detail in found.items()
        if detail["type"] == "file"
    }
    if not details:
        raise ModelStoreError(f"{root} does not exist, or is empty. Check the URL.")
    return details


def _remote_file(
    file_system: AbstractFileSystem,
    url: str,
    name: str,
    detail: Mapping[str, Any],
    sha256: str | None,
) -> SourceFile:
    file, size = str(detail["name"]), detail["size"]
    if not isinstance(size, int):
        raise ModelStoreError(
            f"{url}: the size of {name} is unknown. Use a store that lists sizes."
        )

    def read(start: int, end: int) -> bytes:
        try:
            return bytes(file_system.cat_file(file, start=start, end=end))
        except Exception as error:
            raise _source_error(f"{url}/{name}", error) from error

    def is_changed() -> bool:
        try:
            return _state_of(file_system.info(file, refresh=True)) != _state_of(detail)
        except TypeError:  # a file system without a cache of listings
            return _state_of(file_system.info(file)) != _state_of(detail)

    return SourceFile(
        path=name,
        size=size,
        state=_state_of(detail),
        read=read,
        is_changed=is_changed,
        sha256=sha256,
    )


def _state_of(detail: Mapping[str, Any]) -> str:
    """Return what changes with a file: the tag of its content, or else the time of its last change."""
    found = next((detail[key] for key in _STATE_KEYS if detail.get(key)), None)
    return "" if found is None else f"{detail['size']} {found}"


def _read_text(file: Path) -> str:
    try:
        return file.read_bytes()[: 1 << 16].decode(errors="replace")
    except OSError:
        return ""


def _source_error(url: str, error: Exception) -> ModelStoreError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return ModelStoreError(
        f"cannot read {url}: {reason[:500]}. Check the URL, the credentials and the network, then pull again: what is "
        "downloaded is kept."
    )
