"""Write-ahead log of usage on the gateway's disk. Records of requests stay in mapped files until the store has them.

Requests never wait for the database. A request allocates a slot when it begins, updates the counts in place while it is
answered, and finishes the slot at its end. A worker thread writes finished records to the store and frees their slots.

The kernel owns the mapped pages, so every slot of a killed process keeps its state: free, running or ended. Each
request therefore has exactly one record. The next process that finds the file of a dead owner completes the work. It
writes ended records to the store, which ignores records of requests that it already has. A running slot becomes a
record with the status `interrupted` and the counts so far.

Each owner locks its files. All gateways of a machine may therefore share a folder, and any of them can adopt the files
of a dead one.

After a power failure the guarantees are weaker. Records in the store are as durable as the store. While the store is
unavailable, ended records are synced to disk at each attempt. Running slots are as old as the kernel's last write-back.

When the disk is full, requests continue, and up to `MAX_MEMORY_TABLES` tables in memory replace files. An error is
logged then. Another error is logged at exit if neither the store nor the disk had room for the records in memory.
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
"""Number of slots of a new table, including the header."""
MIN_SPARE_SLOTS = 1024
"""Number of free slots in files below which another table is created in advance."""
MAX_MEMORY_TABLES = 16
DRAIN_BATCH_RECORDS = 500
"""Maximum number of records written to the store in one call."""
MAGIC = int.from_bytes(b"argosy\x00\x01")


class UsageLogError(ValueError):
    """The usage log cannot use its folder or a file in it. The message says what to change."""


class UsageLogFullError(Exception):
    """Neither the disk nor memory has room for another record."""


class UsageLog:
    """Usage log of one process.

    Slots are allocated and finished on one thread. One other thread may recover and drain.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """Create a table in `folder`. Raises UsageLogError if the folder cannot be used."""
        self._folder = folder
        self._clock = clock
        self._ended_slots: deque[UsageSlot] = deque()
        self._lock = threading.Lock()
        """Protects the tables and their free slots."""
        self._tables: list[UsageSlotTable] = []
        """Tables in files, newest first, then tables in memory."""
        self._is_disk_full = False
        """Whether the last attempt to create a file failed."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._lock_folder():
                pass
        except OSError as error:
            message = f"The usage log cannot be written to {folder} ({error.strerror}). Choose a writable folder."
            raise UsageLogError(message) from error
        self._attach_table(self._create_table())

    @property
    def pending_records(self) -> int:
        """Number of ended records that the store does not have yet."""
        return len(self._ended_slots)

    @property
    def unpersisted_records(self) -> int:
        """Number of records in memory, including running ones, that would be lost if the process died."""
        with self._lock:
            return sum(
                table.slot_count - len(table.free_slots) for table in self._find_memory_tables()
            )

    def allocate_slot(self, record: UsageRecord, rates: Rates = NO_CHARGE) -> UsageSlot:
        """Allocate a slot for an admitted request and mark it running. Raises UsageLogFullError without any room."""
        slot = self._take_free_slot()
        slot.begin(record, rates)
        return slot

    def recover(self) -> list[UsageRecord]:
        """Adopt the files of dead owners. The next `drain` writes their records.

        Returns:
            The records of requests that were running when their owners died.

        Raises:
            UsageLogError: A file has an unknown format.
            OSError: A file cannot be read.
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
        """Write ended records in batches, free their slots, and return their number.

        `write_records` ignores records whose request it already has. If it raises, the exception propagates and the
        records stay for the next call.
        """
        self._maintain_tables()
        written, pending = 0, len(self._ended_slots)
        while written < pending:
            slots = [
                self._ended_slots.popleft()
                for _ in range(min(DRAIN_BATCH_RECORDS, pending - written))
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
            written += len(slots)
        return written

    def close(self) -> None:
        """Close all tables. Files with records stay for a later `recover`. Records in memory are lost and logged."""
        lost_records = self.unpersisted_records
        if lost_records:
            log.error(
                "usage_lost", rows=lost_records, folder=str(self._folder), reason="the disk is full"
            )
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
        """Create an empty table, in memory if the disk is full. Raises UsageLogFullError."""
        table = self._create_file_table()
        if table is not None:
            return table
        if len(self._find_memory_tables()) >= MAX_MEMORY_TABLES:
            raise UsageLogFullError
        return self._initialize_table(UsageSlotTable(mmap.mmap(-1, SLOTS_PER_TABLE * SLOT_BYTES)))

    def _create_file_table(self) -> UsageSlotTable | None:
        """Create an empty table in a file. Returns None if the disk is full."""
        path = self._folder / f"{uuid.uuid4().hex}.usage"
        try:
            with self._lock_folder():
                table = self._initialize_table(_create_file(path))
        except OSError as error:
            if not self._is_disk_full:
                reason = error.strerror
                log.error("usage_log_disk_full", folder=str(self._folder), reason=reason)  # noqa: TRY400 - the reason suffices
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
        """Adopt the table of a dead owner. Returns the records of slots that were running."""
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
        """Update the heartbeat of all tables, remove idle ones and create one if few slots are free."""
        now, spare_slots, unused = self._clock(), 0, []
        with self._lock:
            for table in self._tables:
                table.owner_alive_at = now
                if table.is_idle and spare_slots >= MIN_SPARE_SLOTS:
                    unused.append(table)
                elif table.path is not None:
                    spare_slots += len(table.free_slots)
            self._tables = [table for table in self._tables if table not in unused]
        for table in unused:
            self._remove_table(table)
        if spare_slots < MIN_SPARE_SLOTS:
            created = self._create_file_table()
            if created is not None:
                self._attach_table(created)

    def _remove_table(self, table: UsageSlotTable) -> None:
        try:
            with self._lock_folder():
                table.remove()
        except FileNotFoundError:
            table.close()  # the folder was removed

    def _find_memory_tables(self) -> list[UsageSlotTable]:
        return [table for table in self._tables if table.path is None]

    @contextlib.contextmanager
    def _lock_folder(self) -> Iterator[None]:
        """Hold the folder's lock, so that no other process creates, adopts or removes files meanwhile."""
        with (self._folder / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _create_file(path: Path) -> UsageSlotTable:
    """Create a table in a new file with allocated disk blocks, so that writes cannot fail. Raises OSError."""
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
    """Open the table in the file of a dead process. Raises UsageLogError for an unknown format.

    Returns None if the owner is alive or died before the table was initialized.
    """
    with contextlib.ExitStack() as cleanup:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        cleanup.callback(os.close, file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        magic = int.from_bytes(os.pread(file, 8, 0), sys.byteorder)
        size = os.fstat(file).st_size
        if magic == MAGIC and size > SLOT_BYTES and size % SLOT_BYTES == 0:
            table = UsageSlotTable(mmap.mmap(file, size), path, file)
            cleanup.pop_all()
            return table
    if magic:
        raise UsageLogError(
            f"{path} holds usage that this version of Argosy cannot read. Run the version that wrote it once"
            " more, or move the file away."
        )
    path.unlink()
    return None
