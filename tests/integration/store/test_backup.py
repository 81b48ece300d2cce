"""Backups: what they have, what is found in damaged ones, and what a restore refuses."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.store.conftest import ACTOR
from tests.support.fake_clock import FakeClock
from tests.support.usage_rows import usage_row

from argosy.backup import (
    BackupError,
    BackupTarget,
    CheckedBackup,
    Cipher,
    check_backup,
    create_backup,
    delete_old_backups,
    read_cipher,
    restore_backup,
)
from argosy.blob_store import BlobStore, open_blob_store
from argosy.series import SeriesArchive
from argosy.store import (
    BLOB_PLACE_KEY,
    FleetDocument,
    ItemOwner,
    Project,
    Store,
    StoredFile,
    open_store,
)

SQLITE_ONLY = pytest.mark.parametrize("database_kind", ["sqlite"])


@pytest.fixture(autouse=True)
def _no_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ARGOSY_MODELS", str(tmp_path / "models"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "blobs"


@pytest.fixture
def blobs(folder: Path) -> BlobStore:
    return open_blob_store(str(folder))


@pytest.fixture
def store(url: str, clock: FakeClock, blobs: BlobStore) -> Iterator[Store]:
    opened = open_store(url, clock=clock, blobs=blobs)
    yield opened
    opened.close()


@pytest.fixture
def target(tmp_path: Path) -> BackupTarget:
    return BackupTarget(str(tmp_path / "backups"))


@pytest.fixture
def cipher(tmp_path: Path) -> Cipher | None:
    (tmp_path / "key").write_text("k" * 44)
    return read_cipher(tmp_path / "key")


@pytest.fixture
def series_folder(tmp_path: Path) -> Iterator[Path]:
    """Folder with the series of a gateway that runs."""
    folder = tmp_path / "series"
    with contextlib.closing(SeriesArchive(folder / "port-8000.sqlite", keep_days=1)):
        yield folder


@contextlib.contextmanager
def writing(store: Store, project: Project) -> Iterator[None]:
    """Add usage, accounts and files all the time, with one nano-dollar for each request. Each file is soon deleted."""
    has_ended = threading.Event()
    owner = ItemOwner(project.organisation, project.id)

    def write() -> None:
        for number in itertools.count():
            if has_ended.is_set():
                return
            rows = [usage_row(f"w{number}-{row}", nano_dollars=1) for row in range(50)]
            store.ledger.add_records(rows)
            store.accounts.create_key(project.id, f"key{number}", actor=ACTOR)
            kept.append(add_file(store, owner, f"content {number}"))
            if len(kept) > 3:
                store.files.delete(owner, kept.pop(0).id)

    kept: list[StoredFile] = []
    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def add_file(store: Store, owner: ItemOwner, content: str) -> StoredFile:
    written = store.files.write(owner, [content.encode()])
    return store.files.create(
        owner, written, filename="a", purpose="batch", media_type="text/plain"
    )


def list_blobs(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def check(target: BackupTarget, backup_id: str, scratch: Path) -> CheckedBackup:
    scratch.mkdir()
    return check_backup(target, backup_id, scratch)


def test_backup_made_while_others_write_is_restored_into_both_kinds(
    *,
    store: Store,
    project: Project,
    target: BackupTarget,
    cipher: Cipher,
    series_folder: Path,
    blobs: BlobStore,
    folder: Path,
    request: pytest.FixtureRequest,
) -> None:
    postgres_url: str = request.getfixturevalue("postgres_url")
    tmp_path = series_folder.parent
    key, plain = store.accounts.create_key(project.id, "app", actor=ACTOR)
    secret = store.secrets.get_or_create("reasoning", 32)
    store.fleets.replace_document("shop", "routes", FleetDocument(1, b"{}"), after=0)
    store.secrets.get_or_create(BLOB_PLACE_KEY, value=b"old")
    store.ledger.add_records([usage_row(f"r{number}", nano_dollars=1) for number in range(2500)])
    owner = ItemOwner(project.organisation, project.id)
    file = add_file(store, owner, "kept")
    with writing(store, project):
        backup_id, manifest = create_backup(
            store, target, series_folder=series_folder, blobs=blobs, cipher=cipher
        )
    store.files.remove_blobs()
    assert len(list_blobs(folder)) == len(list(store.files.iter_contents()))
    assert manifest.files >= 1
    assert manifest.requests == manifest.nano_dollars >= 2500
    assert plain.encode() not in b"".join(path.read_bytes() for path in files_of(target))
    assert secret not in b"".join(path.read_bytes() for path in files_of(target))
    assert check(target, backup_id, tmp_path / "scratch").problems == []
    for url in (f"sqlite:///{tmp_path}/new/argosy.db", postgres_url):
        restored = restore_backup(
            target,
            target.find_id(backup_id[:20]),
            url,
            series_folder=tmp_path / url[:6] / "series",
            blobs=open_blob_store(str(tmp_path / url[:6] / "blobs")),
            cipher=cipher,
        )
        assert (restored.moved, restored.missing_models) == ([], [])
        SeriesArchive(tmp_path / url[:6] / "series/port-8000.sqlite", keep_days=1).close()
        new_blobs = open_blob_store(str(tmp_path / url[:6] / "blobs"))
        with contextlib.closing(open_store(url, blobs=new_blobs)) as opened:
            assert b"".join(opened.files.open(owner, file.id)) == b"kept"
            contents = list(opened.files.iter_contents())
            for key_of_blob, sha256, _ in contents:
                content = b"".join(new_blobs.open(key_of_blob))
                assert hashlib.sha256(content).hexdigest() == sha256
            assert len(contents) == manifest.files
            # Gateways know the new place by a mark of their own.
            assert opened.secrets.get_or_create(BLOB_PLACE_KEY, value=b"new") == b"new"
            assert opened.audit_log.verify().entries == manifest.audit_entries
            assert opened.ledger.report()[0].nano_dollars == manifest.nano_dollars
            assert key in opened.accounts.list_keys()
            assert opened.secrets.get_or_create("reasoning", 32) == secret
            assert opened.fleets.read_documents("shop")["routes"].content == b"{}"
            opened.accounts.revoke_key(key.id, actor=ACTOR)


@SQLITE_ONLY
def test_every_flipped_byte_is_found_and_named(
    *,
    store: Store,
    project: Project,
    target: BackupTarget,
    cipher: Cipher,
    series_folder: Path,
    blobs: BlobStore,
    tmp_path: Path,
) -> None:
    owner = ItemOwner(project.organisation, project.id)
    file = add_file(store, owner, "content")
    backup_id, manifest = create_backup(
        store, target, series_folder=series_folder, blobs=blobs, cipher=cipher
    )
    named = {part.sha256: part.name for part in manifest.parts} | {backup_id: "manifest"}
    parts = ["argosy.db", "files.json", "manifest", "port-8000.sqlite", "secrets"]
    assert sorted(named.values()) == parts
    named[file.sha256] = file.id
    new_store, place = tmp_path / "new/argosy.db", tmp_path / "new/blobs"
    for number, (path, name) in enumerate((path, named[path.stem]) for path in files_of(target)):
        content = path.read_bytes()
        half = len(content) // 2
        flipped = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
        for kind, damaged in {"flipped": flipped, "cut": content[:-1], "gone": None}.items():
            path.unlink() if damaged is None else path.write_bytes(damaged)
            scratch = tmp_path / f"{number}-{kind}"
            if name == "manifest":
                with pytest.raises(BackupError, match=rf"{path.name}|No such file"):
                    check(target, backup_id, scratch)
            else:
                (problem,) = check(target, backup_id, scratch).problems
                assert f"{name} ({path.relative_to(path.parents[2])})" in problem
            with pytest.raises(BackupError):
                restore_backup(
                    target,
                    backup_id,
                    f"sqlite:///{new_store}",
                    series_folder=tmp_path / "s",
                    blobs=open_blob_store(str(place)),
                )
            assert not new_store.exists()
            assert not list_blobs(place)
        path.write_bytes(content)
    (tmp_path / "key").write_text("x" * 44)
    (tmp_path / "last").mkdir()
    other = read_cipher(tmp_path / "key")
    with pytest.raises(BackupError, match="another key"):
        check_backup(target, backup_id, tmp_path / "last", other)


@SQLITE_ONLY
def test_restore_replaces_nothing_without_the_flag(
    store: Store, url: str, project: Project, target: BackupTarget, series_folder: Path
) -> None:
    backup_id, manifest = create_backup(store, target, series_folder=series_folder)
    store.accounts.create_project(project.organisation, "later", actor=ACTOR)
    store.close()
    path = Path(url.removeprefix("sqlite:///"))
    with pytest.raises(BackupError, match=rf"{series_folder}/port-8000.sqlite exists.*--replace"):
        restore_backup(target, backup_id, url, series_folder=series_folder)
    with pytest.raises(BackupError, match=rf"{path} exists"):
        restore_backup(target, backup_id, url, series_folder=path.parent / "none")
    restored = restore_backup(target, backup_id, url, series_folder=series_folder, replaces=True)
    with contextlib.closing(open_store(url)) as opened:
        assert opened.audit_log.verify().entries == manifest.audit_entries
    (old,) = (
        each for each in restored.moved if Path(each).name.startswith(f"{path.name}.replaced")
    )
    with contextlib.closing(open_store(f"sqlite:///{old}")) as opened:
        assert opened.audit_log.verify().entries == manifest.audit_entries + 1


@SQLITE_ONLY
def test_old_backups_are_deleted_with_the_parts_that_no_other_has(
    store: Store, project: Project, target: BackupTarget, series_folder: Path
) -> None:
    first, _ = create_backup(store, target, series_folder=series_folder)
    store.accounts.create_project(project.organisation, "later", actor=ACTOR)
    second, later = create_backup(store, target, series_folder=series_folder)
    for path in files_of(target):
        os.utime(path, (0, 0))
    assert delete_old_backups(target, 1) == [first]
    assert {path.stem for path in files_of(target)} == {second, *(p.sha256 for p in later.parts)}
    assert len(later.parts) == 2
    with pytest.raises(BackupError, match="has no backup 1999"):
        target.find_id("1999")


@SQLITE_ONLY
def test_contents_of_files_are_copied_once_and_checked(
    *,
    store: Store,
    project: Project,
    target: BackupTarget,
    series_folder: Path,
    blobs: BlobStore,
    folder: Path,
    tmp_path: Path,
) -> None:
    owner = ItemOwner(project.organisation, project.id)
    first, same = (add_file(store, owner, "first") for _ in range(2))
    with pytest.raises(BackupError, match="Give --blobs"):
        create_backup(store, target, series_folder=series_folder)
    create_backup(store, target, series_folder=series_folder, blobs=blobs)
    # What the target has already is not read again.
    backup_id, manifest = create_backup(store, target, series_folder=series_folder)
    assert (manifest.files, manifest.file_bytes) == (2, 5)
    with pytest.raises(BackupError, match="has 2 files of clients"):
        restore_backup(target, backup_id, f"sqlite:///{tmp_path}/n.db", series_folder=tmp_path)
    second = add_file(store, owner, "second")
    (blob,) = (path for path in list_blobs(folder) if path.name == second.id)
    blob.write_bytes(b"sEcond")
    with pytest.raises(BackupError, match=rf"content of the file .*{second.id} is damaged"):
        create_backup(store, target, series_folder=series_folder, blobs=blobs)
    blob.unlink()
    with pytest.raises(BackupError, match=rf"content of the file .*{second.id} is missing"):
        create_backup(store, target, series_folder=series_folder, blobs=blobs)
    for file in (first, same, second):
        store.files.delete(owner, file.id)
    create_backup(store, target, series_folder=series_folder, blobs=blobs)
    for path in files_of(target):
        os.utime(path, (0, 0))
    delete_old_backups(target, 1)
    assert not {first.sha256, second.sha256} & {path.stem for path in files_of(target)}


def files_of(target: BackupTarget) -> list[Path]:
    return sorted(path for path in Path(target.url).rglob("*") if path.is_file())
