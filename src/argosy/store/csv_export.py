"""CSV text in which spreadsheets find no formulas to evaluate."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime


def format_csv(rows: Iterable[Sequence[object]]) -> str:
    """Format rows as CSV text.

    Users choose some of the texts, so an apostrophe is put before each text that a spreadsheet would evaluate.
    """
    file = io.StringIO()
    escaped = ([_escape_formula(cell) for cell in row] for row in rows)
    csv.writer(file, lineterminator="\n").writerows(escaped)
    return file.getvalue()


def format_csv_time(seconds: float) -> str:
    """Format seconds since the epoch as ISO 8601 in UTC, to the microsecond, as in logs."""
    time = datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None)
    return f"{time.isoformat(timespec='microseconds')}Z"


def _escape_formula(cell: object) -> object:
    if not isinstance(cell, str):
        return cell
    is_formula = cell.startswith(("=", "+", "-", "@", "\t"))
    # The writer does not quote a carriage return, and readers end the line there.
    text = cell.replace("\r", " ")
    return f"'{text}" if is_formula else text
