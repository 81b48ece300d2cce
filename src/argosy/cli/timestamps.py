"""Durations and moments as people write them: `30d`, `12h`, `2026-11-01`."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import typer

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*")
_MAX_TIMESTAMP_S = datetime(9999, 12, 31, tzinfo=UTC).timestamp()


def parse_duration(text: str) -> float:
    """Seconds. Raises typer.BadParameter."""
    match = _DURATION.fullmatch(text.lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no duration; write it like 90s, 15m, 12h, 30d or 2w")
    return float(match[1]) * _UNIT_SECONDS[match[2]]


def parse_past_time(text: str) -> float:
    """Seconds since the epoch: a date or a time (UTC unless it says otherwise), or so long ago."""
    return _parse_timestamp(text, -1)


def parse_future_time(text: str) -> float:
    """The same, or so long from now."""
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
        raise typer.BadParameter(f"{text!r} is no moment; {remedy}") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def format_timestamp(timestamp_s: float | None) -> str:
    """A moment in UTC, to the minute; empty when there is none."""
    if timestamp_s is None:
        return ""
    return datetime.fromtimestamp(timestamp_s, UTC).strftime("%Y-%m-%d %H:%M")
