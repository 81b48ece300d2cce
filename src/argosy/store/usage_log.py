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
from argosy.store.records import UsageRow
from argosy.store.usage_slots import FREE, RUNNING, SLOT_BYTES, Slot, Table, is_time

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.store")

SLOTS = 4096
"""Of a new table."""
SPARE = 1024
"""With fewer free slots than this, another table is made before it is needed."""
MEMORY_TABLES = 16
BATCH = 500
"""Rows that the store is given at a time."""
MAGIC = int.from_bytes(b"argosy\x00\x02")
BEFORE = int.from_bytes(b"argosy\x00\x01")
"""Of a file whose texts may be fewer: see `Slot.row`."""


class SpoolError(ValueError):
    """The journal cannot be kept where it should be; the message says what to change."""


class SpoolFullError(Exception):
    """Neither the disk nor memory has room for one more row."""


class Spool:
    """The tables of one process. Requests begin and end on one thread; one other may recover and drain."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """Keep tables in `folder`. Raises SpoolError when it cannot be used."""
        self._folder = folder
        self._clock = clock
        self._ended: deque[Slot] = deque()
        self._lock = threading.Lock()
        """Over the tables and their free slots."""
        self._tables: list[Table] = []
        """The newest file first; what is in memory comes last."""
        self._full = False
        """The disk was, when it was last asked for more."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._alone():
                pass
        except OSError as error:
            message = f"Usage cannot be kept in {folder} ({error.strerror}). Name a folder that can be written."
            raise SpoolError(message) from error
        self._attach(self._make())

    @property
    def waiting(self) -> int:
        """Rows that the store does not have yet."""
        return len(self._ended)

    @property
    def in_memory(self) -> int:
        """Rows, of running requests too, that would not survive this process, since the disk was full."""
        with self._lock:
            return sum(table.size - len(table.free) for table in self._in_memory())

    def begin(self, row: UsageRow, rates: Rates = NO_CHARGE) -> Slot:
        """A request that was let in: of `row` whose it is and since when, to be paid at `rates`.

        Raises SpoolFullError.
        """
        slot = self._take()
        slot.begin(row, rates)
        return slot

    def recover(self) -> list[UsageRow]:
        """Take over the files of dead owners; the rows of the requests that they were killed in.

        These rows, and all that had ended, are drained like any others. Raises SpoolError or OSError.
        """
        interrupted: list[UsageRow] = []
        with self._alone():
            for path in sorted(self._folder.glob("*.usage")):
                table = _take_over(path)
                if table is not None:
                    interrupted += self._adopt(table)
        if interrupted:
            log.warning("usage_recovered", interrupted=len(interrupted), waiting=self.waiting)
        return interrupted

    def drain(self, into: Callable[[list[UsageRow]], object]) -> int:
        """Give what has ended to `into`, which knows the rows that it has by their request; how many were given.

        What `into` raises is passed on, and the rows are kept for the next time.
        """
        self._tend()
        given, waiting = 0, len(self._ended)
        while given < waiting:
            slots = [self._ended.popleft() for _ in range(min(BATCH, waiting - given))]
            try:
                into([slot.row() for slot in slots])
            except BaseException:
                self._ended.extendleft(reversed(slots))
                for table in self._tables:
                    table.sync()
                raise
            with self._lock:
                for slot in slots:
                    slot.free()
                    slot.table.free.append(slot)
            given += len(slots)
        return given

    def close(self) -> None:
        """Let go of everything. Files that still hold rows are for whoever recovers them; rows in memory are lost."""
        lost = self.in_memory
        if lost:
            log.error("usage_lost", rows=lost, folder=str(self._folder), reason="the disk is full")
        with self._lock:
            tables, self._tables = self._tables, []
        for table in tables:
            self._remove(table) if table.idle else table.close()

    # --- tables ----------------------------------------------------------------------------------

    def _take(self) -> Slot:
        while True:
            with self._lock:
                for table in self._tables:
                    if table.free:
                        return table.free.pop()
            self._attach(self._make())

    def _attach(self, table: Table) -> None:
        with self._lock:
            self._tables.insert(0 if table.path is not None else len(self._tables), table)

    def _make(self) -> Table:
        """An empty table, in memory if need be. Raises SpoolFullError."""
        table = self._make_file()
        if table is not None:
            return table
        if len(self._in_memory()) >= MEMORY_TABLES:
            raise SpoolFullError
        return self._fill(Table(mmap.mmap(-1, SLOTS * SLOT_BYTES)))

    def _make_file(self) -> Table | None:
        """An empty table in a file; None when the disk is full."""
        path = self._folder / f"{uuid.uuid4().hex}.usage"
        try:
            with self._alone():
                table = self._fill(_create(path))
        except OSError as error:
            if not self._full:
                reason = error.strerror
                log.error("usage_kept_in_memory", folder=str(self._folder), reason=reason)  # noqa: TRY400 - the reason says it
            self._full = True
            return None
        if self._full:
            log.info("usage_kept_on_disk", folder=str(self._folder))
        self._full = False
        return table

    def _fill(self, table: Table) -> Table:
        table.alive_at = self._clock()
        table.words[0] = MAGIC
        table.free = [Slot(table, number, self._ended) for number in range(table.size, 0, -1)]
        return table

    def _adopt(self, table: Table) -> list[UsageRow]:
        """Finish what a dead owner left; the rows that were running."""
        table.words[0] = MAGIC  # what begins in it from now on is for no older version
        interrupted = []
        died_at = table.alive_at if is_time(table.alive_at) else self._clock()
        for number in range(table.size, 0, -1):
            slot = Slot(table, number, self._ended)
            if slot.state != FREE and not slot.sound:
                log.error("usage_row_unreadable", file=str(table.path), slot=number)
                slot.free()
            if slot.state == FREE:
                table.free.append(slot)
            elif slot.state == RUNNING:
                slot.end("interrupted", "", died_at)
                interrupted.append(slot.row())
            else:
                self._ended.append(slot)
        self._attach(table)
        return interrupted

    def _tend(self) -> None:
        """Show that the owner lives, and keep as many tables as are needed."""
        now, spare, unused = self._clock(), 0, []
        with self._lock:
            for table in self._tables:
                table.alive_at = now
                if table.idle and spare >= SPARE:
                    unused.append(table)
                elif table.path is not None:
                    spare += len(table.free)
            self._tables = [table for table in self._tables if table not in unused]
        for table in unused:
            self._remove(table)
        if spare < SPARE:
            made = self._make_file()
            if made is not None:
                self._attach(made)

    def _remove(self, table: Table) -> None:
        try:
            with self._alone():
                table.remove()
        except FileNotFoundError:
            table.close()  # somebody has removed the folder

    def _in_memory(self) -> list[Table]:
        return [table for table in self._tables if table.path is None]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Meanwhile nobody else makes files in the folder, takes them over or removes them."""
        with (self._folder / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _create(path: Path) -> Table:
    """A table in a new file, whose blocks are on the disk: writing to it cannot fail. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(file, 0, SLOTS * SLOT_BYTES)
        return Table(mmap.mmap(file, SLOTS * SLOT_BYTES), path, file)
    except BaseException:
        os.close(file)
        path.unlink()
        raise


def _take_over(path: Path) -> Table | None:
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
        if magic in {MAGIC, BEFORE} and size > SLOT_BYTES and size % SLOT_BYTES == 0:
            table = Table(mmap.mmap(file, size), path, file)
            failing.pop_all()
            return table
    if magic:
        raise SpoolError(
            f"{path} holds usage that this version of Argosy cannot read. Start the version that wrote"
            " it once more, or move the file away."
        )
    path.unlink()
    return None
