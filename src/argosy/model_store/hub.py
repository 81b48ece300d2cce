"""Download of models from the hub: the files that are a model, and GGUF files by quantization or name."""

from __future__ import annotations

import glob
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from argosy.model_store.model_files import (
    IGNORED_PATTERNS,
    MAX_LISTED_FILES,
    group_gguf_models,
    layout_patterns,
)
from argosy.settings import load_yaml

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from huggingface_hub import CardData

_COMMIT = re.compile("[0-9a-f]{40}")
_SNAPSHOT_FOLDER = "snapshots"
"""Folder of huggingface_hub's cache with one directory per commit."""
_FRONT_MATTER = re.compile(r"---\r?\n(.*?)\r?\n---", re.DOTALL)
_PREFIX = re.compile(r"^(https://)?(huggingface\.co|hf\.co)/")
_NAME = re.compile(
    r"(?P<repository>[^/:]+(/[^/:]+)?)(:(?P<quantization>[^/:]+)|/(?P<file>.+\.gguf))?"
)


@dataclass(frozen=True, slots=True)
class HubName:
    """Name of a model on the hub, as users of llama.cpp and Ollama write it too.

    `owner/name`, `owner/name:QUANTIZATION` or `owner/name/FILE.gguf`, each also after `hf.co/`.
    """

    repository: str
    quantization: str = ""
    file: str = ""

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """Parse a name. None if it has another form."""
        match = _NAME.fullmatch(_PREFIX.sub("", text, count=1))
        if match is None:
            return None
        return cls(match["repository"], match["quantization"] or "", match["file"] or "")


def is_hub_url(text: str) -> bool:
    """Return whether a text is the address of a model on the hub."""
    return _PREFIX.match(text) is not None


def download_model(name: HubName, revision: str | None) -> Path:
    """Return the snapshot of a model, or its GGUF file in the snapshot, after downloading what is missing.

    Downloads use huggingface_hub, which honours HF_HOME, HF_TOKEN and HF_HUB_OFFLINE.

    Raises:
        ValueError: The model does not exist or cannot be downloaded, or several files match. The message says what to
            do.
    """
    import httpx2
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    model = name.repository
    try:
        files = _list_files(model, revision)
        gguf = select_gguf(name, files)
        folder = snapshot_download(
            model,
            revision=revision,
            allow_patterns=list(layout_patterns(files) if gguf is None else map(glob.escape, gguf)),
            ignore_patterns=list(IGNORED_PATTERNS) if gguf is None else None,
        )
    except GatedRepoError as error:
        remedy = "accept its terms on the hub and set HF_TOKEN to your token"
        raise ValueError(f"the hub denies access to {model}: {remedy}") from error
    except RepositoryNotFoundError as error:
        remedy = "check the name or the path, or set HF_TOKEN if it is private"
        raise ValueError(f"the hub has no model {model}: {remedy}") from error
    except RevisionNotFoundError as error:
        remedy = "name a branch, tag or commit of that repository"
        raise ValueError(f"{model} has no revision {revision}: {remedy}") from error
    except HFValidationError as error:
        remedy = "give a directory, or a name like owner/model"
        raise ValueError(f"{model!r} is neither a directory nor a hub name: {remedy}") from error
    except (OSError, httpx2.HTTPError) as error:
        remedy = (
            "give a local directory or file, or allow access to the hub (HF_HUB_OFFLINE, network)"
        )
        raise ValueError(f"cannot fetch {model} ({error}): {remedy}") from error
    return Path(folder) if gguf is None else Path(folder) / gguf[0]


def _list_files(repository: str, revision: str | None) -> list[str]:
    """Return the files of a repository, or of its last snapshot on this machine if the hub cannot be reached."""
    import httpx2
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RevisionNotFoundError

    try:
        return HfApi().list_repo_files(repository, revision=revision)
    except RevisionNotFoundError:
        raise
    except (OSError, httpx2.HTTPError) as error:
        try:
            snapshot = snapshot_download(
                repository, revision=revision, allow_patterns=[], local_files_only=True
            )
        except LocalEntryNotFoundError:
            raise error from None
        folder = Path(snapshot)
        return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]


def select_gguf(name: HubName, files: Iterable[str]) -> list[str] | None:
    """Return the parts of the GGUF model that a name means, or None if it means the repository in its own layout.

    Raises:
        ValueError: None or several match. The message lists the models.
    """
    models = group_gguf_models(files)
    if name.file:
        wanted = [parts for parts in models.values() if name.file in parts]
    elif name.quantization:
        text = name.quantization.lower()
        wanted = [
            parts
            for stem, parts in models.items()
            if re.search(rf"(^|[-._/]){re.escape(text)}$", stem.lower())
        ]
        wanted = wanted or [parts for stem, parts in models.items() if text in stem.lower()]
    elif models and not any(file.endswith((".safetensors", ".bin")) for file in files):
        wanted = list(models.values())
    else:
        return None
    if len(wanted) == 1:
        return wanted[0]
    if not models:
        raise ValueError(
            f"{name.repository} has no GGUF files; give {name.repository} alone for its other weights"
        )
    listed = ", ".join(parts[0] for parts in (wanted or list(models.values()))[:MAX_LISTED_FILES])
    asked = name.file or name.quantization
    count = f"{len(wanted)} GGUF models" if wanted else "no GGUF model"
    raise ValueError(
        f"{name.repository} has {count}{asked and f' for {asked}'} ({listed}); "
        f"name one, as in {name.repository}:Q4_K_M or {name.repository}/FILE.gguf"
    )


def hub_commit(path: Path) -> str:
    """Return the commit of a snapshot in huggingface_hub's cache, or of a file in it; empty for other paths."""
    for folder in (path, *path.parents):
        if folder.parent.name == _SNAPSHOT_FOLDER and _COMMIT.fullmatch(folder.name):
            return folder.name
    return ""


def fetch_model_card(repository: str, revision: str) -> dict[str, str]:
    """Return `licence` and `base_model` from the hub; nothing if it cannot be reached."""
    import httpx2
    from huggingface_hub import HfApi

    try:
        card = HfApi().model_info(repository, revision=revision or None).card_data
    except (OSError, ValueError, httpx2.HTTPError):
        return {}
    return {} if card is None else _card_fields(card)


def read_model_card(text: str) -> dict[str, str]:
    """Return `licence` and `base_model` from the metadata of a model card, as far as it has them."""
    match = _FRONT_MATTER.match(text)
    if match is None:
        return {}
    try:
        metadata = load_yaml(match[1].encode())
    except ValueError:
        return {}
    return _card_fields(metadata) if isinstance(metadata, dict) else {}


def _card_fields(metadata: Mapping[str, object] | CardData) -> dict[str, str]:
    fields = {}
    for name, key in (("licence", "license"), ("base_model", "base_model")):
        value = metadata.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, str):
            fields[name] = value[:200]
    return fields
