"""Pieces of model output that a parser reads, and its events, which every API dialect renders in its own shape."""

from __future__ import annotations

from typing import NamedTuple


class MarkerToken(NamedTuple):
    """Special token that structures the output, such as `</think>`, by its text."""

    text: str


Piece = str | MarkerToken
"""Part of the output: decoded text of ordinary tokens, or a marker."""


class ReasoningText(NamedTuple):
    """Piece of the reasoning before the answer."""

    text: str


class ContentText(NamedTuple):
    """Piece of the answer."""

    text: str


class CallStart(NamedTuple):
    """Start of tool call `call`. Calls are numbered from 0 in the order of their appearance."""

    call: int
    name: str


class CallArguments(NamedTuple):
    """Piece of a call's arguments. Joined, the pieces are one JSON object unless the output was cut or malformed."""

    call: int
    text: str


class CallEnd(NamedTuple):
    """End of a tool call. A call without it is incomplete."""

    call: int


OutputEvent = ReasoningText | ContentText | CallStart | CallArguments | CallEnd
