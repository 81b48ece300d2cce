"""Which files of a directory or repository are a model: one rule, so that a model has one digest wherever it is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from argosy.model_store.manifest import ModelStoreError

MODEL_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py")
"""Patterns of configuration, weights, templates, tokenizers and code of a model."""
MODULE_PATTERNS = tuple(
    f"[0-9]*_*/{pattern}" for pattern in ("*.json", "*.safetensors", "pytorch_model.bin")
)
"""Patterns of the pooling and dense layers of an embedding model, which are in folders such as `1_Pooling`."""
TORCH_PATTERNS = ("pytorch_model*.bin", "adapter_model.bin")
"""Patterns of weights that belong to the model if there are no safetensors files."""
QUALITY_FILE = "argosy-quality.json"
"""Name of the quality report beside a model. It names the digest, so that it cannot be a part of it."""
IGNORED_PATTERNS = (
    "consolidated*",
    QUALITY_FILE,
    *(f"[!0-9]*/{pattern}" for pattern in MODEL_PATTERNS if pattern != "*.jinja"),
    *("[!0-9]*/*.bin", "*/*.gguf"),
)
"""Patterns of other files: weights in other layouts, reports, and folders except those of templates and modules."""
MAX_LISTED_FILES = 8
"""Maximum number of files that an error lists."""
MAX_PARTS = 10_000
_POINTER_START, _MAX_POINTER_BYTES = b"version https://git-lfs", 1024
"""Beginning and maximum size of the text that git keeps in place of a file in Git LFS."""
_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")
_PART_SUFFIX = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$")
_NO_MODEL = re.compile(r"(^|/)(mmproj|imatrix)|[-.]imatrix\.gguf$")
"""GGUF files beside a model: projectors of images, and statistics for quantization."""


def layout_patterns(files: Iterable[str]) -> tuple[str, ...]:
    """Return the patterns of the files to take from a repository in Hugging Face layout."""
    has_safetensors = any(
        re.fullmatch(r"(?!consolidated)[^/]+\.safetensors", file) for file in files
    )
    patterns = (*MODEL_PATTERNS, *MODULE_PATTERNS)
    return patterns if has_safetensors else (*patterns, *TORCH_PATTERNS)


def select_model_files(files: Iterable[str]) -> list[str]:
    """Return the files of the model among those of a directory: its Hugging Face layout, or its only GGUF model.

    Args:
        files: Paths below the directory, with slashes.

    Raises:
        ModelStoreError: There is no model, or there are several GGUF models.
    """
    names = sorted(files)
    if is_gguf_only(names):
        models = list(group_gguf_models(name for name in names if "/" not in name).values())
        if len(models) != 1:
            listed = ", ".join(parts[0] for parts in models[:MAX_LISTED_FILES]) or "none"
            raise ModelStoreError(
                f"it holds {len(models)} GGUF models ({listed}). Give one of the files."
            )
        return models[0]
    patterns = layout_patterns(names)
    selected = [
        name
        for name in names
        if any(fnmatchcase(name, pattern) for pattern in patterns)
        and not any(fnmatchcase(name, pattern) for pattern in IGNORED_PATTERNS)
        and not any(part.startswith(".") for part in name.split("/"))
    ]
    if not {"config.json", "adapter_config.json"}.intersection(selected):
        raise ModelStoreError(
            "it has no config.json. Give a directory in Hugging Face layout, or a GGUF file."
        )
    return selected


def check_no_pointers(files: Iterable[Path]) -> None:
    """Check that files are those of a model, and not what `git clone` leaves in their place without Git LFS.

    Raises:
        ModelStoreError: A file is a pointer.
        OSError: A file cannot be read.
    """
    for file in files:
        if file.stat().st_size > _MAX_POINTER_BYTES:
            continue
        with file.open("rb") as opened:
            is_pointer = opened.read(len(_POINTER_START)) == _POINTER_START
        if is_pointer:
            raise ModelStoreError(
                f"{file.name} is a Git LFS pointer, not the file itself. Install git-lfs and run `git lfs pull` in the "
                "repository, or download the model again."
            )


def is_gguf_only(files: Iterable[str]) -> bool:
    """Return whether files have GGUF weights and no others."""
    names = [name for name in files if "/" not in name]
    return any(name.endswith(".gguf") for name in names) and not any(
        name.endswith((".safetensors", ".safetensors.index.json", ".bin")) for name in names
    )


def group_gguf_models(files: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of each GGUF model by the name that its parts share, without projectors and statistics."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.endswith(".gguf") and not _NO_MODEL.search(file):
            models.setdefault(_PART_SUFFIX.sub("", file), []).append(file)
    return models


def gguf_part_names(file: str) -> list[str]:
    """Return the names of all parts of the GGUF model of which `file` is the only or any part."""
    match = _PART.fullmatch(file)
    count = 0 if match is None else min(int(match["count"]), MAX_PARTS)
    if match is None or count == 0:
        return [file]
    suffix = f"of-{match['count']}.gguf"
    return [f"{match['stem']}-{number:05}-{suffix}" for number in range(1, count + 1)]


def select_gguf_parts(file: str, siblings: Iterable[str]) -> list[str]:
    """Return the names of all parts of the GGUF model to which a file belongs.

    Raises:
        ModelStoreError: The file is not one of `siblings`.
    """
    for parts in group_gguf_models(siblings).values():
        if file in parts:
            return parts
    raise ModelStoreError(f"there is no GGUF model {file}. Check the path.")


def list_model_files(path: Path) -> dict[str, Path]:
    """Return the files of a model on this machine by their paths in its manifest.

    Args:
        path: Directory of the model, or a GGUF file, whose parts are beside it.

    Raises:
        ModelStoreError: There is no model.
        OSError: The directory cannot be read.
    """
    try:
        if path.is_file():
            siblings = [file.name for file in path.parent.iterdir()]
            files = {name: path.parent / name for name in select_gguf_parts(path.name, siblings)}
            check_no_pointers(files.values())
            return files
        if not path.is_dir():
            raise ModelStoreError("there is no such directory or GGUF file. Check the path.")  # noqa: TRY301
        names = [
            file.relative_to(path).as_posix()
            for pattern in ("*", "*/*")  # no pattern of model files is deeper
            for file in path.glob(pattern)
            if file.is_file()
        ]
        files = {name: path / name for name in select_model_files(names)}
        check_no_pointers(files.values())
        return files  # noqa: TRY300 - the checks above raise
    except ModelStoreError as error:
        raise ModelStoreError(f"{path}: {error}") from error
