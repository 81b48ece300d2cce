"""Parsing and formatting of durations (`30d`, `12h`) and timestamps (`2026-11-01`)."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Literal

import typer

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*")
_MAX_TIMESTAMP_S = datetime(9999, 12, 31, tzinfo=UTC).timestamp()


def parse_duration(text: str) -> float:
    """Return the duration in seconds.

    Raises:
        typer.BadParameter: `text` is not a duration.
    """
    match = _DURATION.fullmatch(text.lower())
    if match is None:
        raise typer.BadParameter(
            f"{text!r} is not a duration; write it like 90s, 15m, 12h, 30d or 2w"
        )
    return float(match[1]) * _UNIT_SECONDS[match[2]]


def parse_past_time(text: str) -> float:
    """Return seconds since the epoch, from an ISO 8601 date or time or from a duration before now.

    Times without an offset are in UTC.

    Raises:
        typer.BadParameter: `text` is neither, or is not within the years 1970 to 9999.
    """
    return _parse_timestamp(text, -1)


def parse_future_time(text: str) -> float:
    """Return seconds since the epoch like `parse_past_time`, but a duration is counted from now."""
    return _parse_timestamp(text, 1)


def _parse_timestamp(text: str, direction: int) -> float:
    if _DURATION.fullmatch(text.lower()):
        seconds = datetime.now(UTC).timestamp() + direction * parse_duration(text)
        if not 0 <= seconds <= _MAX_TIMESTAMP_S:
            raise typer.BadParameter(f"{text!r} is not within the years 1970 to 9999")
        return seconds
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        remedy = "write a date like 2026-11-01, or a duration like 30d"
        raise typer.BadParameter(f"{text!r} is not a date or time; {remedy}") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def format_timestamp(
    timestamp_s: float | None, timespec: Literal["minutes", "seconds"] = "minutes"
) -> str:
    """Format seconds since the epoch as ISO 8601 local time with its offset, to the minute or second.

    Returns an empty string for None. The options that take a time accept this format.
    """
    if timestamp_s is None:
        return ""
    return datetime.fromtimestamp(timestamp_s, UTC).astimezone().isoformat(" ", timespec)
