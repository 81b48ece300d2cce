"""Files of a checkpoint, which is a local directory or a downloaded snapshot of a hub repository."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from argosy.engine.execution.checkpoint_config import read_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
DOWNLOAD_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Patterns of files to download, which are configuration, weights, templates and tokenizer files."""
IGNORED_PATTERNS = (
    "consolidated*",
    *(f"*/{pattern}" for pattern in DOWNLOAD_PATTERNS if pattern != "*.jinja"),
)
"""Patterns of files not to download: weights in other layouts, and folders except those of chat templates."""
DIGEST_PATTERNS = (*DOWNLOAD_PATTERNS, "additional_chat_templates/*.jinja")
"""Patterns of the files that identify a checkpoint."""
_SNAPSHOT_FOLDER = "snapshots"
"""Folder of huggingface_hub's cache with one directory per commit."""
_MAX_HEADER_BYTES = 100 << 20
_DIGEST_SAMPLE_BYTES = 16 * 1024
_MAX_DIGEST_SAMPLES = 1024
"""Maximum number of samples per file, evenly spread. They cover a small file, and every matrix of a large one."""


def resolve_model_path(model: str, revision: str | None) -> Path:
    """Return the directory of `model`, downloading a snapshot if `model` is a hub name.

    Downloads use huggingface_hub, which honours HF_HOME, HF_TOKEN and HF_HUB_OFFLINE.

    Raises:
        ValueError: The model does not exist or cannot be downloaded. The message says what to do.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{path} has no config.json; give a directory in Hugging Face layout")
        return path
    if path.exists():
        raise ValueError(f"{path} is a file; give the directory that contains it")
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ValueError(f"there is no directory {path}; check the path")
    return _download(model, revision)


def model_revision(path: Path, revision: str | None) -> str:
    """Return the commit of a downloaded snapshot, or the requested revision; empty for a directory without either."""
    return path.name if path.parent.name == _SNAPSHOT_FOLDER else revision or ""


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = snapshot_download(
            model,
            revision=revision,
            allow_patterns=list(DOWNLOAD_PATTERNS),
            ignore_patterns=list(IGNORED_PATTERNS),
        )
    except GatedRepoError as error:
        remedy = "accept its terms on the hub and set HF_TOKEN to your token"
        raise ValueError(f"the hub denies access to {model}: {remedy}") from error
    except RepositoryNotFoundError as error:
        remedy = "check the name, or set HF_TOKEN if it is private"
        raise ValueError(f"the hub has no model {model}: {remedy}") from error
    except RevisionNotFoundError as error:
        remedy = "name a branch, tag or commit of that repository"
        raise ValueError(f"{model} has no revision {revision}: {remedy}") from error
    except HFValidationError as error:
        remedy = "give a directory, or a name like owner/model"
        raise ValueError(f"{model!r} is neither a directory nor a hub name: {remedy}") from error
    except (LocalEntryNotFoundError, OSError) as error:
        remedy = "give a local directory, or allow access to the hub (HF_HUB_OFFLINE, network)"
        raise ValueError(f"cannot fetch {model} ({error}): {remedy}") from error
    return Path(folder)


def checkpoint_fingerprint(path: Path) -> str:
    """Return a hash that identifies the current state of a checkpoint's files on this machine.

    The hash covers inodes and change times. Names, sizes and modification times alone are not enough, because files
    unpacked from archives may agree in all of them.
    """
    files = sorted(file for pattern in ("*.json", "*.safetensors") for file in path.glob(pattern))
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
    for file in sorted({file for pattern in DIGEST_PATTERNS for file in path.glob(pattern)}):
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
    single, index = path / SINGLE_FILE, path / INDEX_FILE
    if single.is_file():
        return dict.fromkeys(_read_tensor_names(single), single)
    if not index.is_file():
        raise _no_weights_error(path)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} has no weight_map; fetch the model again")  # noqa: TRY004
    files = {str(name): path / str(file) for name, file in weight_map.items()}
    missing = sorted({file.name for file in files.values() if not file.is_file()})
    if missing:
        raise ValueError(
            f"{path} lacks {', '.join(missing)} named by {INDEX_FILE}; fetch the model again"
        )
    return files


def _no_weights_error(path: Path) -> ValueError:
    bin_files = sorted(file.name for file in path.glob("*.bin"))
    if bin_files:
        return ValueError(
            f"{path} holds {bin_files[0]} but no {SINGLE_FILE}; convert it with transformers' save_pretrained"
        )
    return ValueError(
        f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}; fetch the model's weights"
    )


def _read_tensor_names(file: Path) -> list[str]:
    """Return the tensor names of a safetensors file.

    The file starts with the 64-bit little-endian length of a JSON header.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= _MAX_HEADER_BYTES:
                raise ValueError(f"its header length is {length} bytes")  # noqa: TRY301
            names = json.loads(stream.read(length))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot read {file}: {error}; the file is damaged, fetch it again"
        ) from error
    return [name for name in names if name != "__metadata__"]
