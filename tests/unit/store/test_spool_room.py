"""Where the journal's room ends: that of a row, and that of all rows while the disk is full."""

from __future__ import annotations

import errno
from pathlib import Path
from unittest import mock

import pytest
from structlog.testing import capture_logs
from tests.unit.store.test_spool import NOW, RATES, row

from argosy.store import Spool, SpoolFullError, UsageRow
from argosy.store import spool as spool_module


def open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def begin(spool: Spool, count: int) -> None:
    for number in range(count):
        spool.begin(row(str(number)), RATES)


def test_who_has_a_long_name_writes_into_no_other_row(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    names = [f"request-{number}" for number in range(10)]
    begun = [
        spool.begin(row(name, user="u" * 2000 * (number % 2)), RATES)
        for number, name in enumerate(names)
    ]
    for slot in begun:
        slot.end("completed", "replica" * 200, NOW)
    rows: list[UsageRow] = []
    spool.drain(rows.extend)
    spool.close()
    assert [one.request for one in rows] == names
    assert [one.user[:85] for one in rows] == ["", "u" * 85] * 5


def test_while_the_disk_is_full_memory_holds_so_many_rows_and_each_try_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "MEMORY_TABLES", 1)
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch("os.posix_fallocate", side_effect=full), capture_logs():
        spool = Spool(tmp_path)
        with pytest.raises(SpoolFullError):
            begin(spool, 2 * spool_module.SLOTS)
        assert spool.in_memory >= spool_module.SLOTS - 1
        before = open_files()
        for _ in range(3):
            with pytest.raises(SpoolFullError):
                begin(spool, 1)
        assert open_files() == before
        spool.close()
