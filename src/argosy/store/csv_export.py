"""CSV text of which a spreadsheet computes nothing."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime


def format_csv(rows: Iterable[Sequence[object]]) -> str:
    """CSV text. An apostrophe comes before texts that a spreadsheet would compute: users choose some of them."""
    file = io.StringIO()
    safe = ([_escape_formula(cell) for cell in line] for line in rows)
    csv.writer(file, lineterminator="\n").writerows(safe)
    return file.getvalue()


def format_csv_time(seconds: float) -> str:
    """A moment, from seconds since the epoch: ISO 8601 in UTC, to the microsecond, as in logs."""
    moment = datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None)
    return f"{moment.isoformat(timespec='microseconds')}Z"


def _escape_formula(cell: object) -> object:
    if not isinstance(cell, str):
        return cell
    computed = cell.startswith(("=", "+", "-", "@", "\t"))
    text = cell.replace("\r", " ")  # the writer does not quote it, and readers end the line there
    return f"'{text}" if computed else text
