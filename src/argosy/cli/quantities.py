"""Sizes, counts, durations, times and dollars, as options take them and as commands print them."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation, Overflow
from typing import Literal

import typer

from argosy import settings

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*")
_MAX_TIMESTAMP_S = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
NANODOLLARS_PER_DOLLAR = 10**9
MILLION = 10**6
MAX_DOLLARS = (2**63 - 1) // NANODOLLARS_PER_DOLLAR
"""Largest amount. The store holds nanodollars as signed 64-bit integers."""
MAX_PRICE_DOLLARS = MILLION
"""Largest price, in dollars for a million tokens."""


def parse_size(text: str) -> int:
    """Return the size in bytes: `1GiB` is 2**30, `1GB` is 10**9. This and other parsers raise typer.BadParameter."""
    try:
        return settings.parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def format_size(size_bytes: float) -> str:
    """Format a size with a binary unit and three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.3g} TiB"


_COUNT = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*([kmb]?)\s*")
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


def parse_count(text: str) -> float:
    """Return the number: `10M` is 10,000,000, and `1.5K` is 1,500."""
    match = _COUNT.fullmatch(text.lower().replace(",", ""))
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a number; write it like 100K or 2.5M")
    return float(match[1]) * _COUNT_UNITS[match[2]]


def format_count(count: float) -> str:
    """Format a number with a decimal unit and three digits: `8.13 M`."""
    for unit in ("", " K", " M", " B"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} T"


def parse_duration(text: str) -> float:
    """Return the duration in seconds."""
    match = _DURATION.fullmatch(text.lower())
    if match is None:
        raise typer.BadParameter(
            f"{text!r} is not a duration; write it like 90s, 15m, 12h, 30d or 2w"
        )
    return float(match[1]) * _UNIT_SECONDS[match[2]]


def parse_past_time(text: str) -> float:
    """Return seconds since the epoch, from an ISO 8601 date or time or from a duration before now.

    Times without an offset are in UTC. They are within the years 1970 to 9999.
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


def parse_dollars(text: str) -> int:
    """Return the amount in nanodollars."""
    try:
        nanodollars = (
            Decimal(text.strip().removeprefix("$").replace(",", "")) * NANODOLLARS_PER_DOLLAR
        )
    except (InvalidOperation, Overflow) as error:
        raise typer.BadParameter(f"{text!r} is not an amount; write it like 12.50") from error
    if (
        not nanodollars.is_finite()
        or nanodollars < 0
        or nanodollars != nanodollars.to_integral_value()
    ):
        raise typer.BadParameter(f"{text!r} must be 0 or more, in whole nanodollars")
    if nanodollars > MAX_DOLLARS * NANODOLLARS_PER_DOLLAR:
        raise typer.BadParameter(f"{text!r} is too large; give at most {MAX_DOLLARS:,} dollars")
    return int(nanodollars)


def parse_price(text: str) -> int:
    """Return nano-dollars for a token, from dollars for a million tokens, a multiple of 0.001."""
    nanodollars = parse_dollars(text)
    if nanodollars % MILLION:
        raise typer.BadParameter(f"{text!r} is too fine; give a multiple of 0.001 dollars")
    if nanodollars > MAX_PRICE_DOLLARS * NANODOLLARS_PER_DOLLAR:
        raise typer.BadParameter(
            f"{text!r} is too large; give at most {MAX_PRICE_DOLLARS:,} dollars"
        )
    return nanodollars // MILLION


def format_dollars(nanodollars: int) -> str:
    """Format an amount exactly, with at least two digits after the decimal point."""
    whole, rest = divmod(nanodollars, NANODOLLARS_PER_DOLLAR)
    return f"${whole:,}.{f'{rest:09d}'.rstrip('0').ljust(2, '0')}"


def format_price(nanodollars: int) -> str:
    """Format the price of a token as dollars for a million tokens."""
    return format_dollars(nanodollars * MILLION)
