"""Archive of single usage records as Parquet files, which daily sums replace in the ledger.

The files are `usage/organisation=ID/day=DATE/part-SHA256.parquet`, in a folder or an object store. The ledger lists
them, so a file that is not listed does not count. DuckDB writes and reads them in memory, by the extra `cold`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from argosy.extras import install_command
from argosy.model_store import find_file_system
from argosy.store import ALL_USAGE, ColdPart, FocusExport, Ledger, UsageFilter, UsageRecord

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

PART_ROWS = 20_000
"""Most records of a part, which one transaction of the ledger replaces by sums."""
PAGE_ROWS = 1000
PAUSE_S = 0.25
"""Pause after a full part, in which others can write."""
DAY_S = 86_400
_SUMMED = ("input_tokens", "cached_tokens", "output_tokens", "nano_dollars")
_COLUMNS = ", ".join(f'"{name}"' for name in UsageRecord.__struct_fields__)
_CONFIG = {
    "threads": "1",
    "memory_limit": "512MB",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
}
_TYPES: dict[Any, type] = {int: np.int64, float: np.float64}
_DOLLARS = "DECIMAL(38, 9)"
_FOCUS_TYPES = {
    **dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), _DOLLARS),
    **dict.fromkeys(("ConsumedQuantity", "PricingQuantity", "x_AllocatedCost"), _DOLLARS),
    **dict.fromkeys(("BillingPeriodStart", "BillingPeriodEnd"), "TIMESTAMP"),
    **dict.fromkeys(("ChargePeriodStart", "ChargePeriodEnd"), "TIMESTAMP"),
}
"""Types of columns that are no text. Times are in UTC."""
_FILTERED = ("organisation", "project", "key", "user", "model", "asked", "route", "replica")


class UsageArchiveError(ValueError):
    """The archive cannot be used. The message says what to change."""


class UsageArchive:
    """Archive of a ledger. Every call may block for long.

    Methods raise UsageArchiveError, which says what to change.

    Args:
        ledger: The ledger.
        url: A path, or a URL that fsspec or obstore opens, such as `s3://bucket/prefix`.
    """

    def __init__(self, ledger: Ledger, url: str) -> None:
        self._ledger = ledger
        self._url = url
        with _explain_errors(url):
            self._files, root = find_file_system(url)
        self._root = root.rstrip("/")

    def move(self, before: float) -> int:
        """Move the records of whole days that ended before a time into the archive. Returns their number.

        Each part is written, read back and compared. Then one transaction of the ledger lists it and replaces its
        records by daily sums. A record that is added again later counts twice, as after `Ledger.roll_up`.
        """
        moved = 0
        with _open_duckdb(self._url) as (database, scratch):
            while records := self._ledger.read_oldest(before, PART_ROWS):
                part = self._write_part(records, database, scratch)
                # Records that were added to this part meanwhile are read with it the next time.
                if self._ledger.replace_by_part(part, records[-1]):
                    moved += len(records)
                else:
                    self._files.rm_file(f"{self._root}/{part.key}")
                time.sleep(PAUSE_S * len(records) / PART_ROWS)
        return moved

    def iter_records(self, where: UsageFilter = ALL_USAGE) -> Iterator[list[UsageRecord]]:
        """Yield single records in pages: those of the archive, sorted by end time, then those of the ledger."""
        parts: dict[int, list[ColdPart]] = {}
        for part in self._ledger.list_parts(where):
            parts.setdefault(part.day, []).append(part)
        for day in sorted(parts):
            yield from self._iter_day(parts[day], where)
        yield from self._ledger.iter_records(where)

    def _iter_day(
        self, parts: Sequence[ColdPart], where: UsageFilter
    ) -> Iterator[list[UsageRecord]]:
        names = UsageRecord.__struct_fields__
        conditions, values = ["true"], list[object]()
        for name in _FILTERED:
            if getattr(where, name) is not None:
                conditions.append(f'"{name}" = ?')
                values.append(getattr(where, name))
        for limit, comparison in ((where.since, ">="), (where.until, "<")):
            if limit is not None:
                conditions.append(f"ended_at {comparison} ?")
                values.append(limit)
        with _open_duckdb(self._url) as (database, scratch):
            files = [self._fetch(part, scratch / str(at)) for at, part in enumerate(parts)]
            query = f"SELECT {_COLUMNS} FROM read_parquet(?) WHERE {' AND '.join(conditions)}"  # noqa: S608 - own names
            rows = database.execute(f"{query} ORDER BY ended_at, request", [files, *values])
            while page := rows.fetchmany(PAGE_ROWS):
                yield [UsageRecord(**dict(zip(names, row, strict=True))) for row in page]

    def _write_part(
        self, records: Sequence[UsageRecord], database: DuckDBPyConnection, scratch: Path
    ) -> ColdPart:
        """Write records of one organisation and day, and compare what the archive then has."""
        columns: dict[str, np.ndarray[Any, Any]] = {
            field.name: np.array(
                [getattr(each, field.name) for each in records],
                dtype=_TYPES.get(field.type, object),
            )
            for field in msgspec.structs.fields(UsageRecord)
        }
        organisation, day = records[0].organisation, int(records[0].ended_at // DAY_S)
        date = datetime.fromtimestamp(day * DAY_S, UTC).date()
        new = scratch / "new.parquet"
        database.register("part", columns)
        database.execute(
            f"COPY (SELECT {_COLUMNS} FROM part) TO '{new}' (FORMAT parquet, COMPRESSION zstd)"  # noqa: S608 - own names
        ).fetchall()
        sha256, size_bytes = _digest(new)
        part = ColdPart(
            key=f"usage/organisation={organisation}/day={date}/part-{sha256}.parquet",
            organisation=organisation,
            day=day,
            rows=len(records),
            nano_dollars=sum(each.nano_dollars for each in records),
            size_bytes=size_bytes,
            sha256=sha256,
        )
        remote = f"{self._root}/{part.key}"
        self._files.makedirs(remote.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(new), remote)
        stored = self._fetch(part, scratch / "stored.parquet")
        sums = ", ".join(f"sum({name})" for name in _SUMMED)
        query = f"SELECT count(*), {sums} FROM read_parquet(?)"  # noqa: S608 - own names
        (found,) = database.execute(query, [stored]).fetchall()
        expected = (len(records), *(sum(getattr(e, name) for e in records) for name in _SUMMED))
        if found != expected:
            raise UsageArchiveError(
                f"{part.key} reads as {found}, not as {expected}. Nothing was moved. Check the disk of the archive."
            )
        return part

    def _fetch(self, part: ColdPart, path: Path) -> str:
        """Copy a part to a local file, and return its path. Its bytes must be what was written."""
        try:
            self._files.get_file(f"{self._root}/{part.key}", str(path))
        except FileNotFoundError as error:
            raise UsageArchiveError(
                f"{part.key} is not in {self._url}. Give the archive that has it, or restore the file."
            ) from error
        if _digest(path)[0] != part.sha256:
            raise UsageArchiveError(f"{part.key} in {self._url} is damaged. Restore the file.")
        return str(path)


def write_focus_parquet(charges: FocusExport, path: Path) -> None:
    """Write charges in the format of FOCUS to a Parquet file, which appears when it is complete.

    Raises:
        UsageArchiveError: The file cannot be written. The message says what to change.
    """
    names = charges.columns
    types = {name: _FOCUS_TYPES.get(name, "VARCHAR") for name in names}
    columns = ", ".join(f'"{name}" {each}' for name, each in types.items())
    casts = ", ".join(f'CAST("{name}" AS {each})' for name, each in types.items())
    with _open_duckdb(str(path)) as (database, _):
        database.execute(f"CREATE TABLE focus ({columns})")
        for page in charges.iter_pages():
            if page:
                cells = {name: [_to_text(each.get(name)) for each in page] for name in names}
                database.register("page", {k: np.array(v, dtype=object) for k, v in cells.items()})
                database.execute(f"INSERT INTO focus SELECT {casts} FROM page")  # noqa: S608 - own names
        part = path.with_name(f".{path.name}.part")
        try:
            quoted = str(part).replace("'", "''")
            database.execute(
                f"COPY focus TO '{quoted}' (FORMAT parquet, COMPRESSION zstd)"
            ).fetchall()
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def _to_text(cell: str | int | None) -> str | None:
    return None if cell is None else str(cell)


@contextmanager
def _explain_errors(url: str) -> Iterator[None]:
    try:
        yield
    except ValueError:  # has a message with a remedy
        raise
    except ImportError as error:
        remedy = install_command("cold")
        raise UsageArchiveError(f"Parquet needs DuckDB: {remedy}") from error
    except Exception as error:  # each file system has its own
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise UsageArchiveError(
            f"{url.partition('?')[0]} cannot be used: {reason}. Check the address, its permissions and its free space."
        ) from error


@contextmanager
def _open_duckdb(url: str) -> Iterator[tuple[DuckDBPyConnection, Path]]:
    """Open DuckDB in memory, and a folder for its files, within a context that explains errors."""
    with _explain_errors(url), TemporaryDirectory(prefix="argosy-usage-") as scratch:
        import duckdb

        config: dict[str, Any] = _CONFIG | {"temp_directory": scratch}
        with duckdb.connect(config=config) as database:
            yield database, Path(scratch)


def _digest(path: Path) -> tuple[str, int]:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), file.tell()
