"""Files of the usage log: full disks, spare tables, private permissions and removed folders."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import shutil
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from structlog.testing import capture_logs
from tests.support.usage_log_harness import NOW, RATES, LineHook, new_record, open_file_count

from argosy.store import UsageLog, UsageLogError, UsageLogFullError, UsageSlot, usage_log
from argosy.store.usage_slots import SLOT_BYTES

DISK_FULL = OSError(errno.ENOSPC, "No space left on device")
TABLE_RECORDS = usage_log.SLOTS_PER_TABLE - 1


def begin_requests(log: UsageLog, count: int) -> list[UsageSlot]:
    return [log.allocate_slot(new_record(str(number)), RATES) for number in range(count)]


def test_full_disk_keeps_a_limited_number_of_records_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_log, "MAX_MEMORY_TABLES", 1)
    with mock.patch("os.posix_fallocate", side_effect=DISK_FULL), capture_logs() as events:
        log = UsageLog(tmp_path)
        begin_requests(log, TABLE_RECORDS)
        open_files = open_file_count()
        for _ in range(3):
            with pytest.raises(UsageLogFullError):
                begin_requests(log, 1)
        assert log.unpersisted_records == TABLE_RECORDS
        assert open_file_count() == open_files
        assert not list(tmp_path.glob("*.usage"))
    assert [event["event"] for event in events] == ["usage_log_disk_full"]
    with capture_logs() as events:
        begin_requests(log, 10)
        assert [event["event"] for event in events] == ["usage_log_disk_recovered"]
        begin_requests(log, usage_log.SLOTS_PER_TABLE)
        assert log.unpersisted_records == TABLE_RECORDS
        assert len(events) == 1
        log.close()


def test_spare_table_is_created_before_it_is_needed_and_removed_after(tmp_path: Path) -> None:
    log = UsageLog(tmp_path)
    (first,) = tmp_path.glob("*.usage")
    for _ in range(2):
        log.drain(lambda _: None)
        assert list(tmp_path.glob("*.usage")) == [first]
    open_files = open_file_count()
    slots = begin_requests(log, TABLE_RECORDS)
    for _ in range(2):
        log.drain(lambda _: None)
        assert len(list(tmp_path.glob("*.usage"))) == 2
    with mock.patch("os.posix_fallocate", side_effect=DISK_FULL):
        slots += begin_requests(log, TABLE_RECORDS)
    assert log.unpersisted_records == 0
    for slot in slots:
        slot.finish("completed", "", NOW)
    for _ in range(2):
        log.drain(lambda _: None)
    assert open_file_count() == open_files
    log.close()


def test_repeated_recovery_leaks_no_files_and_logs_nothing(tmp_path: Path) -> None:
    log, other = UsageLog(tmp_path / "usage"), UsageLog(tmp_path / "usage")
    other.allocate_slot(new_record("other")).finish("completed", "", NOW)
    open_files = open_file_count()
    for _ in range(3):
        assert log.recover() == []
    newer = tmp_path / "usage" / "0.usage"
    newer.write_bytes(b"argosy\0\3".rjust(8, b"\0") + bytes(2 * SLOT_BYTES - 8))
    for _ in range(3):
        with pytest.raises(UsageLogError, match="Run the version that wrote it"):
            log.recover()
    assert open_file_count() == open_files
    newer.unlink()
    other.close()
    with capture_logs() as events:
        log.recover()
    assert events == [], "no request was interrupted, and free slots are not damaged"
    assert log.pending_records == 1
    log.close()


def test_folder_and_files_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "usage"
    log = UsageLog(folder)
    (file,) = folder.glob("*.usage")
    modes = [path.stat().st_mode & 0o777 for path in (folder, file)]
    assert modes == [0o700, 0o600]
    log.close()


def test_folder_is_locked_until_a_new_file_is_complete(tmp_path: Path) -> None:
    """Another process would recover an incomplete file as the file of a dead process."""

    def check_files(folder: Path) -> None:
        incomplete = [path for path in folder.glob("*.usage") if not any(path.read_bytes()[:8])]
        with (folder / "lock").open("wb") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            assert not incomplete

    with mock.patch.object(usage_log, "SLOTS_PER_TABLE", 6):
        for line in itertools.count(10):
            folder = tmp_path / str(line)
            folder.mkdir()
            hook = LineHook(line, partial(check_files, folder))
            hook.trace(lambda: UsageLog(folder).close())  # noqa: B023 - called at once
            if not hook.has_run:
                break
    assert line > 20


def test_removed_folder_loses_no_record_of_a_running_process(tmp_path: Path) -> None:
    log = UsageLog(tmp_path / "usage")
    open_files = open_file_count()
    slots = begin_requests(log, usage_log.SLOTS_PER_TABLE)
    for slot in slots:
        slot.finish("completed", "", NOW)
    shutil.rmtree(tmp_path / "usage")
    with capture_logs():
        assert log.drain(lambda _: None) == len(slots)
        log.drain(lambda _: None)
        assert open_file_count() == open_files
        log.close()
    assert open_file_count() < open_files
