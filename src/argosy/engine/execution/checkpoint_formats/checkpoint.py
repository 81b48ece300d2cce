"""Files of a checkpoint, which is a local directory or a downloaded snapshot of a hub repository."""

from __future__ import annotations

import hashlib
import json
import os
from fnmatch import fnmatchcase
from pathlib import Path

from argosy.engine.execution.checkpoint_formats.gguf_config import read_gguf_config
from argosy.engine.execution.checkpoint_formats.gguf_file import gguf_parts, is_gguf
from argosy.engine.execution.config.checkpoint_config import read_json
from argosy.model_store import (
    DIGEST_PREFIX,
    MAX_LISTED_FILES,
    MODEL_PATTERNS,
    MODULE_PATTERNS,
    QUALITY_FILE,
    REFERENCE_PREFIX,
    HubName,
    check_no_pointers,
    download_model,
    group_gguf_models,
    hub_commit,
    is_gguf_only,
    is_url,
    layout_patterns,
    open_model_store,
    pull_model,
)
from argosy.models import BUNDLED_MODELS

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
TORCH_INDEX_FILE = "pytorch_model.bin.index.json"
TORCH_SINGLE_FILE = "pytorch_model.bin"
ADAPTER_FILE = "adapter_config.json"
DIGEST_PATTERNS = (*MODEL_PATTERNS, *MODULE_PATTERNS, "additional_chat_templates/*.jinja")
"""Patterns of the files that identify a checkpoint."""
_MAX_HEADER_BYTES = 100 << 20
_DIGEST_SAMPLE_BYTES = 16 * 1024
_MAX_DIGEST_SAMPLES = 1024
"""Maximum number of samples per file, evenly spread. They cover a small file, and every matrix of a large one."""


def resolve_model_path(model: str, revision: str | None, digest: str | None = None) -> Path:
    """Return the directory of `model`, or its GGUF file, downloading it if it is not on this machine.

    A directory of that name in the current folder comes first, then a bundled model, then a model of the store that has
    the digest. Only then are the store, URLs and the hub asked for the name.

    Args:
        model: Path, name of a bundled model, `store:NAME`, `sha256:DIGEST`, URL, or name on the hub (`HubName`).
        revision: Branch, tag or commit on the hub.
        digest: Digest by which the model may be found in the store. Nothing is verified here.

    Raises:
        ValueError: The model does not exist, is not a model, or cannot be downloaded. The message says what to do.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _find_checkpoint(path)
    if is_gguf(path):
        return gguf_parts(path)[0]
    if path.exists():
        raise ValueError(f"{path} is a file; give the directory that contains it, or a GGUF file")
    if model in BUNDLED_MODELS:
        return BUNDLED_MODELS[model]
    stored = _find_stored(model, revision, digest)
    if stored is not None:
        return _find_checkpoint(stored) if stored.is_dir() else stored
    name = HubName.parse(model)
    if path.is_absolute() or model.startswith((".", "~")) or name is None:
        kind = "file" if path.suffix == ".gguf" else "directory"
        raise ValueError(f"there is no {kind} {path}; check the path")
    downloaded = download_model(name, revision)
    return downloaded if downloaded.is_file() else _find_checkpoint(downloaded)


def _find_stored(model: str, revision: str | None, digest: str | None) -> Path | None:
    """Return the path of a model in the store, into which a URL is downloaded once. None for other models."""
    is_reference = model.startswith((REFERENCE_PREFIX, DIGEST_PREFIX))
    if not (is_reference or digest or is_url(model)):
        return None
    store = open_model_store()
    if digest is not None and (path := store.model_path(digest)) is not None:
        return path
    if is_reference:
        version = store.find(model)
    elif is_url(model):
        known = None if digest else store.find_by_source(model.rstrip("/"), revision)
        version = known or pull_model(store, model, revision=revision, digest=digest)
    else:
        return None
    path = store.model_path(version.digest)
    if path is None:
        raise ValueError(f"the files of {model} are missing in {store.folder}; pull it again")
    return path


def model_revision(path: Path, revision: str | None) -> str:
    """Return the commit of a downloaded snapshot, or the requested revision; empty for a directory without either."""
    return hub_commit(path) or revision or ""


def _find_checkpoint(folder: Path) -> Path:
    """Return the directory, or the GGUF file in it.

    Raises:
        ValueError: The directory holds no model that can be served.
    """
    names = [file.name for file in folder.iterdir() if file.is_file()]
    if CONFIG_FILE in names and not is_gguf_only(names):
        patterns = layout_patterns(names)
        check_no_pointers(
            folder / name for name in names if any(fnmatchcase(name, each) for each in patterns)
        )
        return folder
    if (folder / ADAPTER_FILE).is_file():
        base = read_json(folder / ADAPTER_FILE).get("base_model_name_or_path")
        raise ValueError(
            f"{folder} holds an adapter of {str(base)[:200]!r} ({ADAPTER_FILE}), not a model; give the directory "
            "of the base model, and the adapter as --enable-lora --lora-modules NAME=DIRECTORY"
        )
    if any(folder.glob("*.gguf")):
        return _find_gguf(folder)
    raise ValueError(
        f"{folder} has no config.json; give a directory in Hugging Face layout, or a GGUF file"
    )


def _find_gguf(folder: Path) -> Path:
    """Return the first part of the only GGUF model in a directory.

    Raises:
        ValueError: There are several, or a part is missing.
    """
    files = [file.name for file in folder.glob("*.gguf") if file.is_file()]
    models = list(group_gguf_models(files).values())
    if len(models) != 1:
        names = ", ".join(parts[0] for parts in models[:MAX_LISTED_FILES]) or "none"
        raise ValueError(
            f"{folder} holds {len(models)} GGUF models ({names}); give one of the files"
        )
    return gguf_parts(folder / models[0][0])[0]


def read_config_values(path: Path) -> tuple[Path, dict[str, object]]:
    """Return the values of config.json of a checkpoint, and the file that has them, which may be a GGUF file.

    Raises:
        ValueError: The file is missing or damaged.
    """
    if path.is_file():
        return path, read_gguf_config(path)
    file = path / CONFIG_FILE
    if not file.is_file():
        raise ValueError(f"{path} has no config.json; give a directory in Hugging Face layout")
    return file, read_json(file)


def weight_files(path: Path) -> list[Path]:
    """Return the files with a checkpoint's weights, sorted by name."""
    if path.is_file():
        return gguf_parts(path)
    return sorted(file for pattern in ("*.safetensors", "*.bin") for file in path.glob(pattern))


def checkpoint_fingerprint(path: Path) -> str:
    """Return a hash that identifies the current state of a checkpoint's files on this machine.

    The hash covers inodes and change times. Names, sizes and modification times alone are not enough, because files
    unpacked from archives may agree in all of them.
    """
    patterns = () if path.is_file() else ("*.json", *MODULE_PATTERNS)
    files = [
        *(file for pattern in patterns for file in sorted(path.glob(pattern))),
        *weight_files(path),
    ]
    states = [(file.name, file.stat()) for file in files]
    lines = [
        f"{name} {s.st_dev} {s.st_ino} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns}"
        for name, s in states
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def checkpoint_digest(path: Path) -> str:
    """Return a hash that identifies a checkpoint by its content, on any machine.

    The hash covers names, sizes and samples of each file. Samples suffice, because training or merging an adapter
    changes all elements of the matrices that it updates.
    """
    digest = hashlib.sha256()
    files = {file for pattern in DIGEST_PATTERNS for file in path.glob(pattern)}
    files.discard(path / QUALITY_FILE)
    for file in sorted(files.union(weight_files(path))):
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            digest.update(f"{file.name} {size}\n".encode())
            for start in range(0, size, max(_DIGEST_SAMPLE_BYTES, -(-size // _MAX_DIGEST_SAMPLES))):
                stream.seek(start)
                digest.update(stream.read(_DIGEST_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def tensor_files(path: Path) -> dict[str, Path]:
    """Return the file of each tensor in a checkpoint of one safetensors file or of indexed shards.

    The single file is preferred to an index, as in transformers.

    Raises:
        ValueError: The checkpoint has no safetensors files, its index is unreadable, or a shard is missing.
    """
    single = path / SINGLE_FILE
    if single.is_file():
        return dict.fromkeys(read_tensor_names(single), single)
    if not (path / INDEX_FILE).is_file():
        raise _no_weights_error(path)
    return _read_index(path / INDEX_FILE)


def torch_archives(path: Path) -> dict[str, Path] | Path | None:
    """Return the archive of torch.save in a checkpoint, the file of each tensor if there are several, or None.

    None means that the checkpoint has safetensors files, or no weights.

    Raises:
        ValueError: The index is unreadable, or a shard is missing.
    """
    if any((path / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        return None
    if (path / TORCH_SINGLE_FILE).is_file():
        return path / TORCH_SINGLE_FILE
    return _read_index(path / TORCH_INDEX_FILE) if (path / TORCH_INDEX_FILE).is_file() else None


def _read_index(index: Path) -> dict[str, Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} has no weight_map; fetch the model again")  # noqa: TRY004
    files = {
        str(name): index.with_name(_file_name(index, file)) for name, file in weight_map.items()
    }
    missing = sorted({file.name for file in files.values() if not file.is_file()})
    if missing:
        raise ValueError(
            f"{index.parent} lacks {', '.join(missing[:MAX_LISTED_FILES])} named by {index.name}; fetch the model again"
        )
    return files


def _file_name(index: Path, name: object) -> str:
    """Return the name of a shard, which must be a file next to the index."""
    if (
        not isinstance(name, str)
        or Path(name).name != name
        or name in ("", ".", "..")
        or "\0" in name
    ):
        raise ValueError(
            f"{index}: weight_map names {str(name)[:80]!r}, which is not the name of a file next to it; "
            "do not trust this checkpoint, fetch the model again"
        )
    return name


def _no_weights_error(path: Path) -> ValueError:
    return ValueError(
        f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE} nor {TORCH_SINGLE_FILE}; fetch the model's weights"
    )


def read_tensor_names(file: Path) -> list[str]:
    """Return the tensor names of a safetensors file.

    The file starts with the 64-bit little-endian length of a JSON header.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= _MAX_HEADER_BYTES:
                raise ValueError(f"its header length is {length} bytes")  # noqa: TRY301
            names = json.loads(stream.read(length))
            if not isinstance(names, dict):
                raise ValueError("its header is not an object")  # noqa: TRY004, TRY301
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"cannot read {file}: {error}; the file is damaged, fetch it again"
        ) from error
    return [name for name in names if name != "__metadata__"]
