"""The journal of usage on this machine: each request's row in a mapped file, until the store has it.

Requests never wait for the database. A request takes a slot when it begins, counts into it in place while it
is answered, and ends it; a worker thread brings what ended to the store and frees the slots. The pages belong
to the kernel, so a process that is killed at any instant leaves every slot as it was: free, running or ended,
and no request has two rows or none. Whoever finds a dead owner's file finishes its work. What ended is
offered to the store (again, perhaps: the store knows its rows by their request); what ran becomes a row
"interrupted" with what it had counted.

Each file is locked by its owner. So all gateways of a machine may share a folder, and any of them takes over
what another left.

Power failures are another matter. Rows that the store has are as safe as the store; while it takes none, what
ended is synced to the disk at each try. What runs at that moment is as old there as the kernel's last
write-back.

When the disk is full, requests go on, and memory takes the place of files: up to `MEMORY_TABLES`, and told in
the log. So are rows that are lost there, when neither the store nor the disk has had room for them until the end.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog

from argosy.policy import NO_CHARGE, Rates
from argosy.store.records import UsageRecord
from argosy.store.usage_slots import (
    FREE,
    RUNNING,
    SLOT_BYTES,
    UsageSlot,
    UsageSlotTable,
    is_valid_time,
)

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.store")

SLOTS_PER_TABLE = 4096
"""Of a new table."""
MIN_SPARE_SLOTS = 1024
"""With fewer free slots than this, another table is made before it is needed."""
MAX_MEMORY_TABLES = 16
DRAIN_BATCH_RECORDS = 500
"""Rows that the store is given at a time."""
MAGIC = int.from_bytes(b"argosy\x00\x02")
PREVIOUS_MAGIC = int.from_bytes(b"argosy\x00\x01")
"""Of a file whose texts may be fewer: see `Slot.row`."""


class UsageLogError(ValueError):
    """The journal cannot be kept where it should be; the message says what to change."""


class UsageLogFullError(Exception):
    """Neither the disk nor memory has room for one more row."""


class UsageLog:
    """The tables of one process. Requests begin and end on one thread; one other may recover and drain."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """Keep tables in `folder`. Raises SpoolError when it cannot be used."""
        self._folder = folder
        self._clock = clock
        self._ended_slots: deque[UsageSlot] = deque()
        self._lock = threading.Lock()
        """Over the tables and their free slots."""
        self._tables: list[UsageSlotTable] = []
        """The newest file first; what is in memory comes last."""
        self._is_disk_full = False
        """The disk was, when it was last asked for more."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._lock_folder():
                pass
        except OSError as error:
            message = f"Usage cannot be kept in {folder} ({error.strerror}). Name a folder that can be written."
            raise UsageLogError(message) from error
        self._attach_table(self._create_table())

    @property
    def pending_records(self) -> int:
        """Rows that the store does not have yet."""
        return len(self._ended_slots)

    @property
    def unpersisted_records(self) -> int:
        """Rows, of running requests too, that would not survive this process, since the disk was full."""
        with self._lock:
            return sum(
                table.slot_count - len(table.free_slots) for table in self._find_memory_tables()
            )

    def allocate_slot(self, record: UsageRecord, rates: Rates = NO_CHARGE) -> UsageSlot:
        """A request that was let in: of `row` whose it is and since when, to be paid at `rates`.

        Raises SpoolFullError.
        """
        slot = self._take_free_slot()
        slot.begin(record, rates)
        return slot

    def recover(self) -> list[UsageRecord]:
        """Take over the files of dead owners; the rows of the requests that they were killed in.

        These rows, and all that had ended, are drained like any others. Raises SpoolError or OSError.
        """
        interrupted: list[UsageRecord] = []
        with self._lock_folder():
            for path in sorted(self._folder.glob("*.usage")):
                table = _open_abandoned_file(path)
                if table is not None:
                    interrupted += self._adopt_table(table)
        if interrupted:
            log.warning(
                "usage_recovered", interrupted=len(interrupted), waiting=self.pending_records
            )
        return interrupted

    def drain(self, write_records: Callable[[list[UsageRecord]], object]) -> int:
        """Give what has ended to `into`, which knows the rows that it has by their request; how many were given.

        What `into` raises is passed on, and the rows are kept for the next time.
        """
        self._maintain_tables()
        given, waiting = 0, len(self._ended_slots)
        while given < waiting:
            slots = [
                self._ended_slots.popleft()
                for _ in range(min(DRAIN_BATCH_RECORDS, waiting - given))
            ]
            try:
                write_records([slot.read_record() for slot in slots])
            except BaseException:
                self._ended_slots.extendleft(reversed(slots))
                for table in self._tables:
                    table.sync()
                raise
            with self._lock:
                for slot in slots:
                    slot.release()
                    slot.table.free_slots.append(slot)
            given += len(slots)
        return given

    def close(self) -> None:
        """Let go of everything. Files that still hold rows are for whoever recovers them; rows in memory are lost."""
        lost = self.unpersisted_records
        if lost:
            log.error("usage_lost", rows=lost, folder=str(self._folder), reason="the disk is full")
        with self._lock:
            tables, self._tables = self._tables, []
        for table in tables:
            self._remove_table(table) if table.is_idle else table.close()

    # --- tables ----------------------------------------------------------------------------------

    def _take_free_slot(self) -> UsageSlot:
        while True:
            with self._lock:
                for table in self._tables:
                    if table.free_slots:
                        return table.free_slots.pop()
            self._attach_table(self._create_table())

    def _attach_table(self, table: UsageSlotTable) -> None:
        with self._lock:
            self._tables.insert(0 if table.path is not None else len(self._tables), table)

    def _create_table(self) -> UsageSlotTable:
        """An empty table, in memory if need be. Raises SpoolFullError."""
        table = self._create_file_table()
        if table is not None:
            return table
        if len(self._find_memory_tables()) >= MAX_MEMORY_TABLES:
            raise UsageLogFullError
        return self._initialize_table(UsageSlotTable(mmap.mmap(-1, SLOTS_PER_TABLE * SLOT_BYTES)))

    def _create_file_table(self) -> UsageSlotTable | None:
        """An empty table in a file; None when the disk is full."""
        path = self._folder / f"{uuid.uuid4().hex}.usage"
        try:
            with self._lock_folder():
                table = self._initialize_table(_create_file(path))
        except OSError as error:
            if not self._is_disk_full:
                reason = error.strerror
                log.error("usage_log_disk_full", folder=str(self._folder), reason=reason)  # noqa: TRY400 - the reason says it
            self._is_disk_full = True
            return None
        if self._is_disk_full:
            log.info("usage_log_disk_recovered", folder=str(self._folder))
        self._is_disk_full = False
        return table

    def _initialize_table(self, table: UsageSlotTable) -> UsageSlotTable:
        table.owner_alive_at = self._clock()
        table.words[0] = MAGIC
        table.free_slots = [
            UsageSlot(table, number, self._ended_slots) for number in range(table.slot_count, 0, -1)
        ]
        return table

    def _adopt_table(self, table: UsageSlotTable) -> list[UsageRecord]:
        """Finish what a dead owner left; the rows that were running."""
        table.words[0] = MAGIC  # what begins in it from now on is for no older version
        interrupted = []
        died_at = table.owner_alive_at if is_valid_time(table.owner_alive_at) else self._clock()
        for number in range(table.slot_count, 0, -1):
            slot = UsageSlot(table, number, self._ended_slots)
            if slot.state != FREE and not slot.is_intact:
                log.error("usage_record_unreadable", file=str(table.path), slot=number)
                slot.release()
            if slot.state == FREE:
                table.free_slots.append(slot)
            elif slot.state == RUNNING:
                slot.finish("interrupted", "", died_at)
                interrupted.append(slot.read_record())
            else:
                self._ended_slots.append(slot)
        self._attach_table(table)
        return interrupted

    def _maintain_tables(self) -> None:
        """Show that the owner lives, and keep as many tables as are needed."""
        now, spare, unused = self._clock(), 0, []
        with self._lock:
            for table in self._tables:
                table.owner_alive_at = now
                if table.is_idle and spare >= MIN_SPARE_SLOTS:
                    unused.append(table)
                elif table.path is not None:
                    spare += len(table.free_slots)
            self._tables = [table for table in self._tables if table not in unused]
        for table in unused:
            self._remove_table(table)
        if spare < MIN_SPARE_SLOTS:
            made = self._create_file_table()
            if made is not None:
                self._attach_table(made)

    def _remove_table(self, table: UsageSlotTable) -> None:
        try:
            with self._lock_folder():
                table.remove()
        except FileNotFoundError:
            table.close()  # somebody has removed the folder

    def _find_memory_tables(self) -> list[UsageSlotTable]:
        return [table for table in self._tables if table.path is None]

    @contextlib.contextmanager
    def _lock_folder(self) -> Iterator[None]:
        """Meanwhile nobody else makes files in the folder, takes them over or removes them."""
        with (self._folder / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _create_file(path: Path) -> UsageSlotTable:
    """A table in a new file, whose blocks are on the disk: writing to it cannot fail. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(file, 0, SLOTS_PER_TABLE * SLOT_BYTES)
        return UsageSlotTable(mmap.mmap(file, SLOTS_PER_TABLE * SLOT_BYTES), path, file)
    except BaseException:
        os.close(file)
        path.unlink()
        raise


def _open_abandoned_file(path: Path) -> UsageSlotTable | None:
    """The table in a dead process's file. None: its owner lives, or died before there was anything in it.

    Raises SpoolError when the file is none of ours.
    """
    with contextlib.ExitStack() as failing:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        failing.callback(os.close, file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        magic = int.from_bytes(os.pread(file, 8, 0), sys.byteorder)
        size = os.fstat(file).st_size
        if magic in {MAGIC, PREVIOUS_MAGIC} and size > SLOT_BYTES and size % SLOT_BYTES == 0:
            table = UsageSlotTable(mmap.mmap(file, size), path, file)
            failing.pop_all()
            return table
    if magic:
        raise UsageLogError(
            f"{path} holds usage that this version of Argosy cannot read. Start the version that wrote"
            " it once more, or move the file away."
        )
    path.unlink()
    return None
