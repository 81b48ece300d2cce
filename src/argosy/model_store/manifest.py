"""Manifest of a model: its files with their SHA-256, and the digest that identifies all of them together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MANIFEST_FILE = "argosy.manifest"
"""Name of the manifest in the directory of a model. No pattern of model files matches it."""
DIGEST_PREFIX = "sha256:"
MAX_MANIFEST_BYTES = 16 << 20
MAX_PATH_BYTES = 1024
MAX_NAME_BYTES = 255
TOKENIZER_PATTERNS = (
    "tokenizer*.json",
    "tokenizer.model*",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "spiece.model",
    "sentencepiece*.model",
    "*.tiktoken",
)
"""Patterns of the files that decide how text becomes tokens."""

Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]
ModelDigest = Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}$(?!\n)")]


class ModelStoreError(ValueError):
    """A model cannot be stored, found or trusted. The message says what to do."""


class ModelFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of a model."""

    path: Annotated[str, Meta(min_length=1, max_length=MAX_PATH_BYTES)]
    """Path below the model's directory, with slashes."""
    sha256: Sha256
    size: Annotated[int, Meta(ge=0, lt=1 << 50)]
    """Size in bytes."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files of a model, sorted by path. Where they came from does not matter, so equal files have equal digests."""

    version: Literal[1] = 1
    files: Annotated[tuple[ModelFile, ...], Meta(min_length=1, max_length=10_000)]

    @classmethod
    def from_files(cls, files: Iterable[ModelFile]) -> Manifest:
        """Return the manifest of some files.

        Raises:
            ModelStoreError: A path is not one below a directory, or contradicts another.
        """
        manifest = cls(files=tuple(sorted(files, key=lambda file: file.path)))
        check_paths([file.path for file in manifest.files])
        return manifest

    def encode(self) -> bytes:
        """Return the canonical JSON, whose SHA-256 is the digest."""
        return msgspec.json.encode(self, order="sorted")

    @property
    def digest(self) -> str:
        """Digest of the model: `sha256:` and 64 hexadecimal digits."""
        return digest_of(self.encode())

    @property
    def tokenizer_digest(self) -> str:
        """Digest of the tokenizer's files alone; empty if a model has none, such as a GGUF file."""
        files = [
            file
            for file in self.files
            if any(fnmatchcase(file.path, pattern) for pattern in TOKENIZER_PATTERNS)
        ]
        return Manifest(files=tuple(files)).digest if files else ""

    @property
    def size(self) -> int:
        """Size of all files in bytes."""
        return sum(file.size for file in self.files)


def parse_manifest(content: bytes, origin: str) -> Manifest:
    """Decode a manifest, which may come from anywhere.

    Args:
        content: The JSON.
        origin: What error messages call it.

    Raises:
        ModelStoreError: It is not a canonical manifest, or a path leads out of the model's directory.
    """
    try:
        if len(content) > MAX_MANIFEST_BYTES:
            raise ModelStoreError(f"it has more than {MAX_MANIFEST_BYTES >> 20} MiB")  # noqa: TRY301
        manifest = msgspec.json.decode(content, type=Manifest)
        check_paths([file.path for file in manifest.files])
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ModelStoreError) as error:
        raise ModelStoreError(
            f"{origin} is not a manifest: {error}. Do not trust it; fetch the model from its publisher."
        ) from error
    if manifest.encode() != content:
        raise ModelStoreError(
            f"{origin} is not in the canonical form, so that its digest says nothing. Write it with "
            "`argosy models show NAME --manifest`."
        )
    return manifest


def digest_of(content: bytes) -> str:
    """Return the digest of a manifest's canonical JSON."""
    return DIGEST_PREFIX + hashlib.sha256(content).hexdigest()


def check_paths(paths: list[str]) -> None:
    """Check that files can be created by these paths below a directory, each exactly once.

    Raises:
        ModelStoreError: A path is absolute, leads elsewhere, is no portable name, or contradicts another.
    """
    for path in paths:
        names = path.split("/")
        if (
            not path.isprintable()
            or "\\" in path
            or any(name in {"", ".", ".."} or len(name.encode()) > MAX_NAME_BYTES for name in names)
            or len(path.encode()) > MAX_PATH_BYTES
            or names[0] == MANIFEST_FILE
        ):
            raise ModelStoreError(f"the path {path[:200]!r} is not that of a file below the model")
    if paths != sorted(set(paths)):
        raise ModelStoreError("the files are not sorted by path, or one is listed twice")
    known = set(paths)
    for path in paths:
        parents = path.split("/")[:-1]
        for depth in range(1, len(parents) + 1):
            if "/".join(parents[:depth]) in known:
                raise ModelStoreError(f"the path {path[:200]!r} is below another file")
