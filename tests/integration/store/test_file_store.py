"""Files and their blobs: what is left when streams, stores and processes fail, and what others hold."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.store.conftest import ACTOR
from tests.support.fake_clock import FakeClock

from argosy.blob_store import BlobNotFoundError, BlobStoreError, blob_key, open_blob_store
from argosy.store import (
    FileInUseError,
    ItemOwner,
    NotFoundError,
    Project,
    RetentionRule,
    StorageQuotaError,
    Store,
    StoredFile,
    UploadError,
    open_store,
)

DAY = 86_400.0
CONTENT = [b"one ", b"two"]
OVERHEAD = 512
KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from argosy.blob_store import open_blob_store

def blocks():
    yield b"half"
    os.kill(os.getpid(), signal.SIGKILL)

open_blob_store(sys.argv[1]).put("a/b/c", blocks())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "blobs"


@pytest.fixture
def store(url: str, clock: FakeClock, folder: Path) -> Iterator[Store]:
    opened = open_store(
        url, clock=clock, max_stored_bytes=10_000, blobs=open_blob_store(str(folder))
    )
    yield opened
    opened.close()


@pytest.fixture
def owner(project: Project) -> ItemOwner:
    return ItemOwner(project.organisation, project.id)


def add_file(
    store: Store, owner: ItemOwner, purpose: str = "batch", lifetime_s: float | None = None
) -> StoredFile:
    written = store.files.write(owner, CONTENT)
    return store.files.create(
        *(owner, written),
        filename="in.jsonl",
        purpose=purpose,
        media_type="text/plain",
        lifetime_s=lifetime_s,
    )


def add_upload(store: Store, owner: ItemOwner, size: int) -> str:
    return store.files.create_upload(
        owner, filename="in.jsonl", purpose="batch", media_type="text/plain", size=size
    ).id


def list_blobs(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def stored_bytes(store: Store, owner: ItemOwner) -> int:
    return store.stored_bytes.read_use([owner.owner])[owner.owner].stored_bytes


def test_file_is_read_by_its_owner_until_it_is_deleted(
    store: Store, owner: ItemOwner, folder: Path
) -> None:
    files, other = store.files, ItemOwner(owner.organisation, "proj_other")
    file = add_file(store, owner)
    assert (file.size, file.sha256) == (7, hashlib.sha256(b"one two").hexdigest())
    assert b"".join(files.open(owner, file.id)) == b"one two"
    assert b"".join(files.open(owner, file.id, 2, 5)) == b"e t"
    assert stored_bytes(store, owner) == 7 + OVERHEAD
    for use in (files.get, files.open, files.delete):
        for wanted, asker in ((file.id, other), ("file-none", owner), ("\0", owner)):
            with pytest.raises(NotFoundError):
                use(asker, wanted)
    files.delete(owner, file.id)
    assert list_blobs(folder) == []
    assert stored_bytes(store, owner) == 0
    with pytest.raises(NotFoundError):
        files.get(owner, file.id)


def test_pages_have_all_files_of_the_owner_and_purpose_in_order(
    store: Store, owner: ItemOwner, clock: FakeClock
) -> None:
    ids = []
    for number in range(5):
        ids.append(add_file(store, owner, "batch" if number % 2 else "evals").id)
        clock.now += number % 2
    for is_descending in (True, False):
        listed: list[str] = []
        has_more = True
        while has_more:
            after = listed[-1] if listed else None
            page, has_more = store.files.list_files(
                owner, after=after, limit=2, is_descending=is_descending
            )
            listed += [file.id for file in page]
        assert sorted(listed) == sorted(ids)
        first = {listed[0], listed[1]}
        assert first <= set(ids[3:] + ids[1:3]) if is_descending else ids[0] in first
    page, has_more = store.files.list_files(owner, limit=9, purpose="batch")
    assert ({file.id for file in page}, has_more) == ({ids[1], ids[3]}, False)


def test_nothing_is_left_of_what_fails(
    store: Store, owner: ItemOwner, folder: Path, clock: FakeClock
) -> None:
    def cut() -> Iterator[bytes]:
        yield b"half"
        raise EOFError

    with pytest.raises(EOFError):
        store.files.write(owner, cut())
    assert list_blobs(folder) == []
    written = store.files.write(owner, [b"x" * 20_000])
    with pytest.raises(StorageQuotaError):
        store.files.create(owner, written, filename="a", purpose="batch", media_type="b")
    store.files.discard(owner, written)
    assert list_blobs(folder) == []
    store.files.write(owner, CONTENT)  # by a process that has died since
    kept = add_file(store, owner)
    assert store.files.remove_blobs() == 0
    clock.now += DAY + 1
    assert store.files.remove_blobs() == 1
    assert list_blobs(folder) == [folder / blob_key(*owner, kept.id)]


def test_killed_writer_leaves_nothing_and_running_ones_go_on(folder: Path) -> None:
    process = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(folder)], check=False)
    assert process.returncode == -signal.SIGKILL
    assert len(list_blobs(folder)) == 1

    def blocks() -> Iterator[bytes]:
        yield b"a"
        open_blob_store(str(folder))  # another process starts meanwhile
        yield b"b"

    blobs = open_blob_store(str(folder))
    assert list_blobs(folder) == []
    blobs.put("a/b/c", blocks())
    assert b"".join(blobs.open("a/b/c")) == b"ab"
    with pytest.raises(BlobNotFoundError, match="Restore it"):
        blobs.open("a/b/d")


def test_keys_stay_in_the_folder_of_their_owner() -> None:
    assert blob_key("org", "proj", "file-1") == "org/proj/file-1"
    assert blob_key("..", "a/../b", "") == "%2E%2E/a%2F%2E%2E%2Fb/-"


def test_held_file_is_neither_deleted_nor_expires(
    store: Store, owner: ItemOwner, clock: FakeClock, url: str
) -> None:
    files = store.files
    file = add_file(store, owner, lifetime_s=10.0)
    with store._database.write_transaction() as connection:  # noqa: SLF001 - as other stores do
        assert files.hold(connection, owner, file.id) == file
    with pytest.raises(FileInUseError):
        files.delete(owner, file.id)
    clock.now += 11
    assert files.delete_expired() == 0
    assert b"".join(files.open(owner, file.id)) == b"one two"
    with store._database.write_transaction() as connection:  # noqa: SLF001 - the same
        files.release(connection, file.id)
    with pytest.raises(NotFoundError):
        files.get(owner, file.id)
    assert files.delete_expired() == 1
    assert stored_bytes(store, owner) == 0


def test_upload_becomes_a_file_of_its_parts_in_their_order(
    store: Store, owner: ItemOwner, folder: Path
) -> None:
    files = store.files
    upload = add_upload(store, owner, 7)
    parts = [
        files.add_part(owner, upload, files.write(owner, [block], id_prefix="part_")).id
        for block in (b"two", b"one ", b"unused")
    ]
    assert stored_bytes(store, owner) == 13 + 3 * OVERHEAD
    assert files.list_files(owner, limit=9) == ([], False)
    for wrong, problem in (
        ([parts[0]], "3 bytes together"),
        (["part_none"], "no part"),
        ([parts[0]] * 2, "named twice"),
    ):
        with pytest.raises(UploadError, match=problem):
            files.complete_upload(owner, upload, wrong)
    order = [parts[1], parts[0]]
    with pytest.raises(UploadError, match="MD5"):
        files.complete_upload(owner, upload, order, "0" * 32)
    md5 = hashlib.md5(b"one two", usedforsecurity=False).hexdigest().upper()
    done, file = files.complete_upload(owner, upload, order, md5)
    assert (done.status, done.file) == ("completed", file.id)
    assert files.complete_upload(owner, upload, order) == (done, file)
    assert b"".join(files.open(owner, file.id)) == b"one two"
    assert list_blobs(folder) == [folder / blob_key(*owner, file.id)]
    assert stored_bytes(store, owner) == 7 + OVERHEAD
    for end in (files.check_pending, files.cancel_upload):
        with pytest.raises(UploadError):
            end(owner, upload)
    with pytest.raises(NotFoundError):
        files.check_pending(ItemOwner("", ""), upload)


@pytest.mark.parametrize("end", ["cancel", "expiry"])
def test_ended_upload_leaves_no_part(
    store: Store, owner: ItemOwner, folder: Path, clock: FakeClock, end: str
) -> None:
    files = store.files
    upload = add_upload(store, owner, 3)
    part = files.add_part(owner, upload, files.write(owner, [b"one"], id_prefix="part_"))
    if end == "cancel":
        assert files.cancel_upload(owner, upload).status == "cancelled"
        assert files.cancel_upload(owner, upload).status == "cancelled"
        with pytest.raises(UploadError, match="cancelled"):
            files.complete_upload(owner, upload, [part.id])
    else:
        clock.now += 3601
        assert files.delete_expired() == 2
        with pytest.raises(NotFoundError):
            files.complete_upload(owner, upload, [part.id])
    assert list_blobs(folder) == []
    assert stored_bytes(store, owner) == 0


def test_retention_deletes_old_files_of_the_project(
    store: Store, owner: ItemOwner, clock: FakeClock
) -> None:
    old = add_file(store, owner)
    clock.now += 3 * DAY
    new = add_file(store, owner)
    rule = RetentionRule(project=owner.owner, kind="files", keep_days=2)
    store.retention.set_rule(rule, actor=ACTOR)
    assert store.retention.delete_expired() == 1
    assert [file.id for file in store.files.list_files(owner, limit=9)[0]] == [new.id]
    assert old.id != new.id


def test_process_without_blobs_leaves_their_removal_to_a_gateway(
    store: Store, owner: ItemOwner, url: str, clock: FakeClock, folder: Path
) -> None:
    add_file(store, owner)
    add_upload(store, owner, 3)
    (project,) = store.accounts.list_projects()
    command = open_store(url, clock=clock)
    with pytest.raises(BlobStoreError, match=r"store\.blobs"):
        command.files.write(owner, CONTENT)
    assert command.erasure.erase_project(project, actor=ACTOR).files == 1
    command.close()
    assert len(list_blobs(folder)) == 1
    assert store.files.remove_blobs() == 1
    assert store.files.remove_blobs() == 0
    assert list_blobs(folder) == []


def test_full_disk_is_named_and_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = open_blob_store(str(folder))
    monkeypatch.setattr("argosy.blob_store.folder_blob_store.MIN_FREE_BYTES", 2**62)
    with pytest.raises(BlobStoreError, match="Free space"):
        blobs.put("a/b/c", CONTENT)
    assert list_blobs(folder) == []
