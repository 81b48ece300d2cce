"""Sizes in settings: `8GiB`, `500MB`."""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_SIZE_PATTERN = re.compile(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)

Size = (
    Annotated[int, Meta(ge=0, le=1 << 60)]
    | Annotated[
        str,
        Meta(
            pattern=r"^\d{1,18}(\.\d{1,9})? ?([kKmMgGtT]i?)?[bB]?$(?!\n)",
            examples=["64MiB", "16GB"],
        ),
    ]
)
"""Number of bytes, or text such as `16GiB`."""


def parse_size(size: str | int) -> int:
    """Return the size in bytes: `1GiB` is 2**30, `1GB` is 10**9. Raises ValueError if `size` is not a size."""
    match = _SIZE_PATTERN.fullmatch(str(size))
    if match is None:
        raise ValueError(f"{size!r} is not a size; write it like 8GiB or 500MB")
    number, unit = match.groups()
    return int(float(number) * _UNITS[(unit or "").lower()])
