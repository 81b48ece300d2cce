"""Parsing and formatting of sizes (`8GiB`, `500MB`) and large counts."""

from __future__ import annotations

import re

import typer

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_SIZE_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the size in bytes: `1GiB` is 2**30, `1GB` is 10**9.

    Raises:
        typer.BadParameter: `text` is not a size.
    """
    match = _SIZE_PATTERN.fullmatch(text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; write it like 8GiB or 500MB")
    number, unit = match.groups()
    return int(float(number) * _UNITS[(unit or "").lower()])


def format_size(size_bytes: float) -> str:
    """Format a size with a binary unit and three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.3g} TiB"


def format_count(count: float) -> str:
    """Format a number with a decimal unit and three digits: `8.13 M`."""
    for unit in ("", " K", " M", " B"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} T"
