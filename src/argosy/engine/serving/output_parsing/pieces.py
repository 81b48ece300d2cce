"""Pieces of model output that a parser reads."""

from __future__ import annotations

from typing import NamedTuple


class MarkerToken(NamedTuple):
    """Special token that structures the output, such as `</think>`, by its text."""

    text: str


Piece = str | MarkerToken
"""Part of the output: decoded text of ordinary tokens, or a marker."""
