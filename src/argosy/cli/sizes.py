"""Options that are sizes (`8GiB`, `500MB`), and formatting of sizes and large counts."""

from __future__ import annotations

import typer

from argosy import settings


def parse_size(text: str) -> int:
    """Return the size in bytes: `1GiB` is 2**30, `1GB` is 10**9.

    Raises:
        typer.BadParameter: `text` is not a size.
    """
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


def format_count(count: float) -> str:
    """Format a number with a decimal unit and three digits: `8.13 M`."""
    for unit in ("", " K", " M", " B"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} T"
