"""Verification of a model's files against its digest, before anything is loaded from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from argosy.model_store.file_hashes import FileHashes
from argosy.model_store.manifest import MANIFEST_FILE, Manifest, ModelFile, ModelStoreError
from argosy.model_store.model_files import list_model_files
from argosy.model_store.model_store import ModelStore, open_model_store, read_manifest


class ModelMismatchError(ModelStoreError):
    """A model's files are not those of its digest.

    Attributes:
        file: Path of the first wrong file below the model, or empty if it is not known.
    """

    def __init__(self, path: Path, digest: str, problem: str, file: str = "") -> None:
        super().__init__(
            f"{path} is not the model {digest}: {problem}. Fetch it again (`argosy models pull`), or declare the "
            "digest that it has."
        )
        self.file = file


def verify_model(
    path: Path,
    digest: str,
    *,
    on_progress: Callable[[float], None] = lambda _: None,
    hashes: FileHashes | None = None,
    store: ModelStore | None = None,
) -> None:
    """Check that a model has a digest. Files that have not changed since their last check are not read again.

    The manifest is looked for beside the model and in the store. Without it, a mismatch is found but not which file is
    wrong.

    Args:
        path: Directory of the model, or its GGUF file.
        digest: Digest that it must have.
        on_progress: Called with the fraction of the bytes that are checked.
        hashes: Remembers what was checked.
        store: Where manifests are looked for; by default the one of this machine.

    Raises:
        ModelMismatchError: It is another model, or a file is damaged, missing or superfluous.
        ModelStoreError: There is no model.
        OSError: A file cannot be read.
    """
    files = list_model_files(path)
    manifest = find_manifest(path, digest, store)
    if manifest is not None:
        files = _check_names(path, digest, files, manifest)
    actual = compute_manifest(files, on_progress=on_progress, hashes=hashes, expected=manifest)
    if manifest is None and actual.digest != digest:
        raise ModelMismatchError(path, digest, f"its digest is {actual.digest}")
    wrong = None if manifest is None else _find_difference(actual, manifest)
    if wrong is not None:
        problem = f"the file {wrong.path} is damaged or was changed (its SHA-256 is {wrong.sha256})"
        raise ModelMismatchError(path, digest, problem, wrong.path)


def compute_manifest(
    files: Mapping[str, Path],
    *,
    on_progress: Callable[[float], None] = lambda _: None,
    hashes: FileHashes | None = None,
    expected: Manifest | None = None,
) -> Manifest:
    """Return the manifest of files, up to the first one that differs from an expected manifest.

    Args:
        files: Files by their paths in the manifest.
        on_progress: Called with the fraction of the bytes that are read.
        hashes: Remembers what was read.
        expected: Manifest with the same paths.

    Raises:
        OSError: A file cannot be read.
    """
    hashes = hashes or FileHashes()
    names = sorted(files)
    sizes = {name: files[name].stat().st_size for name in names}
    total = max(sum(sizes.values()), 1)
    found: list[ModelFile] = []
    hashed = hashes.sha256_of_all(
        (files[name] for name in names), lambda count: on_progress(min(count / total, 1.0))
    )
    for index, (name, (_, sha256)) in enumerate(zip(names, hashed, strict=True)):
        found.append(ModelFile(path=name, sha256=sha256, size=sizes[name]))
        if expected is not None and found[-1] != expected.files[index]:
            break
    return Manifest.from_files(found)


def find_manifest(path: Path, digest: str, store: ModelStore | None = None) -> Manifest | None:
    """Return the manifest of a digest from beside the model or from the store, or None."""
    folder = path if path.is_dir() else path.parent
    try:
        return read_manifest(folder / MANIFEST_FILE, digest)
    except (ModelStoreError, OSError):
        pass  # none, or that of another model
    try:
        return (store or open_model_store()).read_manifest(digest)
    except (ModelStoreError, OSError):
        return None


def _find_difference(actual: Manifest, expected: Manifest) -> ModelFile | None:
    pairs = zip(actual.files, expected.files, strict=False)  # `actual` ends at the first difference
    return next((found for found, wanted in pairs if found != wanted), None)


def _check_names(
    path: Path, digest: str, files: Mapping[str, Path], manifest: Manifest
) -> dict[str, Path]:
    """Return the files of the manifest. Sizes are compared first, which costs nothing."""
    expected = {file.path: file for file in manifest.files}
    folder = path if path.is_dir() else path.parent
    for name in expected.keys() - files.keys():
        if not (folder / name).is_file():
            raise ModelMismatchError(path, digest, f"the file {name} is missing", name)
    extra = min(files.keys() - expected.keys(), default=None)
    if extra is not None:
        raise ModelMismatchError(path, digest, f"the file {extra} does not belong to it", extra)
    found = {name: folder / name for name in expected}
    for name, file in found.items():
        size = file.stat().st_size
        if size != expected[name].size:
            problem = f"the file {name} has {size:,} bytes instead of {expected[name].size:,}"
            raise ModelMismatchError(path, digest, problem, name)
    return found
