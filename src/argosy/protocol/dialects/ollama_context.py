"""The `context` of Ollama's generate requests: a conversation as numbers, which clients send back to continue it.

Ollama's numbers are tokens. These are the texts of the messages, so that any engine continues the conversation with its
own template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from argosy.protocol.errors import invalid_request

_NUMBER_BYTES = 3
"""Bytes of one number, which is as large as an id of a token."""
_MARKER = int.from_bytes(b"Ag1", "big")
"""First number of each context, with the version of the format."""
_Turns = list[tuple[Literal["system", "user", "assistant"], str]]


def encode_context(messages: Sequence[dict[str, Any]], answer: str) -> list[int]:
    """Encode the texts of a conversation and its answer."""
    turns = [(message["role"], _text(message["content"])) for message in messages]
    data = msgspec.json.encode([*turns, ("assistant", answer)])
    data += b" " * (-len(data) % _NUMBER_BYTES)
    starts = range(0, len(data), _NUMBER_BYTES)
    return [_MARKER, *(int.from_bytes(data[i : i + _NUMBER_BYTES], "big") for i in starts)]


def decode_context(context: Sequence[int]) -> list[dict[str, Any]]:
    """Decode the messages of a context. Any caller may send one, of at most the bytes of the request's body.

    Raises:
        ApiError: 400 if this server has not encoded it.
    """
    try:
        marker, *numbers = context
        data = b"".join([number.to_bytes(_NUMBER_BYTES, "big") for number in numbers])
        turns = msgspec.json.decode(data, type=_Turns) if marker == _MARKER else None
    except (ValueError, OverflowError):  # also if a text is no UTF-8
        turns = None
    if turns is None:
        message = "'context' is not one that this server returned. Remove it, or use /api/chat with the messages."
        raise invalid_request(message, param="context")
    return [{"role": role, "content": text} for role, text in turns]


def _text(content: str | list[dict[str, Any]]) -> str:
    """Return the text of a message. Its images are left out."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")
