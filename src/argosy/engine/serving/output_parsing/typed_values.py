"""Conversion of argument values that a model writes as plain text into JSON."""

from __future__ import annotations

import ast
import json
from collections.abc import Collection

import msgspec

from argosy.engine.serving.output_parsing.cursor import MarkerCodec
from argosy.engine.serving.output_parsing.json_text import Write
from argosy.engine.serving.output_parsing.sink import quote_string
from argosy.engine.serving.output_parsing.tools import json_type

_MAX_LITERAL_CHARS = 65_536
_NULLS = ("null", "None")
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
    stripped = text.strip()
    if stripped in _PYTHON_CONSTANTS:
        stripped = _PYTHON_CONSTANTS[stripped]
    try:
        value = msgspec.json.decode(stripped)
    except (msgspec.DecodeError, RecursionError):
        stripped, value = _convert_python(stripped)
    if not stripped or ("string" in types and not _has_type(value, types)):
        return f'"{quote_string(text)}"'
    return stripped


def _has_type(value: object, types: Collection[str]) -> bool:
    """Return whether a decoded value has one of the types, apart from strings."""
    kind = json_type(value)
    return kind != "string" and (kind in types or (kind == "integer" and "number" in types))


def _convert_python(text: str) -> tuple[str, object]:
    """Return a Python literal as JSON text and value, or an empty text if it is none."""
    if not text or text[0] not in "[{('\"" or len(text) > _MAX_LITERAL_CHARS:
        return "", None
    try:
        value = ast.literal_eval(text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False), value
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return "", None
