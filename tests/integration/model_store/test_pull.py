"""Downloads into the model store: complete or invisible, continued, verified, and made once."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.support.small_models import (
    SMALL_MODEL,
    stored_manifest,
    stored_path,
    write_small_model,
)
from tests.support.waiting import wait_for
from typer.testing import CliRunner

from argosy.cli.app import app
from argosy.model_store import (
    MANIFEST_FILE,
    FileHashes,
    ModelMismatchError,
    ModelStore,
    ModelStoreError,
    PullObserver,
    SourceFile,
    pull_model,
    verify_model,
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_small_model(tmp_path / "source")


class Count(PullObserver):
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.waits = 0
        self.files = 0
        self.bytes = 0

    def on_wait(self) -> None:
        self.waits += 1

    def on_files(self, files: Iterable[SourceFile]) -> None:
        self.files += len(list(files))

    def on_bytes(self, count: int) -> None:
        with self._lock:
            self.bytes += count


def test_equal_files_have_one_digest_and_are_stored_once(
    store: ModelStore, source: Path, tmp_path: Path
) -> None:
    first = pull_model(store, str(source), name="a")
    copy = write_small_model(tmp_path / "copy", weights=b"other")
    second = pull_model(store, f"file://{copy}", name="a", licence="mit")
    assert pull_model(store, str(source), name="b").digest == first.digest != second.digest
    assert second.licence == "mit"
    assert first.licence == "apache-2.0"
    assert first.base_model == "owner/base"
    assert first.tokenizer_digest == second.tokenizer_digest
    blobs = list(store.blobs.iterdir())
    assert len(blobs) == len(SMALL_MODEL) + 1
    assert not list(store.partial.iterdir())
    for version in (first, second):
        path = stored_path(store, version.digest)
        verify_model(path, version.digest, store=store)
        links = {file.stat().st_ino for file in path.iterdir() if file.name != MANIFEST_FILE}
        assert links <= {blob.stat().st_ino for blob in blobs}
    copied = write_small_model(tmp_path / "again")
    assert pull_model(store, str(copied), name="c", digest=first.digest).digest == first.digest
    linked = pull_model(
        store, str(write_small_model(tmp_path / "l", weights=b"l")), links_files=True
    )
    path = stored_path(store, linked.digest)
    assert (path / "model.safetensors").samefile(tmp_path / "l" / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "file"),
    [
        (lambda folder: _flip_bit(folder / "model.safetensors"), "model.safetensors"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda folder: (folder / "extra.json").write_text("{}"), "extra.json"),
        (lambda folder: (folder / "config.json").write_text("{ }"), "config.json"),
    ],
    ids=["flipped", "missing", "superfluous", "longer"],
)
@pytest.mark.parametrize("is_published", [True, False])
def test_changed_file_is_named(
    store: ModelStore,
    source: Path,
    change: object,
    file: str,
    is_published: bool,
    tmp_path: Path,
) -> None:
    version = pull_model(store, str(source))
    manifest = stored_manifest(store, version.digest)
    hashes = FileHashes(tmp_path / "hashes")
    verify_model(source, version.digest, hashes=hashes, store=store)
    if is_published:
        (source / MANIFEST_FILE).write_bytes(manifest.encode())
        store = ModelStore(tmp_path / "empty")
    assert callable(change)
    change(source)
    with pytest.raises(ModelMismatchError, match=file) as raised:
        verify_model(source, version.digest, hashes=hashes, store=store)
    assert raised.value.file == file


def test_unchanged_files_are_not_read_again(source: Path, tmp_path: Path) -> None:
    hashes = FileHashes(tmp_path / "hashes")
    old = 10**9  # change times cannot be set, so a file that has just been written is always read
    file = source / "model.safetensors"
    expected = hashes.sha256(file)
    assert not list(tmp_path.glob("hashes/*"))
    wait_for(lambda: hashes.sha256(file) == expected and any(tmp_path.glob("hashes/*")))
    read: list[int] = []
    remembered = next(tmp_path.glob("hashes/*"))
    remembered.write_text(remembered.read_text().replace(expected, "0" * 64))
    assert hashes.sha256(file, read.append) == "0" * 64
    assert FileHashes(tmp_path / "hashes", is_trusting=False).sha256(file) == expected
    _flip_bit(file)
    os.utime(file, ns=(old, old))
    assert hashes.sha256(file) not in {expected, "0" * 64}


def test_damaged_file_is_fetched_again(store: ModelStore, source: Path) -> None:
    version = pull_model(store, str(source))
    path = stored_path(store, version.digest)
    (path / "model.safetensors").chmod(0o644)
    _flip_bit(path / "model.safetensors")
    runner = CliRunner()
    result = runner.invoke(app, ["models", "verify"])
    assert result.exit_code == 1
    assert "model.safetensors is damaged" in result.output
    assert pull_model(store, str(source)).digest == version.digest
    assert runner.invoke(app, ["models", "verify"]).exit_code == 0


def test_publishers_manifest_decides(store: ModelStore, source: Path, tmp_path: Path) -> None:
    digest = pull_model(store, str(source)).digest
    manifest = stored_manifest(store, digest)
    (source / MANIFEST_FILE).write_bytes(manifest.encode())
    (source / "superfluous.json").write_text("{}")
    other = ModelStore(tmp_path / "other")
    assert pull_model(other, f"file://{source}").digest == digest
    _flip_bit(source / "model.safetensors")
    with pytest.raises(ModelStoreError, match=r"model\.safetensors has the SHA-256"):
        pull_model(ModelStore(tmp_path / "third"), str(source))
    (source / "tokenizer.json").unlink()
    with pytest.raises(ModelStoreError, match=r"lacks tokenizer\.json"):
        pull_model(ModelStore(tmp_path / "fourth"), str(source))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["https://ann:secret@host/m"], "contains credentials"),
        (["/nowhere"], "no directory or file"),
        (["owner/name/too/long"], "no directory or file"),
        (["nosuch://bucket/model"], "Protocol not known"),
        (["memory://nowhere/model"], "does not exist"),
        (["SOURCE", "--name", "../../etc"], "no name for a model"),
        (["SOURCE", "--digest", "sha256:" + "0" * 64], "has the digest sha256:"),
    ],
)
def test_impossible_source_is_refused(
    store: ModelStore, source: Path, arguments: list[str], message: str
) -> None:
    given = [str(source) if each == "SOURCE" else each for each in arguments]
    result = CliRunner().invoke(app, ["models", "pull", *given])
    assert result.exit_code == 1
    assert message in result.output
    assert not store.list_versions()
    assert not (store.models.exists() and list(store.models.iterdir()))


def test_stages_and_references(store: ModelStore, tmp_path: Path) -> None:
    runner = CliRunner()
    for number in (1, 2):
        folder = write_small_model(tmp_path / str(number), weights=bytes(number))
        assert runner.invoke(app, ["models", "pull", str(folder), "--name", "o/m"]).exit_code == 0
    first, second = store.list_versions()
    assert store.find("o/m") == second
    for reference, version in ((first.digest[:19], first), ("o/m:candidate", second)):
        result = runner.invoke(app, ["models", "promote", reference])
        assert f"{version.digest} is stable" in result.output
    assert f"{first.digest} is retired" in result.output
    assert store.find("o/m:retired").digest == first.digest
    assert store.find("store:o/m").digest == second.digest
    assert pull_model(store, str(tmp_path / "2"), name="o/m").stage == "stable"
    for reference, message in (
        ("o/m:candidate", "but o/m:retired, o/m:stable"),
        ("x", "has no"),
        ("o/m:x", "no stage"),
    ):
        shown = runner.invoke(app, ["models", "show", reference])
        assert shown.exit_code == 1
        assert message in shown.output
    assert first.digest[:19] in runner.invoke(app, ["models", "list"]).output
    manifest = runner.invoke(app, ["models", "show", "o/m", "--manifest"]).stdout_bytes
    parsed = store.read_manifest(second.digest)
    assert parsed is not None
    assert manifest == parsed.encode()


def test_processes_that_want_one_model_download_it_once(store: ModelStore, source: Path) -> None:
    holding, counts = threading.Event(), [Count() for _ in range(3)]

    class Slow(Count):
        def on_files(self, files: Iterable[SourceFile]) -> None:
            super().on_files(files)
            holding.set()
            wait_for(lambda: all(count.waits for count in counts))

    observers = [slow := Slow(), *counts]
    threads = [
        threading.Thread(target=pull_model, args=(store, str(source)), kwargs={"observer": each})
        for each in observers
    ]
    threads[0].start()
    assert holding.wait(30)
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    assert [slow.files, *(count.files for count in counts)] == [len(SMALL_MODEL), 0, 0, 0]


KILLED_PULL = """
import os, signal, sys
from pathlib import Path
from argosy.model_store import ModelStore, PullObserver, pull_model

class Killer(PullObserver):
    total = 0

    def on_bytes(self, count):
        self.total += count
        if self.total >= int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)

pull_model(ModelStore(Path(sys.argv[1])), sys.argv[2], parallel_files=1, observer=Killer())
"""


def test_killed_download_is_continued(store: ModelStore, tmp_path: Path) -> None:
    weights = os.urandom(40 << 20)
    source = write_small_model(tmp_path / "large", weights=weights)
    size = sum(len(content) for name, content in SMALL_MODEL.items() if name != "model.safetensors")
    killed = size + (17 << 20)
    result = subprocess.run(
        [sys.executable, "-c", KILLED_PULL, store.folder, source, str(killed)], check=False
    )
    assert result.returncode == -signal.SIGKILL
    assert not store.list_versions()
    assert [file.stat().st_size for file in store.partial.iterdir()] == [24 << 20]
    rest = Count()
    version = pull_model(store, str(source), observer=rest)
    assert (rest.files, rest.bytes) == (len(SMALL_MODEL), version.size)
    path = stored_path(store, version.digest)
    assert (path / "model.safetensors").read_bytes() == weights
    assert not list(store.partial.iterdir())


def test_full_disk_and_missing_permission_are_explained(
    store: ModelStore, source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(ModelStoreError, match=r"No space left on device.*argosy models gc"):
            pull_model(store, str(source))
    assert not store.list_versions()
    assert pull_model(store, str(source)).size > 0
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelStoreError, match="ARGOSY_MODELS to another folder"):
        pull_model(ModelStore(tmp_path / "file" / "store"), str(source))


def _flip_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
