"""Minutes of all scopes in an SQLite file, which outlive the process: an open hour as rows, closed hours as blobs."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import sqlite3
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from argosy.series.frame import SeriesFrame
from argosy.series.recorder import MINUTE_S, MinuteRow, Step
from argosy.series.schema import SCHEMAS, Schema, scope_kind

HOUR_S = 3600
DAY_S = 86400

_TABLES = """
CREATE TABLE IF NOT EXISTS minutes (scope TEXT, minute INTEGER, data BLOB, PRIMARY KEY (scope, minute)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS hours (hour INTEGER, scope TEXT, data BLOB, PRIMARY KEY (scope, hour)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS hours_by_time ON hours (hour);
"""


class _Block(msgspec.Struct, array_like=True):
    """Consecutive or sparse minutes of one scope as stored. Names make it readable for later versions."""

    columns: Sequence[str]
    histogram_names: Sequence[str]
    minutes: list[int]
    """Minutes since the epoch."""
    steps: list[Step]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Block).decode


@dataclass(slots=True)
class ArchivedSeries:
    """Minutes of one scope."""

    blocks: list[_Block] = field(default_factory=list)

    @property
    def first_minute(self) -> float:
        """The first minute since the epoch; infinite without any."""
        return min((minute for block in self.blocks for minute in block.minutes), default=math.inf)

    def to_frame(self, schema: Schema, start: int, minutes: int) -> SeriesFrame:
        """Return the minutes from `start` on. Columns that an earlier version did not store are NaN."""
        frame = SeriesFrame.empty(schema, start, MINUTE_S, minutes, schema.histograms)
        first = start // MINUTE_S
        for block in self.blocks:
            known = [name for name in schema.columns if name in block.columns]
            sources = np.array([block.columns.index(name) for name in known])
            targets = np.array([schema.columns.index(name) for name in known])
            numbers = np.array(block.minutes) - first
            inside = np.flatnonzero((numbers >= 0) & (numbers < minutes))
            values = np.array([step.values for step in block.steps], dtype=np.float64)
            frame.values[np.ix_(numbers[inside], targets)] = values[np.ix_(inside, sources)]
            frame.covered_s[numbers[inside]] = np.array([s.covered_s for s in block.steps])[inside]
            for index, name in enumerate(block.histogram_names):
                if name in frame.histograms:
                    parts = frame.histograms[name]
                    for row in inside.tolist():
                        parts[numbers[row]] = block.steps[row].histograms[index]
        return frame


class SeriesArchive:
    """SQLite file with the minutes of one gateway. Thread-safe, but calls block on the disk.

    A second file is locked, so that two gateways never write to the same one, and a backup can read it.
    """

    def __init__(self, path: Path, keep_days: float) -> None:
        """Open or create the file.

        Args:
            path: File. Missing folders are created.
            keep_days: Age in days at which minutes are deleted.

        Raises:
            OSError: The folder cannot be created.
            sqlite3.Error: The file cannot be opened, or another process uses it.
        """
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._keep_s = keep_days * DAY_S
        self._lock = threading.Lock()
        with contextlib.ExitStack() as cleanup:
            self._lock_file = os.open(
                f"{path}-lock", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
            cleanup.callback(os.close, self._lock_file)
            try:
                fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise sqlite3.OperationalError("the file is locked by another process") from error
            self._connection = sqlite3.connect(
                path, timeout=1.0, isolation_level=None, check_same_thread=False
            )
            cleanup.callback(self._connection.close)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.executescript(f"BEGIN IMMEDIATE; {_TABLES} COMMIT;")
            cleanup.pop_all()

    def write(self, minutes: Iterable[MinuteRow]) -> None:
        """Write complete minutes. Hours that are over are compressed, and old ones are deleted.

        Raises:
            sqlite3.Error: The file cannot be written. Nothing was changed.
        """
        rows = list(minutes)
        if not rows:
            return
        open_hour = max(row.start for row in rows) // HOUR_S
        with self._lock, self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany(
                "INSERT OR REPLACE INTO minutes VALUES (?, ?, ?)",
                [
                    (row.scope, row.start // MINUTE_S, _encode(self._add_to_stored(row)))
                    for row in rows
                ],
            )
            self._close_hours(open_hour)

    def _add_to_stored(self, row: MinuteRow) -> _Block:
        """Return the minute, with what an earlier process has stored of it."""
        block = _to_block(row)
        stored = self._connection.execute(
            "SELECT data FROM minutes WHERE scope = ? AND minute = ?",
            (row.scope, row.start // MINUTE_S),
        ).fetchone()
        earlier = None if stored is None else _decode(stored[0])
        if earlier is not None and _is_same_shape(earlier, block):
            block.steps = [_add_steps(earlier.steps[0], row.step, SCHEMAS[scope_kind(row.scope)])]
        return block

    def _close_hours(self, open_hour: int) -> None:
        """Replace the minute rows of the hours before `open_hour` by one blob per scope and hour."""
        first_open_minute = open_hour * HOUR_S // MINUTE_S
        closed = self._connection.execute(
            "SELECT scope, minute, data FROM minutes WHERE minute < ? ORDER BY scope, minute",
            (first_open_minute,),
        ).fetchall()
        if not closed:
            return
        hours: defaultdict[tuple[str, int], list[_Block]] = defaultdict(list)
        for scope, minute, data in closed:
            hours[scope, minute * MINUTE_S // HOUR_S].append(_decode(data))
        self._connection.executemany(
            "INSERT OR REPLACE INTO hours VALUES (?, ?, ?)",
            (
                (hour, scope, zlib.compress(_encode(_join(blocks))))
                for (scope, hour), blocks in hours.items()
            ),
        )
        self._connection.execute("DELETE FROM minutes WHERE minute < ?", (first_open_minute,))
        oldest_hour = open_hour - int(self._keep_s // HOUR_S)
        self._connection.execute("DELETE FROM hours WHERE hour < ?", (oldest_hour,))

    def read(self, scope: str, start: int, end: int) -> ArchivedSeries:
        """Return the minutes of a scope from `start` until before `end`, in seconds since the epoch.

        Raises:
            sqlite3.Error: The file cannot be read.
        """
        with self._lock:
            hours = self._connection.execute(
                "SELECT data FROM hours WHERE scope = ? AND hour BETWEEN ? AND ?",
                (scope, start // HOUR_S, (end - 1) // HOUR_S),
            ).fetchall()
            minutes = self._connection.execute(
                "SELECT data FROM minutes WHERE scope = ? AND minute BETWEEN ? AND ?",
                (scope, start // MINUTE_S, (end - 1) // MINUTE_S),
            ).fetchall()
        blocks = [_decode(zlib.decompress(data)) for (data,) in hours]
        return ArchivedSeries([*blocks, *(_decode(data) for (data,) in minutes)])

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()
            os.close(self._lock_file)


def _to_block(row: MinuteRow) -> _Block:
    schema = SCHEMAS[scope_kind(row.scope)]
    return _Block(schema.columns, schema.histograms, [row.start // MINUTE_S], [row.step])


def _join(blocks: Sequence[_Block]) -> _Block:
    """Join the minutes of an hour. Minutes of another version have other columns, and only the latest ones are kept."""
    last = blocks[-1]
    same = [block for block in blocks if _is_same_shape(block, last)]
    return _Block(
        last.columns,
        last.histogram_names,
        [minute for block in same for minute in block.minutes],
        [step for block in same for step in block.steps],
    )


def _is_same_shape(one: _Block, other: _Block) -> bool:
    return list(one.columns) == list(other.columns) and list(one.histogram_names) == list(
        other.histogram_names
    )


def _add_steps(earlier: Step, later: Step, schema: Schema) -> Step:
    """Add two parts of one minute. Gauges are those of the later part."""
    counters = len(schema.counters)
    added = [a + b for a, b in zip(earlier.values[:counters], later.values, strict=False)]
    return Step(
        [*added, *later.values[counters:]],
        [a + b for a, b in zip(earlier.histograms, later.histograms, strict=True)],
        min(MINUTE_S, earlier.covered_s + later.covered_s),
    )
