"""Incremental lexing of JSON text, which finds its end and passes it on as it arrives."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from argosy.engine.serving.output_parsing.cursor import (
    MAX_HEADER_CHARS,
    Cursor,
    MarkerCodec,
    NotACallError,
    OutputEndedError,
    Reading,
)

Write = Callable[[str], None]

_STRING_TEXT = re.compile('[^"\\\\\x00-\x1f\ud800-\udfff]+')
_PLAIN_TEXT = re.compile(r"[-+.,:0-9A-Za-z_ \t\r\n]+")
_SCALAR_END = re.compile(r"[,}\]\s\ud800-\udfff]")
_CLOSERS = {"{": "}", "[": "]"}


class MalformedJsonError(Exception):
    """The text is not JSON."""


def read_structure(cursor: Cursor, codec: MarkerCodec, write: Write) -> Reading[None]:
    """Read an object, array or string and pass its text to `write` as it arrives.

    Characters that a JSON string may not contain are escaped. Brackets are checked, other syntax is not.

    Raises:
        MalformedJsonError: A bracket does not match, or a character cannot be a part of JSON.
        OutputEndedError: The output ends before the value.
    """
    closers: list[str] = []
    in_string = False
    parts: list[str] = []

    def flush() -> None:
        if parts:
            write("".join(parts))
            parts.clear()
            cursor.release()

    while True:
        if cursor.position >= len(cursor.text):
            flush()
            if cursor.is_final:
                raise OutputEndedError
            yield
            continue
        text, position = cursor.text, cursor.position
        match = (_STRING_TEXT if in_string else _PLAIN_TEXT).match(text, position)
        if match is not None and (in_string or closers):
            parts.append(match.group())
            cursor.position = match.end()
            continue
        char = text[position]
        if in_string:
            if char == "\\":
                if position + 1 >= len(text) and not cursor.is_final:
                    flush()
                    yield
                    continue
                parts.append(text[position : position + 2])
                cursor.position += 2
                continue
            parts.append(char if char == '"' else quote_string(codec.decode(char)))
            in_string = char != '"'
        else:
            if char in _CLOSERS:
                closers.append(_CLOSERS[char])
            elif char == '"':
                in_string = True
            elif not closers or char != closers.pop():
                flush()
                raise MalformedJsonError
            parts.append(char)
        cursor.position += 1
        if not closers and not in_string:
            flush()
            return


def read_value(cursor: Cursor, codec: MarkerCodec) -> Reading[str]:
    """Read a complete JSON value and return its text.

    Raises:
        NotACallError: The value is malformed or too long.
        OutputEndedError: The output ends before the value.
    """
    char = yield from cursor.require()
    if char in '{["':
        parts: list[str] = []
        size = 0

        def hold(text: str) -> None:
            nonlocal size
            size += len(text)
            if size > MAX_HEADER_CHARS:
                raise NotACallError
            parts.append(text)

        try:
            yield from read_structure(cursor, codec, hold)
        except MalformedJsonError:
            raise NotACallError from None
        return "".join(parts)
    start = searched = cursor.position
    while (match := _SCALAR_END.search(cursor.text, searched)) is None:
        searched = len(cursor.text)
        if cursor.is_final:
            raise OutputEndedError
        if searched - start > MAX_HEADER_CHARS:
            raise NotACallError
        yield
    cursor.position = match.start()
    return cursor.text[start : match.start()]


def decode_string(text: str) -> str | None:
    """Return the string that a JSON text holds, or None if it holds something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def quote_string(text: str) -> str:
    """Return text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
