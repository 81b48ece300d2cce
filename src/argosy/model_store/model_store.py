"""Models on this machine: files by their SHA-256, manifests by their digest, and versions with a name and a stage.

The folder has `blobs/HEX` (files), `manifests/HEX`, `models/HEX/` (directories of hard links to the blobs, which
replicas load), `versions/NAME/HEX.json`, `fetched/` and `partial/` (state of downloads), and `locks/`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, get_args
from urllib.parse import quote

import msgspec
from msgspec import Meta

from argosy.folders import data_folder, replace_file
from argosy.model_store.file_lock import file_lock
from argosy.model_store.manifest import (
    DIGEST_PREFIX,
    MANIFEST_FILE,
    Manifest,
    ModelDigest,
    ModelStoreError,
    digest_of,
    parse_manifest,
)
from argosy.model_store.model_files import QUALITY_FILE

FOLDER_VARIABLE = "ARGOSY_MODELS"
REFERENCE_PREFIX = "store:"
"""Prefix of a reference to the store where a path or a name on the hub could stand too."""
MIN_DIGEST_DIGITS = 8
Stage = Literal["candidate", "stable", "retired"]
STAGES: tuple[Stage, ...] = get_args(Stage)
_HEX = re.compile("[0-9a-f]{64}")
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
_REFERENCE = re.compile(r"(?P<name>[^:]+)(:(?P<stage>[a-z]+))?")
_DIGEST = re.compile(rf"{DIGEST_PREFIX}([0-9a-f]{{{MIN_DIGEST_DIGITS},64}})")


class ModelVersion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A version of a model: a digest under a name, with what is known about it. Only the stage changes."""

    name: str
    digest: ModelDigest
    stage: Stage = "candidate"
    source: str
    """Where it was pulled from."""
    revision: str = ""
    """Branch, tag or commit of the source."""
    licence: str = ""
    base_model: str = ""
    tokenizer_digest: str = ""
    """Digest of the tokenizer's files alone."""
    size: Annotated[int, Meta(ge=0)]
    """Size of all files in bytes."""
    pulled_at: float
    """Seconds since the epoch."""


class ModelStore:
    """Models in a folder. Several processes may use it at the same time, and read it without writing to it.

    Args:
        folder: Folder of the store. It is created by the first download.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.blobs = folder / "blobs"
        self.manifests = folder / "manifests"
        self.models = folder / "models"
        self.partial = folder / "partial"
        self.fetched = folder / "fetched"
        self._versions = folder / "versions"
        self._locks = folder / "locks"

    # --- reading ---------------------------------------------------------------------------------

    def list_versions(self) -> list[ModelVersion]:
        """Return all versions, sorted by name and from old to new.

        Raises:
            ModelStoreError: A version's file is damaged.
        """
        versions = [
            version
            for file in self._versions.glob("*/*.json")
            if (version := self._read_version(file)) is not None
        ]
        return sorted(versions, key=lambda each: (each.name, each.pulled_at, each.digest))

    def find(self, reference: str) -> ModelVersion:
        """Return the version that a reference means.

        Args:
            reference: `NAME` (the stable version, or else the newest candidate), `NAME:STAGE`, or the first digits of
                a digest after `sha256:`.

        Raises:
            ModelStoreError: There is no such version, or several match.
        """
        versions, named = self.list_versions(), list[ModelVersion]()
        text = reference.removeprefix(REFERENCE_PREFIX)
        if (digest := _DIGEST.fullmatch(text)) is not None:
            found = [each for each in versions if each.digest.startswith(digest[0])]
            if len({each.digest for each in found}) > 1:
                raise ModelStoreError(f"{text} means several models. Give more of its digits.")
        else:
            match = _REFERENCE.fullmatch(text)
            name, stage = (match["name"], match["stage"]) if match else (text, None)
            if stage is not None and stage not in STAGES:
                raise ModelStoreError(f"{stage!r} is no stage. Use {', '.join(STAGES)}.")
            named = [each for each in versions if each.name == name]
            stages = ("stable", "candidate") if stage is None else (stage,)
            found = next(filter(None, ([v for v in named if v.stage == s] for s in stages)), [])
        if not found and named:
            others = ", ".join(sorted({f"{each.name}:{each.stage}" for each in named}))
            raise ModelStoreError(
                f"the model store {self.folder} has no {reference}, but {others}. Name one of these, or make one "
                "stable with `argosy models promote`."
            )
        if not found:
            names = ", ".join(sorted({each.name for each in versions})[:8]) or "none"
            raise ModelStoreError(
                f"the model store {self.folder} has no {reference} (models: {names}). `argosy models list` shows its "
                "versions, `argosy models pull` adds one."
            )
        return found[-1]

    def find_by_source(self, source: str, revision: str | None) -> ModelVersion | None:
        """Return the version that was pulled last from a source, or None."""
        return max(
            (
                each
                for each in self.list_versions()
                if each.source == source and revision in {None, each.revision}
            ),
            key=lambda each: each.pulled_at,
            default=None,
        )

    def read_manifest(self, digest: str) -> Manifest | None:
        """Return the manifest of a model, or None if it is not in the store.

        Raises:
            ModelStoreError: The manifest is damaged.
        """
        file = self.manifests / digest.removeprefix(DIGEST_PREFIX)
        try:
            return read_manifest(file, digest)
        except FileNotFoundError:
            return None

    def model_path(self, digest: str) -> Path | None:
        """Return the directory of a model, or its GGUF file, or None if it is not in the store."""
        folder = self.model_folder(digest)
        if not (folder / MANIFEST_FILE).is_file():
            return None
        manifest = read_manifest(folder / MANIFEST_FILE, digest)
        names = [file.path for file in manifest.files]
        return folder / names[0] if all(name.endswith(".gguf") for name in names) else folder

    def model_folder(self, digest: str) -> Path:
        """Return the directory that the files of a model have in the store, whether or not it exists."""
        return self.models / digest.removeprefix(DIGEST_PREFIX)

    def blob(self, sha256: str) -> Path:
        """Return the path of a file by its content, whether or not it exists."""
        return self.blobs / sha256

    # --- writing ---------------------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Prevent that files are collected as garbage within a context, and report what the folder cannot do.

        Raises:
            ModelStoreError: The folder cannot be written, or the disk is full.
        """
        with self.explaining_errors(), file_lock(self._locks / "garbage", is_shared=True):
            for folder in (self.blobs, self.manifests, self.models, self.partial, self.fetched):
                folder.mkdir(parents=True, exist_ok=True)
            yield

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Prevent downloads within a context.

        Raises:
            ModelStoreError: A download is running, or the folder cannot be written.
        """

        def refuse() -> None:
            raise ModelStoreError(
                f"a download into {self.folder} is running. Collect garbage later."
            )

        with self.explaining_errors(), file_lock(self._locks / "garbage", on_wait=refuse):
            yield

    @contextmanager
    def explaining_errors(self) -> Iterator[None]:
        """Turn errors of the operating system into ones that say what to do."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            where = Path(error.filename or self.folder)
            remedy = "Check its permissions."
            if where.is_relative_to(self.folder) or self.folder.is_relative_to(where):
                remedy = f"Check its permissions, or set {FOLDER_VARIABLE} to another folder."
            if error.errno in _DISK_FULL:
                remedy = (
                    f"Free space with `argosy models gc`, or set {FOLDER_VARIABLE} to a folder on a larger disk. "
                    "What is downloaded is kept."
                )
            raise ModelStoreError(f"cannot use {where}: {reason}. {remedy}") from error

    def lock_of(self, key: str) -> Path:
        """Return the file by which a download is locked."""
        return self._locks / key

    def publish(
        self, manifest: Manifest, version: ModelVersion, report: bytes | None = None
    ) -> ModelVersion:
        """Make a model visible whose files are all in the store. Readers see all of it or nothing.

        A version that exists keeps its stage, and its quality report if no other one is given.

        Raises:
            OSError: The folder cannot be written.
        """
        file = self.manifests / version.digest.removeprefix(DIGEST_PREFIX)
        with file_lock(self._locks / "versions"):
            if not file.is_file():
                replace_file(file, manifest.encode())
                file.chmod(0o444)
            self._link_model(manifest, version.digest)
            if report is not None:
                replace_file(self.model_folder(version.digest) / QUALITY_FILE, report)
            known = self._read_version(self._version_file(version.name, version.digest))
            if known is not None:
                version = msgspec.structs.replace(version, stage=known.stage)
            self._write_version(version)
        return version

    def promote(self, version: ModelVersion, stage: Stage) -> list[ModelVersion]:
        """Give a version a stage. The version that was stable is retired if another one becomes stable.

        Returns:
            The changed versions.
        """
        with self.explaining_errors(), file_lock(self._locks / "versions"):
            changed = [msgspec.structs.replace(version, stage=stage)]
            if stage == "stable":
                changed += [
                    msgspec.structs.replace(each, stage="retired")
                    for each in self.list_versions()
                    if each.name == version.name
                    and each.stage == "stable"
                    and each.digest != version.digest
                ]
            for each in changed:
                self._write_version(each)
        return changed

    def remove_version(self, version: ModelVersion) -> None:
        """Remove a version. Its files stay."""
        file = self._version_file(version.name, version.digest)
        file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it has other versions
            file.parent.rmdir()

    def _link_model(self, manifest: Manifest, digest: str) -> None:
        folder = self.model_folder(digest)
        if folder.is_dir():
            self._repair_links(manifest, folder)
            return
        new = self.partial / f"model-{folder.name}-{os.getpid()}"
        shutil.rmtree(new, ignore_errors=True)
        for file in manifest.files:
            link = new / file.path
            link.parent.mkdir(parents=True, exist_ok=True)
            _link(self.blob(file.sha256), link)
        _link(self.manifests / folder.name, new / MANIFEST_FILE)
        new.rename(folder)

    def _repair_links(self, manifest: Manifest, folder: Path) -> None:
        """Replace links to damaged files that have been fetched again."""
        for file in manifest.files:
            link, blob = folder / file.path, self.blob(file.sha256)
            if not (link.is_file() and link.samefile(blob)):
                new = self.partial / f"link-{file.sha256}-{os.getpid()}"
                new.unlink(missing_ok=True)
                _link(blob, new)
                new.replace(link)

    def _version_file(self, name: str, digest: str) -> Path:
        folder = self._versions / quote(name, safe="")
        return folder / f"{digest.removeprefix(DIGEST_PREFIX)}.json"

    def _read_version(self, file: Path) -> ModelVersion | None:
        try:
            version = msgspec.json.decode(file.read_bytes(), type=ModelVersion)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeError) as error:
            raise ModelStoreError(
                f"cannot read {file}: {error}. Remove it, and pull the model again."
            ) from error
        if self._version_file(version.name, version.digest) != file:
            raise ModelStoreError(
                f"{file} describes another version. Remove it, and pull the model again."
            )
        return version

    def _write_version(self, version: ModelVersion) -> None:
        file = self._version_file(version.name, version.digest)
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, msgspec.json.encode(version))


def stored_digest(path: Path) -> str:
    """Return the digest of a model that is in a store; empty for other paths."""
    folder = path if path.is_dir() else path.parent
    is_stored = _HEX.fullmatch(folder.name) and (folder / MANIFEST_FILE).is_file()
    return f"{DIGEST_PREFIX}{folder.name}" if is_stored else ""


@contextmanager
def hold_model(path: Path) -> Iterator[None]:
    """Prevent that a model is collected as garbage within a context, if it is in a store.

    Raises:
        ModelStoreError: It was collected before.
    """
    if not stored_digest(path):
        yield
        return
    manifest = (path if path.is_dir() else path.parent) / MANIFEST_FILE
    with manifest.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_SH)
        if not manifest.exists():
            raise ModelStoreError(f"{path} was collected as garbage. Pull the model again.")
        yield


def open_model_store() -> ModelStore:
    """Return the store in the folder that `ARGOSY_MODELS` names, or in the user's folder for data.

    Raises:
        ModelStoreError: The user has no home folder.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    try:
        return ModelStore(Path(folder) if folder else data_folder() / "models")
    except FileNotFoundError as error:
        raise ModelStoreError(f"{error}, or {FOLDER_VARIABLE}") from error


def read_manifest(file: Path, digest: str) -> Manifest:
    """Read the manifest of a model.

    Raises:
        ModelStoreError: It is damaged.
        FileNotFoundError: It does not exist.
    """
    content = file.read_bytes()
    if digest_of(content) != digest:
        raise ModelStoreError(f"{file} is damaged. Pull the model again.")
    return parse_manifest(content, str(file))


def check_name(name: str) -> str:
    """Return the name of a model.

    Raises:
        ModelStoreError: No model may have this name.
    """
    if _NAME.fullmatch(name) is None:
        raise ModelStoreError(
            f"{name[:200]!r} is no name for a model. Use letters, digits, '.', '_', '-' and at most one '/' (--name)."
        )
    return name


def _link(target: Path, link: Path) -> None:
    """Create a hard link, or a symbolic one where the file system has no others."""
    try:
        link.hardlink_to(target)
    except PermissionError:  # what file systems without hard links report
        link.symlink_to(target.absolute())
