"""The journal of usage: whatever happens to its process, each request has one row, with what was counted."""

from __future__ import annotations

import errno
import math
import shutil
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from structlog.testing import capture_logs

from argosy.policy import Rates
from argosy.store import UsageLog, UsageLogError, UsageRecord, UsageSlot, open_store
from argosy.store import usage_log as spool_module
from argosy.store.usage_slots import SLOT_BYTES

RATES = Rates(3, 1, 5)
NOW = 1000.0
DAMAGE = [
    *((0, 99), (0, -1), (3, -5), (8, -1), (9, 0), (10, -1), (11, 1 << 40)),
    *((word, value) for word in range(1, 7) for value in (1 << 62, -(1 << 63))),
]
"""Words of a slot, and what they never hold."""
YEAR_10000 = 253_402_300_800.0

Counts = tuple[int, int, int]
Fate = tuple[str, Counts] | None
"""How a row ends and what it counted; None: there is none."""


def row(request: str, **texts: Any) -> UsageRecord:  # noqa: ANN401 - those that a row has
    return UsageRecord(
        request=request,
        model="m",
        started_at=NOW,
        ended_at=NOW,
        status="interrupted",
        **texts,
    )


def fate(of: UsageRecord) -> Fate:
    counts = of.input_tokens, of.cached_tokens, of.output_tokens
    assert of.nano_dollars == RATES.cost_nano_dollars(*counts)
    return of.status, counts


class Moment:
    """Calls `then` before a line of the journal's code is run, the `line`-th that a call runs."""

    def __init__(self, line: int, then: Callable[[], None]) -> None:
        self._left = line
        self._then = then
        self.came = False

    def within(self, call: Callable[[], None]) -> None:
        before = sys.gettrace()
        sys.settrace(self._enter)  # type: ignore[arg-type]
        try:
            call()
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Moment._Trace | None:
        return self._line if "/argosy/store/" in frame.f_code.co_filename else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Moment._Trace:
        if event == "line":
            self._left -= 1
            if self._left == 0:
                self.came = True
                self._then()
        return self._line

    _Trace = Callable[[FrameType, str, object], object]


class Crashes(RuleBasedStateMachine):
    """Requests come and go, the store fails now and then, and the process dies before any line of the code.

    A death is what it leaves: a copy of the files as they are at that line, with what the store had then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.small = mock.patch.multiple(
            spool_module, SLOTS_PER_TABLE=6, MIN_SPARE_SLOTS=2, DRAIN_BATCH_RECORDS=3
        )
        self.small.start()
        self.root = Path(tempfile.mkdtemp())
        self.lives = 0
        self.spool = self.open()
        self.begun = 0
        self.running: dict[str, tuple[UsageSlot, Counts]] = {}
        self.fates: dict[str, set[Fate]] = {}
        """Of the requests that run no more: what may be."""
        self.store: dict[str, Fate] = {}
        self.kept: dict[str, Fate] = {}
        """What the store had at the last death."""

    def open(self) -> UsageLog:
        return UsageLog(self.root / str(self.lives), clock=lambda: NOW)

    def teardown(self) -> None:
        try:
            self.drain()
            assert self.spool.pending_records == 0
            for request, fates in self.views().items():
                if request not in self.running:
                    assert self.store.get(request) in fates
            assert set(self.store) <= set(self.fates)
        finally:
            self.spool.close()
            self.small.stop()
            shutil.rmtree(self.root)

    # --- what happens ------------------------------------------------------------------------------

    @rule()
    def begin(self) -> None:
        self.begun += 1
        request = f"r{self.begun}"
        self.running[request] = self.spool.allocate_slot(row(request), RATES), (0, 0, 0)

    @rule(which=st.integers(0, 50), counts=st.tuples(*[st.integers(1, 2**40)] * 3))
    @precondition(lambda self: self.running)
    def count(self, which: int, counts: Counts) -> None:
        request = self.pick(which)
        slot, _ = self.running[request]
        slot.set_counts(*counts)
        self.running[request] = slot, counts

    @rule(which=st.integers(0, 50))
    @precondition(lambda self: self.running)
    def end(self, which: int) -> None:
        request = self.pick(which)
        slot, counts = self.running.pop(request)
        slot.finish("completed", "there", NOW)
        self.fates[request] = {("completed", counts)}

    @rule()
    def drain(self) -> None:
        self.spool.drain(self.take)

    @rule(takes=st.booleans())
    def drain_into_a_store_that_fails(self, takes: bool) -> None:
        def fail(rows: list[UsageRecord]) -> None:
            if takes:
                self.take(rows)
            raise OSError("down")

        if self.spool.pending_records:
            with pytest.raises(OSError, match="down"):
                self.spool.drain(fail)

    @rule(
        line=st.integers(1, 60),
        call=st.sampled_from(["begin", "count", "end", "drain"]),
        which=st.integers(0, 50),
        counts=st.tuples(*[st.integers(1, 2**40)] * 3),
    )
    def die(self, line: int, call: str, which: int, counts: Counts) -> None:
        calls: dict[str, Callable[[], None]] = {"begin": self.begin, "drain": self.drain}
        if self.running:
            calls["count"] = lambda: self.count(which, counts)
            calls["end"] = lambda: self.end(which)
        before = self.views()
        moment = Moment(line, self.leave)
        moment.within(calls.get(call, self.begin))
        after = self.views()
        if moment.came:
            after = {r: between(before.get(r, {None}), fates) for r, fates in after.items()}
        else:
            self.leave()
        self.spool.close()
        self.lives += 1
        self.fates, self.store, self.running = after, self.kept, {}
        self.spool = self.open()
        for recovered in self.spool.recover():
            assert recovered.status == "interrupted"
            assert recovered.ended_at == NOW
            assert fate(recovered) in self.fates[recovered.request]

    # --- how it stands -----------------------------------------------------------------------------

    def pick(self, which: int) -> str:
        return list(self.running)[which % len(self.running)]

    def views(self) -> dict[str, set[Fate]]:
        """What may become of each request if the process dies here."""
        cut: dict[str, set[Fate]] = {
            request: {("interrupted", counts)} for request, (_, counts) in self.running.items()
        }
        return self.fates | cut

    def leave(self) -> None:
        here, there = (self.root / str(life) for life in (self.lives, self.lives + 1))
        shutil.copytree(here, there)
        self.kept = dict(self.store)

    def take(self, rows: list[UsageRecord]) -> None:
        for one in rows:
            assert self.store.setdefault(one.request, fate(one)) == fate(one)


def between(before: set[Fate], after: set[Fate]) -> set[Fate]:
    """A change was under way: each word may have been written, in order."""
    fates = before | after
    for old in before:
        for new in after:
            if old is not None and new is not None:
                for written in range(4):
                    fates.add((old[0], new[1][:written] + old[1][written:]))  # type: ignore[arg-type]
    return fates


TestCrashes = Crashes.TestCase
TestCrashes.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


# --- one by one ------------------------------------------------------------------------------------


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[UsageLog]:
    opened = UsageLog(tmp_path / "usage", clock=lambda: NOW)
    yield opened
    opened.close()


def test_a_row_says_all_that_its_request_was_and_used(spool: UsageLog) -> None:
    whose = {"organisation": "acme", "project": "web", "key": "k", "user": "ann"}
    begun = row("r", asked="next", route="canary", **whose)
    slot = spool.allocate_slot(begun, RATES)
    slot.set_counts(100, 40, 7)
    slot.finish("stopped", "unix:/a.sock", NOW + 2)
    rows: list[UsageRecord] = []
    assert spool.drain(rows.extend) == 1
    assert rows == [
        UsageRecord(
            request="r",
            organisation="acme",
            project="web",
            key="k",
            user="ann",
            model="m",
            asked="next",
            route="canary",
            replica="unix:/a.sock",
            started_at=NOW,
            ended_at=NOW + 2,
            status="stopped",
            input_tokens=100,
            cached_tokens=40,
            output_tokens=7,
            nano_dollars=60 * 3 + 40 + 7 * 5,
        )
    ]
    assert spool.drain(rows.extend) == 0


@given(
    request=st.text(max_size=160),
    user=st.text(max_size=2000),
    asked=st.text(max_size=500),
    replica=st.text(max_size=500),
)
@example(request="r" * 160, user="u" * 2000, asked="a" * 100, replica="here")
@settings(deadline=None, max_examples=20)
def test_whatever_texts_come_the_row_can_be_read_and_the_request_is_known(
    request: str, user: str, asked: str, replica: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spool = UsageLog(Path(folder))
        begun = row(request, user=user, organisation="o" * 200, asked=asked)
        spool.allocate_slot(begun).finish("failed", replica, NOW)
        rows: list[UsageRecord] = []
        spool.drain(rows.extend)
        spool.close()
    plain = request.replace("\0", "").encode("utf-8", "replace").decode()
    if len(plain.encode()) <= 160:
        assert rows[0].request == plain
    for whole, kept in ((user, rows[0].user), (asked, rows[0].asked)):
        written = whole.replace("\0", "").encode("utf-8", "replace")
        assert written.startswith(kept.encode()[:85])
        assert len(kept.encode()) >= min(85, len(written))


def test_more_requests_than_a_table_has_slots_get_more_tables_and_give_them_back(
    spool: UsageLog, tmp_path: Path
) -> None:
    slots = [spool.allocate_slot(row(str(number))) for number in range(10_000)]
    assert len(list(tmp_path.glob("usage/*.usage"))) == 3
    for slot in slots:
        slot.finish("completed", "", NOW)
    seen: set[str] = set()
    assert spool.drain(lambda rows: seen.update(one.request for one in rows)) == 10_000
    assert len(seen) == 10_000
    spool.drain(lambda _: None)
    assert len(list(tmp_path.glob("usage/*.usage"))) == 1


def test_gateways_share_a_folder_and_one_takes_over_what_another_left(tmp_path: Path) -> None:
    first, second = (UsageLog(tmp_path, clock=lambda: NOW) for _ in range(2))
    first.allocate_slot(row("a")).set_counts(5, 0, 1)
    first.allocate_slot(row("b")).finish("completed", "", NOW)
    assert second.recover() == []
    assert second.pending_records == 0
    first.close()
    assert [one.request for one in second.recover()] == ["a"]
    rows: list[UsageRecord] = []
    second.drain(rows.extend)
    assert {one.request: (one.status, one.input_tokens) for one in rows} == {
        "a": ("interrupted", 5),
        "b": ("completed", 0),
    }
    second.close()
    assert not list(tmp_path.glob("*.usage"))


def test_what_could_not_be_taken_over_for_want_of_memory_is_taken_over_later(
    tmp_path: Path,
) -> None:
    dead, spool = UsageLog(tmp_path), UsageLog(tmp_path)
    dead.allocate_slot(row("a"))
    dead.close()
    short = OSError(errno.ENOMEM, "Cannot allocate memory")
    with mock.patch("mmap.mmap", side_effect=short), pytest.raises(OSError):  # noqa: PT011
        spool.recover()
    assert [one.request for one in spool.recover()] == ["a"]
    spool.close()


def test_what_the_version_before_left_is_read_and_its_file_used(tmp_path: Path) -> None:
    """Its slots have no names of what was asked for and of routes; those that are free have rows of both."""
    path = tmp_path / "before.usage"
    path.write_bytes(
        struct.pack("=Qd", int.from_bytes(b"argosy\0\1"), NOW + 60).ljust(SLOT_BYTES, b"\0")
        + old_slot(2, "ended", b"unix:/a.sock", NOW + 2)
        + old_slot(1, "running", b"", 0.0)
        + old_slot(0, "free", b"unix:/b.sock", NOW + 1)
    )
    spool = UsageLog(tmp_path, clock=lambda: NOW)
    whose = {"organisation": "acme", "project": "web", "key": "k", "user": "ann"}
    used = {"input_tokens": 100, "cached_tokens": 40, "output_tokens": 7}
    used["nano_dollars"] = RATES.cost_nano_dollars(100, 40, 7)
    ended = row("ended", **whose, **used, replica="unix:/a.sock")
    ended = msgspec.structs.replace(ended, status="completed", ended_at=NOW + 2)
    running = msgspec.structs.replace(row("running", **whose, **used), ended_at=NOW + 60)
    assert spool.recover() == [running]
    begun = spool.allocate_slot(
        row("new", asked="next", route="canary")
    )  # in a slot of the same file
    assert b"next\0canary" in path.read_bytes()
    assert path.read_bytes().startswith(struct.pack("=Q", int.from_bytes(b"argosy\0\2")))
    begun.finish("completed", "", NOW)
    rows: list[UsageRecord] = []
    spool.drain(rows.extend)
    assert {(one.request, one.asked, one.route) for one in rows} == {
        ("ended", "", ""),
        ("running", "", ""),
        ("new", "next", "canary"),
    }
    assert ended in rows
    assert running in rows
    spool.close()


def old_slot(state: int, request: str, replica: bytes, ended_at: float) -> bytes:
    """A slot as it was before rows had `asked` and `route`."""
    text = f"{request}\0acme\0web\0k\0ann\0m".encode()
    counts = struct.pack("=7q", state, 100, 40, 7, 3, 1, 5)
    times = struct.pack("=2d", NOW, ended_at)
    sizes = struct.pack("=3q", zlib.crc32(text), len(text), len(replica))
    return ((counts + times + sizes + text).ljust(896, b"\0") + replica).ljust(SLOT_BYTES, b"\0")


def test_rows_that_a_full_disk_never_took_are_lost_aloud(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch("os.posix_fallocate", side_effect=full):
        spool = UsageLog(tmp_path)
        slots = [spool.allocate_slot(row(str(number))) for number in range(3)]
        slots[0].finish("completed", "here", 1.0)
        with capture_logs() as logs:
            spool.close()
    (told,) = logs
    assert (told["event"], told["log_level"], told["rows"]) == ("usage_lost", "error", 3)


def test_an_interrupted_row_ends_when_its_owner_was_last_seen(tmp_path: Path) -> None:
    now = NOW
    first = UsageLog(tmp_path, clock=lambda: now)
    first.allocate_slot(row("a"))
    first.allocate_slot(row("ended")).finish("completed", "", NOW)
    now = NOW + 60
    first.drain(lambda _: None)
    first.close()
    now = NOW + 5000
    second = UsageLog(tmp_path, clock=lambda: now)
    with capture_logs() as logs:
        assert [one.ended_at for one in second.recover()] == [NOW + 60]
    assert [(told["event"], told["interrupted"]) for told in logs] == [("usage_recovered", 1)]
    assert second.drain(lambda _: None) == 1  # nothing is given a second time
    second.close()


def test_a_torn_row_costs_itself_only(tmp_path: Path) -> None:
    first = UsageLog(tmp_path)
    for name in ("torn by the power failure", "whole"):
        first.allocate_slot(row(name)).set_counts(1, 0, 1)
    first.close()
    (file,) = tmp_path.glob("*.usage")
    file.write_bytes(file.read_bytes().replace(b"torn by", b"\0\0\0\0\0\0\0"))
    second = UsageLog(tmp_path)
    with capture_logs() as logs:
        assert [one.request for one in second.recover()] == ["whole"]
    assert [told["event"] for told in logs] == ["usage_record_unreadable", "usage_recovered"]
    second.close()


@pytest.mark.parametrize(
    ("word", "value"),
    [
        *((word, struct.pack("=q", value)) for word, value in DAMAGE),
        *((word, struct.pack("=d", at)) for word in (7, 8) for at in (math.nan, YEAR_10000)),
        (9, bytes(16)),  # the sum over no text, and its size
    ],
)
def test_a_row_with_a_damaged_word_keeps_no_other_from_the_store(
    tmp_path: Path, word: int, value: bytes
) -> None:
    first = UsageLog(tmp_path)
    slots = [first.allocate_slot(row(name), RATES) for name in ("damaged", "whole")]
    for slot in slots:
        slot.set_counts(4, 2, 2)
        slot.finish("completed", "here", NOW)
    first.close()
    (file,) = tmp_path.glob("*.usage")
    content = bytearray(file.read_bytes())
    at = content.index(b"damaged") // SLOT_BYTES * SLOT_BYTES + word * 8
    content[at : at + len(value)] = value
    file.write_bytes(content)
    second, store = UsageLog(tmp_path), open_store(f"sqlite:///{tmp_path}/store.db")
    store.migrate()
    second.recover()
    second.drain(store.ledger.add_records)
    assert "whole" in [one.request for rows in store.ledger.iter_records() for one in rows]
    assert second.pending_records == 0
    assert "whole" in "".join(store.ledger.export_csv())
    assert store.ledger.report(["day"])
    store.close()
    second.close()


@pytest.mark.parametrize("size", [8, 100, SLOT_BYTES, SLOT_BYTES + 8])
def test_a_file_that_was_cut_short_is_named(tmp_path: Path, size: int) -> None:
    first = UsageLog(tmp_path)
    first.allocate_slot(row("lost"))
    first.close()
    (file,) = tmp_path.glob("*.usage")
    file.write_bytes(file.read_bytes()[:size])
    second = UsageLog(tmp_path)
    with pytest.raises(UsageLogError, match=rf"{file.name} .*move the file away"):
        second.recover()
    second.close()


def test_files_that_nobody_came_to_write_are_removed_and_strange_ones_are_named(
    tmp_path: Path,
) -> None:
    empty = tmp_path / "0.usage"
    empty.touch()
    spool = UsageLog(tmp_path)
    assert spool.recover() == []
    assert not empty.exists()
    (tmp_path / "1.usage").write_bytes(b"something else")
    with pytest.raises(UsageLogError, match=r"1\.usage holds usage that this version"):
        spool.recover()
    spool.close()


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageLogError, match="Choose a writable folder"):
        UsageLog(tmp_path / "file" / "usage")
