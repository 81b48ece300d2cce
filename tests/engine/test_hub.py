"""Models of the hub by the names that users write: the right files are downloaded, and others are listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

from argosy.engine.execution.checkpoint_formats.checkpoint import model_revision, resolve_model_path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LAYOUT = ["config.json", "tokenizer.json", "model.safetensors", "modeling_x.py", "README.md"]
MODULES = ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
SPLIT = [f"UD-Q4_K_XL/m-UD-Q4_K_XL-0000{part}-of-00002.gguf" for part in (1, 2)]
REPOSITORIES = {
    "o/plain": [*LAYOUT, "consolidated.safetensors", "onnx/config.json", "pytorch_model.bin"],
    "o/torch": [
        "config.json",
        "consolidated.safetensors",
        "pytorch_model.bin",
        "training_args.bin",
    ],
    "o/both": [*LAYOUT, "m-Q8_0.gguf"],
    "o/embedder": [*LAYOUT, *MODULES, "onnx/model.onnx", "openvino/config.json"],
    "o/one": ["config.json", "m.Q5_K_M.gguf", "mmproj-m-f16.gguf", "imatrix.gguf"],
    "o/many": ["m-Q4_K.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-BF16[x].gguf", *SPLIT],
}
PLAIN = {"config.json", "tokenizer.json", "model.safetensors", "modeling_x.py"}


class Hub:
    """Repositories that huggingface_hub finds, and what was downloaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def list_repo_files(self, repository: str, revision: str | None) -> list[str]:
        assert revision is None
        if repository not in REPOSITORIES:
            response = httpx2.Response(404, request=httpx2.Request("GET", "https://hub"))
            raise RepositoryNotFoundError("404", response=response)
        return REPOSITORIES[repository]

    def snapshot_download(self, repository: str, **options: Any) -> str:  # noqa: ANN401
        if repository not in REPOSITORIES:
            raise LocalEntryNotFoundError("not in the cache")
        folder = self.folder / repository.replace("/", "--") / "snapshots" / COMMIT
        selected = filter_repo_objects(
            REPOSITORIES[repository],
            allow_patterns=options["allow_patterns"],
            ignore_patterns=options.get("ignore_patterns"),
        )
        for name in selected:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"GGUF")
        return str(folder)

    def downloaded(self) -> set[str]:
        root = next(self.folder.rglob(COMMIT), self.folder)
        return {file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path)
    monkeypatch.setattr(
        huggingface_hub.HfApi,
        "list_repo_files",
        lambda _, repository, revision: hub.list_repo_files(repository, revision),
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    monkeypatch.chdir(tmp_path)
    return hub


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("o/plain", PLAIN),
        ("https://huggingface.co/o/plain", PLAIN),
        ("o/torch", {"config.json", "pytorch_model.bin"}),
        ("o/both", PLAIN),
        ("o/embedder", PLAIN.union(MODULES)),
        ("o/both:q8_0", {"m-Q8_0.gguf"}),
        ("o/one", {"m.Q5_K_M.gguf"}),
        ("hf.co/o/many:q4_k_m", {"m-Q4_K_M.gguf"}),
        ("o/many:Q4_K", {"m-Q4_K.gguf"}),
        ("o/many:UD-Q4_K_XL", set(SPLIT)),
        ("o/many:BF16", {"m-BF16[x].gguf"}),
        ("o/many/m-Q4_K_S.gguf", {"m-Q4_K_S.gguf"}),
        (f"o/many/{SPLIT[1]}", set(SPLIT)),
    ],
)
def test_only_the_named_model_is_downloaded(hub: Hub, name: str, files: set[str]) -> None:
    path = resolve_model_path(name, None)
    assert hub.downloaded() == files
    assert path.is_file() == all(file.endswith(".gguf") for file in files)
    assert path.name == (min(files).rpartition("/")[2] if path.is_file() else COMMIT)
    assert model_revision(path, None) == COMMIT


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("o/many", r"has 5 GGUF models \(UD.*m-BF16.*\); name one, as in o/many:Q4_K_M"),
        ("o/many:K_", r"has 3 GGUF models for K_ \(.*m-Q4_K_M.gguf, m-Q4_K_S"),
        ("o/many:Q2_K", r"has no GGUF model for Q2_K \(.*m-Q4_K_S"),
        ("o/many/m-Q2_K.gguf", "has no GGUF model for m-Q2_K.gguf"),
        ("o/plain:Q8_0", "o/plain has no GGUF files; give o/plain alone"),
        ("o/unknown:Q8_0", "the hub has no model o/unknown: check the name or the path"),
        ("my-hf.co/plain", "the hub has no model my-hf.co/plain"),
        ("o/one:a:b", "there is no directory"),
    ],
)
def test_ambiguous_name_is_refused_with_the_files(hub: Hub, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_model_path(name, None)
    assert not hub.downloaded()


def test_snapshot_on_this_machine_is_used_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models--owner--model"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("m-Q4_K_M.gguf", "m-Q8_0.gguf"):
        (snapshot / name).write_bytes(b"GGUF")
    assert resolve_model_path("owner/model:q8_0", None) == snapshot / "m-Q8_0.gguf"
    with pytest.raises(ValueError, match=r"has 2 GGUF models \(m-Q4_K_M.gguf, m-Q8_0.gguf\)"):
        resolve_model_path("owner/model", None)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_text("{}")
    assert resolve_model_path("owner/model", None) == snapshot
    with pytest.raises(ValueError, match=r"cannot fetch owner/unknown .* allow access to the hub"):
        resolve_model_path("owner/unknown", None)
