"""Conversion of Python literals to JSON as they arrive. Nothing is evaluated."""

from __future__ import annotations

import re
from collections.abc import Callable

from argosy.engine.serving.output_parsing.cursor import (
    Cursor,
    MarkerCodec,
    NotACallError,
    OutputEndedError,
    Reading,
)
from argosy.engine.serving.output_parsing.json_text import quote_string

_MAX_DEPTH = 64
_MAX_EXPRESSION_CHARS = 65_536
_BRACKETS = {"[": "]", "(": ")", "{": "}"}
_HEX_DIGITS = "0123456789abcdefABCDEF"
_ESCAPE_SIZES = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "a": "\a",
    "0": "\0",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
}

_STRING_TEXT = {"'": re.compile(r"[^'\\]+"), '"': re.compile(r'[^"\\]+')}

ConvertExpression = Callable[[str], str]


class PythonLiteralReader:
    """Reader of one literal at a time.

    Args:
        cursor: Position in the text.
        codec: Mapping of special tokens.
        write: Consumer of JSON text.
        convert: Conversion of anything but strings and collections to JSON text. May raise `NotACallError`.
    """

    def __init__(
        self,
        cursor: Cursor,
        codec: MarkerCodec,
        write: Callable[[str], None],
        convert: ConvertExpression,
    ) -> None:
        self._cursor = cursor
        self._codec = codec
        self._write = write
        self._convert = convert

    def read(self, stops: str, depth: int = 0) -> Reading[None]:
        """Read a literal before one of the characters in `stops`, and write it as JSON."""
        cursor = self._cursor
        yield from cursor.skip()
        char = yield from cursor.require()
        if char in "'\"":
            self._write('"')
            yield from self._read_string()
            self._write('"')
        elif char in "[(" and depth < _MAX_DEPTH:
            yield from self._read_list(depth + 1)
        elif char == "{" and depth < _MAX_DEPTH:
            yield from self._read_dict(depth + 1)
        else:
            text = yield from self._read_expression(stops)
            self._write(self._convert(self._codec.decode(text)))

    def _read_list(self, depth: int) -> Reading[None]:
        cursor = self._cursor
        closer = _BRACKETS[cursor.text[cursor.position]]
        cursor.position += 1
        self._write("[")
        is_first = True
        while True:
            yield from cursor.skip()
            if (yield from cursor.accept(closer)):
                break
            if not is_first:
                self._write(", ")
            is_first = False
            yield from self.read("," + closer, depth)
            yield from cursor.skip()
            yield from cursor.accept(",")
        self._write("]")

    def _read_dict(self, depth: int) -> Reading[None]:
        cursor = self._cursor
        cursor.position += 1
        self._write("{")
        is_first = True
        while True:
            yield from cursor.skip()
            if (yield from cursor.accept("}")):
                break
            self._write('"' if is_first else ', "')
            is_first = False
            if (yield from cursor.require()) in "'\"":
                yield from self._read_string()
            else:
                self._write_text((yield from self._read_expression(":}")).strip())
            self._write('": ')
            yield from cursor.skip()
            if (yield from cursor.accept(":")):
                yield from self.read(",}", depth)
            else:
                self._write("null")
            yield from cursor.skip()
            yield from cursor.accept(",")
        self._write("}")

    def _read_string(self) -> Reading[None]:
        """Read a string literal and write its value."""
        cursor = self._cursor
        quote = cursor.text[cursor.position]
        cursor.position += 1
        while True:
            yield from cursor.require()
            text, start = cursor.text, cursor.position
            match = _STRING_TEXT[quote].match(text, start)
            end = start if match is None else match.end()
            self._write_text(text[start:end])
            cursor.position = end
            if end == len(text):
                cursor.release()
                continue
            cursor.position += 1
            if text[end] == quote:
                return
            yield from self._read_escape()

    def _read_escape(self) -> Reading[None]:
        """Read what follows a backslash and write the character."""
        cursor = self._cursor
        char = yield from cursor.require()
        cursor.position += 1
        size = _ESCAPE_SIZES.get(char)
        if size is None:
            self._write_text(_ESCAPES.get(char, "\\" + char))
            return
        digits = ""
        while len(digits) < size and (yield from cursor.require()) in _HEX_DIGITS:
            digits += cursor.text[cursor.position]
            cursor.position += 1
        code = int(digits, 16) if len(digits) == size else -1
        if 0xD800 <= code <= 0xDFFF:
            self._write(f"\\u{code:04x}")
        elif 0 <= code <= 0x10FFFF:
            self._write_text(chr(code))
        else:
            self._write_text(f"\\{char}{digits}")

    def _read_expression(self, stops: str) -> Reading[str]:
        """Read source text up to one of `stops` outside of brackets and strings."""
        cursor = self._cursor
        start = cursor.position
        closers: list[str] = []
        quote = ""
        while True:
            if cursor.position - start > _MAX_EXPRESSION_CHARS:
                raise NotACallError
            char = yield from cursor.require()
            if quote:
                quote = "" if char == quote else quote
            elif not closers and char in stops:
                return cursor.text[start : cursor.position]
            elif char in "'\"":
                quote = char
            elif char in _BRACKETS:
                closers.append(_BRACKETS[char])
            elif closers and char == closers[-1]:
                closers.pop()
            cursor.position += 1

    def _write_text(self, text: str) -> None:
        self._write(quote_string(self._codec.decode(text)))


def convert_literal(text: str, convert: ConvertExpression) -> str:
    """Return a complete Python string, list, tuple or dict as JSON text, or an empty string if `text` is none.

    Args:
        text: Source of the literal.
        convert: Conversion of numbers and constants. Raises `NotACallError` for anything else.
    """
    cursor = Cursor()
    cursor.text = text
    cursor.is_final = True
    parts: list[str] = []
    reading = PythonLiteralReader(cursor, MarkerCodec(()), parts.append, convert).read("")
    try:
        next(reading, None)
    except (NotACallError, OutputEndedError):
        return ""
    return "".join(parts) if cursor.at_end else ""
