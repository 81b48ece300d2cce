"""Usage log: each request has exactly one record with its last counts, even if the process dies at any line."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import math
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from structlog.testing import capture_logs
from tests.support.fake_clock import FakeClock
from tests.support.migrated_store import open_migrated_store
from tests.support.usage_log_harness import (
    NOW,
    RATES,
    LineHook,
    Outcome,
    TokenCounts,
    drain,
    new_record,
    open_file_count,
    outcome,
)

from argosy.policy import Rates
from argosy.protocol import TokenUsage
from argosy.store import (
    UsageLog,
    UsageLogError,
    UsageLogFullError,
    UsageRecord,
    UsageSlot,
    usage_log,
)
from argosy.store.usage_slots import SLOT_BYTES

YEAR_10000 = 253_402_300_800.0
DISK_FULL = OSError(errno.ENOSPC, "No space left on device")
TABLE_RECORDS = usage_log.SLOTS_PER_TABLE - 1

# --- crashes -------------------------------------------------------------------------------------

Outcomes = set[Outcome | None]
"""Possible outcomes of a request. None stands for no record."""


class UsageLogCrashes(RuleBasedStateMachine):
    """Requests run, the store fails sometimes, and the process dies before any line of the code.

    A death copies the files as they are at that line and keeps the store's records of that time. The next process
    continues with the copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.small_tables = mock.patch.multiple(
            usage_log, SLOTS_PER_TABLE=6, MIN_SPARE_SLOTS=2, DRAIN_BATCH_RECORDS=3
        )
        self.small_tables.start()
        self.root = Path(tempfile.mkdtemp())
        self.deaths = 0
        self.log = self.open_log()
        self.request_count = 0
        self.running: dict[str, tuple[UsageSlot, TokenCounts]] = {}
        self.ended: dict[str, Outcomes] = {}
        self.store: dict[str, Outcome] = {}
        self.store_at_death: dict[str, Outcome] = {}

    def open_log(self) -> UsageLog:
        return UsageLog(self.root / str(self.deaths), clock=lambda: NOW)

    def teardown(self) -> None:
        try:
            self.drain()
            assert self.log.pending_records == 0
            for request, outcomes in self.ended.items():
                assert self.store.get(request) in outcomes
            assert set(self.store) <= set(self.ended)
        finally:
            self.log.close()
            self.small_tables.stop()
            shutil.rmtree(self.root)

    @rule()
    def begin(self) -> None:
        self.request_count += 1
        request = f"r{self.request_count}"
        slot = self.log.allocate_slot(new_record(request), RATES)
        self.running[request] = slot, (0, 0, 0)

    @rule(index=st.integers(0, 50), counts=st.tuples(*[st.integers(1, 2**40)] * 3))
    @precondition(lambda self: self.running)
    def count(self, index: int, counts: TokenCounts) -> None:
        request = self.select_running(index)
        slot, _ = self.running[request]
        slot.set_counts(TokenUsage(*counts))
        self.running[request] = slot, counts

    @rule(index=st.integers(0, 50))
    @precondition(lambda self: self.running)
    def finish(self, index: int) -> None:
        request = self.select_running(index)
        slot, counts = self.running.pop(request)
        slot.finish("completed", "there", NOW)
        self.ended[request] = {("completed", counts)}

    @rule()
    def drain(self) -> None:
        self.log.drain(self.add_to_store)

    @rule(has_stored=st.booleans())
    def drain_with_store_failure(self, has_stored: bool) -> None:
        def fail(records: list[UsageRecord]) -> None:
            if has_stored:
                self.add_to_store(records)
            raise OSError("down")

        if self.log.pending_records:
            with pytest.raises(OSError, match="down"):
                self.log.drain(fail)

    @rule(
        line=st.integers(1, 60),
        operation=st.sampled_from(["begin", "count", "finish", "drain"]),
        index=st.integers(0, 50),
        counts=st.tuples(*[st.integers(1, 2**40)] * 3),
    )
    def die(self, line: int, operation: str, index: int, counts: TokenCounts) -> None:
        operations: dict[str, Callable[[], None]] = {"begin": self.begin, "drain": self.drain}
        if self.running:
            operations["count"] = lambda: self.count(index, counts)
            operations["finish"] = lambda: self.finish(index)
        before = self.possible_outcomes()
        hook = LineHook(line, self.copy_state)
        hook.trace(operations.get(operation, self.begin))
        after = self.possible_outcomes()
        if hook.has_run:
            after = {
                request: outcomes_during(before.get(request, {None}), outcomes)
                for request, outcomes in after.items()
            }
        else:
            self.copy_state()
        self.log.close()
        self.deaths += 1
        self.ended, self.store, self.running = after, self.store_at_death, {}
        self.log = self.open_log()
        for recovered in self.log.recover():
            assert recovered.status == "interrupted"
            assert recovered.ended_at == NOW
            assert outcome(recovered) in self.ended[recovered.request]

    def select_running(self, index: int) -> str:
        return list(self.running)[index % len(self.running)]

    def possible_outcomes(self) -> dict[str, Outcomes]:
        """Return the outcomes of all requests if the process dies now."""
        interrupted: dict[str, Outcomes] = {
            request: {("interrupted", counts)} for request, (_, counts) in self.running.items()
        }
        return self.ended | interrupted

    def copy_state(self) -> None:
        shutil.copytree(self.root / str(self.deaths), self.root / str(self.deaths + 1))
        self.store_at_death = dict(self.store)

    def add_to_store(self, records: list[UsageRecord]) -> None:
        for record in records:
            assert self.store.setdefault(record.request, outcome(record)) == outcome(record)


def outcomes_during(before: Outcomes, after: Outcomes) -> Outcomes:
    """Return the outcomes of a death during a change, whose words are written in order."""
    outcomes = before | after
    for old in before:
        for new in after:
            if old is not None and new is not None:
                for written in range(4):
                    outcomes.add((old[0], new[1][:written] + old[1][written:]))  # type: ignore[arg-type]
    return outcomes


TestUsageLogCrashes = UsageLogCrashes.TestCase
TestUsageLogCrashes.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


# --- records -------------------------------------------------------------------------------------


@given(
    request=st.text(max_size=160),
    user=st.text(max_size=2000),
    asked=st.text(max_size=500),
    replica=st.text(max_size=500),
)
@example(request="r" * 160, user="u" * 2000, asked="a" * 100, replica="here")
@settings(deadline=None, max_examples=20)
def test_record_with_any_text_is_readable_and_names_its_request(
    request: str, user: str, asked: str, replica: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = UsageLog(Path(folder))
        record = new_record(request, user=user, organisation="o" * 200, asked=asked)
        log.allocate_slot(record).finish("failed", replica, NOW)
        (stored,) = drain(log)
        log.close()
    encoded = encode(request)
    if len(encoded) <= 160:
        assert stored.request == encoded.decode()
    for given_text, stored_text in ((user, stored.user), (asked, stored.asked)):
        assert encode(given_text).startswith(stored_text.encode()[:85])
        assert len(stored_text.encode()) >= min(85, len(encode(given_text)))


def encode(text: str) -> bytes:
    return text.replace("\0", "").encode("utf-8", "replace")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[UsageLog]:
    with closing(UsageLog(tmp_path)) as opened:
        yield opened


def test_reused_slot_has_no_data_of_the_previous_request(tmp_path: Path) -> None:
    first = UsageLog(tmp_path)
    slot = first.allocate_slot(new_record("before"), RATES)
    slot.set_counts(TokenUsage(100, 40, 7))
    slot.finish("completed", "", NOW, findings="input email redact 1")
    (record,) = drain(first)
    assert record.findings == "input email redact 1"
    first.allocate_slot(new_record("again"), RATES)
    first.close()
    second = UsageLog(tmp_path)
    (recovered,) = second.recover()
    assert (recovered.request, outcome(recovered)) == ("again", ("interrupted", (0, 0, 0)))
    assert recovered.findings == ""
    second.close()


@pytest.mark.parametrize("replica", ["chat-1-0", "r" * 300, "http://[::1]:8001"])
@pytest.mark.parametrize("digest", ["", "sha256:" + "a" * 64])
def test_replica_and_digest_share_their_space(log: UsageLog, replica: str, digest: str) -> None:
    log.allocate_slot(new_record("r"), RATES).finish("completed", replica, NOW, digest)
    (record,) = drain(log)
    assert record.digest == digest
    assert len(record.replica) >= min(len(replica), 56)
    assert replica.startswith(record.replica)


def test_native_counter_is_included_and_the_price_is_capped(log: UsageLog) -> None:
    slot = log.allocate_slot(new_record("r"), Rates(1 << 40, 1 << 40, 1 << 40))
    slot.set_counts(TokenUsage(1 << 40))
    ctypes.c_int64.from_address(slot.output_counter_address).value += 9
    slot.finish("completed", "", NOW)
    (record,) = drain(log)
    assert (record.output_tokens, record.nano_dollars) == (9, (1 << 63) - 1)


def test_records_that_the_store_rejects_are_synced_to_disk(log: UsageLog) -> None:
    log.allocate_slot(new_record("r")).finish("completed", "", NOW)

    def fail(_: object) -> None:
        raise OSError("down")

    with mock.patch("os.fdatasync") as fdatasync, pytest.raises(OSError, match="down"):
        log.drain(fail)
    assert fdatasync.called
    log.drain(lambda _: None)


@pytest.mark.parametrize("letter", ["u", "\u00fc", "\0u"])
def test_texts_around_the_maximum_size_are_complete_or_cut(log: UsageLog, letter: str) -> None:
    users = [letter * size + "." * odd for size in range(190, 520) for odd in (0, 1)]
    slots = [
        log.allocate_slot(new_record(f"r{number}", user=user, key="k" * 300))
        for number, user in enumerate(users)
    ]
    for slot in slots:
        slot.finish("completed", f"there {'r' * 200}", NOW, findings="input card mask 3; a b c 1")
    records = drain(log)
    assert [record.request for record in records] == [f"r{number}" for number in range(len(users))]
    for user, record in zip(users, records, strict=True):
        plain = user.replace("\0", "")
        fits = len(f"{record.request}{plain}{'k' * 300}m".encode()) + 7 <= 800
        assert record.user == (plain if fits else record.user[:90])
        assert plain.startswith(record.user.rstrip("\ufffd"))
        assert record.findings in {"input card mask 3; a b c 1", "input card mask 3", ""}
        assert record.replica.startswith("there r")
        assert (record.model, record.asked, record.route) == ("m", "", "")


# --- recovery ------------------------------------------------------------------------------------


def test_shared_folder_records_are_recovered_after_their_owner_died(tmp_path: Path) -> None:
    first, second = (UsageLog(tmp_path, clock=lambda: NOW) for _ in range(2))
    first.allocate_slot(new_record("a")).set_counts(TokenUsage(5, 0, 1))
    first.allocate_slot(new_record("b")).finish("completed", "", NOW)
    assert second.recover() == []
    assert second.pending_records == 0
    first.close()
    assert [record.request for record in second.recover()] == ["a"]
    recovered = {record.request: (record.status, record.input_tokens) for record in drain(second)}
    assert recovered == {"a": ("interrupted", 5), "b": ("completed", 0)}
    second.close()
    assert not list(tmp_path.glob("*.usage"))


def test_recovery_without_memory_can_be_repeated(tmp_path: Path) -> None:
    dead, log = UsageLog(tmp_path), UsageLog(tmp_path)
    dead.allocate_slot(new_record("a"))
    dead.close()
    no_memory = OSError(errno.ENOMEM, "Cannot allocate memory")
    with mock.patch("mmap.mmap", side_effect=no_memory), pytest.raises(OSError):  # noqa: PT011
        log.recover()
    assert [record.request for record in log.recover()] == ["a"]
    log.close()


@pytest.mark.parametrize(("is_drained", "ended_at"), [(True, NOW + 60), (False, NOW)])
def test_interrupted_record_ends_when_its_owner_was_last_active(
    tmp_path: Path, is_drained: bool, ended_at: float
) -> None:
    clock = FakeClock(NOW)
    first = UsageLog(tmp_path, clock=clock)
    first.allocate_slot(new_record("a"))
    first.allocate_slot(new_record("ended")).finish("completed", "", NOW)
    clock.now += 60
    if is_drained:
        first.drain(lambda _: None)
    first.close()
    clock.now += 5000
    second = UsageLog(tmp_path, clock=clock)
    with capture_logs() as events:
        assert [record.ended_at for record in second.recover()] == [ended_at]
    logged = [(event["event"], event["interrupted"]) for event in events]
    assert logged == [("usage_recovered", 1)]
    assert len(drain(second)) == (1 if is_drained else 2), "a drained record is not repeated"
    second.close()


# --- damaged files -------------------------------------------------------------------------------


def test_torn_record_affects_no_other(tmp_path: Path) -> None:
    first = UsageLog(tmp_path)
    for name in ("torn by the power failure", "intact"):
        first.allocate_slot(new_record(name)).set_counts(TokenUsage(1, 0, 1))
    first.close()
    (file,) = tmp_path.glob("*.usage")
    file.write_bytes(file.read_bytes().replace(b"torn by", b"\0\0\0\0\0\0\0"))
    second = UsageLog(tmp_path)
    with capture_logs() as events:
        assert [record.request for record in second.recover()] == ["intact"]
    assert [event["event"] for event in events] == ["usage_record_unreadable", "usage_recovered"]
    second.close()


DAMAGED_WORDS = [
    *((0, 99), (0, -1), (3, -5), (8, -1), (9, 0), (10, -1), (11, 1 << 40)),
    *((word, value) for word in range(1, 7) for value in (1 << 62, -(1 << 63))),
]
"""Positions of words in a slot, and values that they never hold."""


def test_records_with_a_damaged_word_do_not_prevent_others(tmp_path: Path) -> None:
    words = [(word, struct.pack("=q", value)) for word, value in DAMAGED_WORDS]
    words += [(word, struct.pack("=d", at)) for word in (7, 8) for at in (math.nan, YEAR_10000)]
    words.append((9, bytes(16)))  # the checksum of an empty text, and its size
    first = UsageLog(tmp_path / "usage")
    for name in [*(f"damaged{number:02}" for number in range(len(words))), "intact"]:
        slot = first.allocate_slot(new_record(name), RATES)
        slot.set_counts(TokenUsage(4, 2, 2))
        slot.finish("completed", "here", NOW)
    first.close()
    (file,) = tmp_path.glob("usage/*.usage")
    content = bytearray(file.read_bytes())
    for number, (word, value) in enumerate(words):
        found = content.index(b"damaged%02d" % number)
        position = found // SLOT_BYTES * SLOT_BYTES + word * 8
        content[position : position + len(value)] = value
    file.write_bytes(content)
    second = UsageLog(tmp_path / "usage")
    store = open_migrated_store(f"sqlite:///{tmp_path}/store.db")
    second.recover()
    second.drain(store.ledger.add_records)
    requests = [record.request for page in store.ledger.iter_records() for record in page]
    assert "intact" in requests
    assert second.pending_records == 0
    assert "intact" in "".join(store.ledger.export_csv())
    assert store.ledger.report(["day"])
    store.close()
    second.close()


@pytest.mark.parametrize("size", [8, 100, SLOT_BYTES, SLOT_BYTES + 8])
def test_truncated_file_is_reported(tmp_path: Path, size: int) -> None:
    first = UsageLog(tmp_path)
    first.allocate_slot(new_record("lost"))
    first.close()
    (file,) = tmp_path.glob("*.usage")
    file.write_bytes(file.read_bytes()[:size])
    second = UsageLog(tmp_path)
    with pytest.raises(UsageLogError, match=rf"{file.name} .*move the file away"):
        second.recover()
    second.close()


def test_empty_files_are_removed_and_unknown_formats_reported(tmp_path: Path) -> None:
    empty = tmp_path / "0.usage"
    empty.touch()
    log = UsageLog(tmp_path)
    assert log.recover() == []
    assert not empty.exists()
    (tmp_path / "1.usage").write_bytes(b"something else")
    with pytest.raises(UsageLogError, match=r"1\.usage holds usage that this version"):
        log.recover()
    log.close()


def test_unusable_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageLogError, match="Choose a writable folder"):
        UsageLog(tmp_path / "file" / "usage")


# --- full disks and files ------------------------------------------------------------------------


def begin_requests(log: UsageLog, count: int, first: int = 0) -> list[UsageSlot]:
    return [log.allocate_slot(new_record(str(first + n)), RATES) for n in range(count)]


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
    lost = events[-1]
    assert (lost["event"], lost["log_level"], lost["rows"]) == (
        "usage_lost",
        "error",
        TABLE_RECORDS,
    )


def test_spare_table_is_created_before_it_is_needed_and_removed_after(
    log: UsageLog, tmp_path: Path
) -> None:
    (first,) = tmp_path.glob("*.usage")
    assert first.stat().st_mode & 0o777 == 0o600
    for _ in range(2):
        log.drain(lambda _: None)
        assert list(tmp_path.glob("*.usage")) == [first]
    open_files = open_file_count()
    slots = begin_requests(log, TABLE_RECORDS)
    for _ in range(2):
        log.drain(lambda _: None)
        assert len(list(tmp_path.glob("*.usage"))) == 2
    with mock.patch("os.posix_fallocate", side_effect=DISK_FULL):
        slots += begin_requests(log, TABLE_RECORDS, TABLE_RECORDS)
    assert log.unpersisted_records == 0
    for slot in slots:
        slot.finish("completed", "", NOW)
    requests = {record.request for record in drain(log)}
    log.drain(lambda _: None)
    assert len(requests) == len(slots)
    assert open_file_count() == open_files
    assert len(list(tmp_path.glob("*.usage"))) == 1


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
    assert (tmp_path / "usage").stat().st_mode & 0o777 == 0o700
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
