"""Conversion of argument values that a model writes, as plain text or as Python literals, into JSON.

Literals are converted as they arrive. Nothing is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

import msgspec

from argosy.constraints import json_type
from argosy.engine.serving.output_parsing.cursor import (
    Cursor,
    MarkerCodec,
    NotACallError,
    OutputEndedError,
    Reading,
)
from argosy.engine.serving.output_parsing.json_text import Write, quote_string

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
_MAX_LITERAL_CHARS = 65_536
_NULLS = ("null", "None")
_NOT_JSON = object()
_PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


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


class ValueWriter:
    """Writer of one value. Strings are passed on as they arrive, other values when they are complete.

    Args:
        write: Consumer of JSON text.
        codec: Mapping of special tokens.
        types: JSON types that the value may have. Empty if any.
    """

    def __init__(self, write: Write, codec: MarkerCodec, types: Collection[str]) -> None:
        self._write = write
        self._codec = codec
        self._types = types
        self._is_string = set(types) <= {"string", "null"} and "string" in types
        self._held: list[str] = []
        self._is_open = False
        if self._is_string and "null" not in types:
            self._open()

    def write(self, text: str) -> None:
        """Add encoded text."""
        if not text:
            return
        text = self._codec.decode(text)
        if self._is_open:
            self._write(quote_string(text))
            return
        self._held.append(text)
        if self._is_string:
            value = "".join(self._held)
            if not any(null.startswith(value) for null in _NULLS):
                self._open()

    def end(self) -> None:
        """End the value."""
        if self._is_open:
            self._write('"')
        else:
            self._write(convert_value("".join(self._held), self._types))

    def _open(self) -> None:
        self._is_open = True
        self._write('"' + quote_string("".join(self._held)))
        self._held.clear()


def convert_value(text: str, types: Collection[str]) -> str:
    """Return a value as JSON text. Text that is no value of the types becomes a string."""
    stripped = _PYTHON_CONSTANTS.get(text.strip(), text.strip())
    value = _decode(stripped)
    if value is _NOT_JSON:
        stripped = _convert_python(stripped)
        value = _decode(stripped)
    if value is _NOT_JSON or ("string" in types and not _has_type(value, types)):
        return f'"{quote_string(text)}"'
    return stripped


def _decode(text: str) -> object:
    """Return the value of a JSON text, or `_NOT_JSON`."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return _NOT_JSON


def _has_type(value: object, types: Collection[str]) -> bool:
    """Return whether a decoded value has one of the types, apart from strings."""
    kind = json_type(value)
    return kind != "string" and (kind in types or (kind == "integer" and "number" in types))


def _convert_python(text: str) -> str:
    """Return a Python string or collection as JSON text, or an empty text if it is none."""
    if text[:1] not in ("[", "(", "{", "'") or len(text) > _MAX_LITERAL_CHARS:
        return ""
    return convert_literal(text, _convert_constant)


def _convert_constant(text: str) -> str:
    """Return a number or constant within a collection as JSON text.

    Raises:
        NotACallError: The text is neither.
    """
    text = _PYTHON_CONSTANTS.get(text.strip(), text.strip())
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        raise NotACallError from None
    return text
