"""Manifests: a digest of files alone, and refusal of what a publisher may not write."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.model_store import Manifest, ModelFile, ModelStoreError, parse_manifest

HASH = hashlib.sha256(b"").hexdigest()
names = st.text("abz.-_é0", min_size=1, max_size=8).filter(lambda name: name not in {".", ".."})
paths = st.lists(names, min_size=1, max_size=3).map("/".join)


def _file(path: str) -> ModelFile:
    return ModelFile(path=path, sha256=HASH, size=0)


@given(st.dictionaries(paths.map(lambda path: f"d/{path}.x"), st.binary(max_size=4), min_size=1))
def test_digest_depends_on_files_and_not_on_their_order(contents: dict[str, bytes]) -> None:
    files = [
        ModelFile(path=path, sha256=hashlib.sha256(content).hexdigest(), size=len(content))
        for path, content in contents.items()
    ]
    try:
        manifest = Manifest.from_files(files)
    except ModelStoreError as error:
        assert "below another file" in str(error)  # noqa: PT017 - such names are possible
        return
    assert parse_manifest(manifest.encode(), "m") == Manifest.from_files(reversed(files))
    changed = [*files[:-1], ModelFile(path=files[-1].path, sha256="0" * 64, size=9)]
    assert Manifest.from_files(changed).digest != manifest.digest


def test_tokenizer_has_a_digest_of_its_own() -> None:
    weights = [_file("model.safetensors"), _file("config.json")]
    tokenizer = [_file("tokenizer.json"), _file("tokenizer_config.json")]
    manifest = Manifest.from_files([*weights, *tokenizer])
    assert manifest.tokenizer_digest == Manifest.from_files(tokenizer).digest
    assert not Manifest.from_files(weights).tokenizer_digest


def _json(*files: object, **more: object) -> bytes:
    fields = {"files": files, "version": 1} | more
    return json.dumps(fields, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()


def _entry(path: str, **more: object) -> dict[str, object]:
    return {"path": path, "sha256": HASH, "size": 0} | more


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_json(_entry("../../etc/passwd")), "not that of a file below the model"),
        (_json(_entry("/etc/passwd")), "not that of a file below the model"),
        (_json(_entry("a/./b")), "not that of a file below the model"),
        (_json(_entry("a//b")), "not that of a file below the model"),
        (_json(_entry("a\\..\\b")), "not that of a file below the model"),
        (_json(_entry("a\n")), "not that of a file below the model"),
        (_json(_entry("\u202egnp.exe")), "not that of a file below the model"),
        (_json(_entry("x" * 300)), "not that of a file below the model"),
        (_json(_entry("argosy.manifest")), "not that of a file below the model"),
        (_json(_entry("a"), _entry("a/b")), "below another file"),
        (_json(_entry("a"), _entry("a")), "listed twice"),
        (_json(_entry("b"), _entry("a")), "not sorted"),
        (_json(), "length"),
        (_json(*[_entry(f"{n:06}") for n in range(10_001)]), "length"),
        (_json(_entry("a", sha256="00")), "sha256"),
        (_json(_entry("a", size=-1)), "size"),
        (_json(_entry("a", size=1 << 60)), "size"),
        (_json(_entry("a", url="file:///etc/passwd")), "url"),
        (_json(_entry("a"), version=2), "version"),
        (b" " + _json(_entry("a")), "canonical"),
        (b"[" * 100_000, "not a manifest"),
        (b"\xff", "not a manifest"),
        (b"\0" * (17 << 20), "more than 16 MiB"),
    ],
)
def test_hostile_manifest_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ModelStoreError, match=message):
        parse_manifest(content, "theirs")
