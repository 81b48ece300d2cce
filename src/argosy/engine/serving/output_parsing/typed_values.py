"""Conversion of argument values that a model writes as plain text into JSON."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from argosy.constraints import json_type
from argosy.engine.serving.output_parsing.cursor import MarkerCodec, NotACallError
from argosy.engine.serving.output_parsing.json_text import Write, quote_string
from argosy.engine.serving.output_parsing.python_literals import convert_literal

_MAX_LITERAL_CHARS = 65_536
_NULLS = ("null", "None")
_NOT_JSON = object()
_PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


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
