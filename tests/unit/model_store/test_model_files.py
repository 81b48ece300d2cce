"""Which files are a model: the same for the hub, a directory and a bucket."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from argosy.engine import resolve_model_path
from argosy.model_store import ModelStoreError, list_model_files
from argosy.model_store.hub import read_model_card

LAYOUT = ["config.json", "tokenizer.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("files", "others", "model"),
    [
        (LAYOUT, ["README.md", "pytorch_model.bin", "consolidated.safetensors", ".x/a.json"], "."),
        ([*LAYOUT, "1_Pooling/config.json"], ["onnx/config.json", "m-Q8_0.gguf"], "."),
        (["config.json", "pytorch_model.bin"], ["training_args.bin", "mmproj-x.gguf"], "."),
        (["adapter_config.json", "adapter_model.safetensors"], ["notes.md"], "."),
        (["m-Q4_K.gguf"], ["config.json", "mmproj-x.gguf"], "."),
        (["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"], ["n.gguf"], "m-00002-of-00002.gguf"),
    ],
)
def test_files_of_a_model(tmp_path: Path, files: list[str], others: list[str], model: str) -> None:
    _create(tmp_path, [*files, *others])
    assert sorted(list_model_files(tmp_path / model)) == sorted(files)


@pytest.mark.parametrize(
    ("files", "model", "message"),
    [
        (["a.gguf", "b.gguf"], ".", "2 GGUF models .a.gguf, b.gguf."),
        (["README.md"], ".", "no config.json"),
        (["model.safetensors"], ".", "no config.json"),
        ([], "missing", "no such directory"),
        (["config.json"], "config.json", "no GGUF model config.json"),
    ],
)
def test_what_is_no_model_is_refused(
    tmp_path: Path, files: list[str], model: str, message: str
) -> None:
    _create(tmp_path, files)
    with pytest.raises(ModelStoreError, match=message):
        list_model_files(tmp_path / model)


@pytest.mark.parametrize(
    ("files", "pointer"),
    [(LAYOUT, "model.safetensors"), (LAYOUT, "tokenizer.json"), (["m-Q4_K.gguf"], "m-Q4_K.gguf")],
)
def test_pointer_of_git_lfs_is_named(tmp_path: Path, files: list[str], pointer: str) -> None:
    _create(tmp_path, files)
    text = f"version https://git-lfs.example.com/spec/v1\noid sha256:{'0' * 64}\nsize 1\n"
    (tmp_path / pointer).write_text(text)
    paths = [tmp_path, tmp_path / pointer] if pointer.endswith(".gguf") else [tmp_path]
    for find, path in itertools.product((list_model_files, _resolve), paths):
        with pytest.raises(ValueError, match=rf"{pointer} is a Git LFS pointer.*git lfs pull"):
            find(path)


def _resolve(path: Path) -> Path:
    return resolve_model_path(str(path), None)


@pytest.mark.parametrize(
    ("lines", "licence"),
    [
        (["tags: [chat]"], "mit"),
        (["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 19))], None),
        (["a: " + "[" * 20_000], None),
    ],
    ids=["plain", "merges that multiply", "brackets"],
)  # fmt: skip
def test_model_card_that_anybody_wrote_stops_nothing(lines: list[str], licence: str | None) -> None:
    card = "\n".join(["---", "license: mit", *lines, "---", "# A model"])
    assert read_model_card(card).get("licence") == licence


def _create(folder: Path, files: list[str]) -> None:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
