"""Where the journal's room ends: that of a row, and that of all rows while the disk is full."""

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
from tests.unit.store.test_usage_log import NOW, RATES, Moment, row

from argosy.store import UsageLog, UsageLogError, UsageLogFullError, UsageRecord, UsageSlot
from argosy.store import usage_log as spool_module
from argosy.store.usage_slots import SLOT_BYTES

FULL = OSError(errno.ENOSPC, "No space left on device")


def open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def begin(spool: UsageLog, count: int) -> list[UsageSlot]:
    return [spool.allocate_slot(row(str(number)), RATES) for number in range(count)]


def test_who_has_a_long_name_writes_into_no_other_row(tmp_path: Path) -> None:
    spool = UsageLog(tmp_path)
    names = [f"request-{number}" for number in range(10)]
    begun = [
        spool.allocate_slot(row(name, user="u" * 2000 * (number % 2)), RATES)
        for number, name in enumerate(names)
    ]
    for slot in begun:
        slot.finish("completed", "replica" * 200, NOW)
    rows: list[UsageRecord] = []
    spool.drain(rows.extend)
    spool.close()
    assert [one.request for one in rows] == names
    assert [one.user[:85] for one in rows] == ["", "u" * 85] * 5


def test_while_the_disk_is_full_memory_holds_so_many_rows_and_each_try_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "MAX_MEMORY_TABLES", 1)
    with mock.patch("os.posix_fallocate", side_effect=FULL), capture_logs() as logs:
        spool = UsageLog(tmp_path)
        begin(spool, spool_module.SLOTS_PER_TABLE - 1)
        before = open_files()
        for _ in range(3):
            with pytest.raises(UsageLogFullError):
                begin(spool, 1)
        assert spool.unpersisted_records == spool_module.SLOTS_PER_TABLE - 1
        assert open_files() == before
        assert not list(tmp_path.glob("*.usage"))
    assert [told["event"] for told in logs] == ["usage_log_disk_full"]
    with capture_logs() as logs:
        begin(spool, 10)  # there is room again
        assert [told["event"] for told in logs] == ["usage_log_disk_recovered"]
        begin(spool, spool_module.SLOTS_PER_TABLE)
        assert spool.unpersisted_records == spool_module.SLOTS_PER_TABLE - 1
        assert len(logs) == 1
        spool.close()


def test_room_is_made_before_it_is_needed_and_no_more_than_that(tmp_path: Path) -> None:
    spool = UsageLog(tmp_path)
    (first,) = tmp_path.glob("*.usage")
    for _ in range(2):
        spool.drain(lambda _: None)
        assert list(tmp_path.glob("*.usage")) == [first]
    before = open_files()
    slots = begin(spool, spool_module.SLOTS_PER_TABLE - 1)
    for _ in range(2):
        spool.drain(lambda _: None)
        assert len(list(tmp_path.glob("*.usage"))) == 2
    with mock.patch("os.posix_fallocate", side_effect=FULL):
        slots += begin(spool, spool_module.SLOTS_PER_TABLE - 1)
    assert spool.unpersisted_records == 0
    for slot in slots:
        slot.finish("completed", "", NOW)
    for _ in range(2):
        spool.drain(lambda _: None)
    assert open_files() == before
    spool.close()


def test_to_look_for_what_others_left_costs_nothing(tmp_path: Path) -> None:
    spool, other = UsageLog(tmp_path / "usage"), UsageLog(tmp_path / "usage")
    other.allocate_slot(row("theirs")).finish("completed", "", NOW)
    before = open_files()
    for _ in range(3):
        assert spool.recover() == []
    strange = tmp_path / "usage" / "0.usage"
    strange.write_bytes(b"argosy\0\3".rjust(8, b"\0") + bytes(2 * SLOT_BYTES - 8))
    for _ in range(3):
        with pytest.raises(UsageLogError, match="Run the version that wrote it"):
            spool.recover()
    assert open_files() == before
    strange.unlink()
    other.close()
    with capture_logs() as logs:
        spool.recover()
    assert logs == []  # nobody was interrupted, and what is free is not damaged
    assert spool.pending_records == 1
    spool.close()


def test_only_its_owner_reads_it(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "usage"
    spool = UsageLog(folder)
    (file,) = folder.glob("*.usage")
    modes = [path.stat().st_mode & 0o777 for path in (folder, file)]
    assert modes == [0o700, 0o600]
    spool.close()


def test_nobody_else_may_look_before_a_file_is_whole(tmp_path: Path) -> None:
    """Else it would be taken for one that a dead process left."""

    def look(folder: Path) -> None:
        unfinished = [path for path in folder.glob("*.usage") if not any(path.read_bytes()[:8])]
        with (folder / "lock").open("wb") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            assert not unfinished

    with mock.patch.object(spool_module, "SLOTS_PER_TABLE", 6):
        for line in itertools.count(10):
            folder = tmp_path / str(line)
            folder.mkdir()
            moment = Moment(line, partial(look, folder))
            moment.within(lambda: UsageLog(folder).close())  # noqa: B023 - called at once
            if not moment.came:
                break
    assert line > 20


def test_who_removes_the_folder_takes_no_row_of_who_runs(tmp_path: Path) -> None:
    spool = UsageLog(tmp_path / "usage")
    before = open_files()
    slots = begin(spool, spool_module.SLOTS_PER_TABLE)
    for slot in slots:
        slot.finish("completed", "", NOW)
    shutil.rmtree(tmp_path / "usage")
    with capture_logs():
        assert spool.drain(lambda _: None) == len(slots)
        spool.drain(lambda _: None)
        assert open_files() == before
        spool.close()
    assert open_files() < before
