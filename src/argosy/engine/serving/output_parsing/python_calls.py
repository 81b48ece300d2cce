"""Calls as a Python list, `[f(a=1), g(b='x')]`, which Llama 4, ToolACE and others write.

Values are converted to JSON as they arrive and never evaluated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from argosy.engine.serving.output_parsing.call_reader import CallContext
from argosy.engine.serving.output_parsing.cursor import LiteralSet, NotACallError, Reading
from argosy.engine.serving.output_parsing.typed_values import convert_value

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_MAX_NAME_CHARS = 256
_MAX_DEPTH = 64
_MAX_EXPRESSION_CHARS = 65_536
_BRACKETS = {"[": "]", "(": ")", "{": "}"}
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
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonSyntax:
    """Calls are a list of Python function calls with keyword arguments.

    Args:
        open: Text before the list.
        close: Text after the list.
        is_bare: Whether the model usually leaves out `open` and `close`.
    """

    open: str
    close: str
    is_bare: bool = False


class PythonCallReader:
    """Parser of `PythonSyntax`. Calls begin with a bracket and the name of a known tool."""

    def __init__(self, context: CallContext, syntax: PythonSyntax) -> None:
        encode = context.codec.encode
        self._context = context
        self._cursor = context.cursor
        self._open = encode(syntax.open)
        self._close = encode(syntax.close)
        self._name_stops = LiteralSet("(")
        self.triggers: tuple[str, ...] = (self._open,)
        self.start_triggers: tuple[str, ...] = ("[",) if syntax.is_bare else ()

    def read(self) -> Reading[None]:
        """Read a list of calls."""
        context, cursor = self._context, self._cursor
        yield from cursor.accept(self._open)
        yield from cursor.skip()
        yield from cursor.expect("[")
        while True:
            yield from cursor.skip()
            name, _ = yield from cursor.read_until(self._name_stops, limit=_MAX_NAME_CHARS)
            context.check_name(name, must_exist=True)
            cursor.position += 1
            context.sink.start_call(name.strip())
            yield from self._read_arguments(name.strip())
            context.sink.end_call()
            yield from cursor.skip()
            if not (yield from cursor.accept(",")):
                break
            yield from cursor.skip()
            if (yield from cursor.match("]")):
                break
        yield from cursor.skip()
        yield from cursor.accept("]")
        yield from context.accept_after_space(self._close)

    def _read_arguments(self, name: str) -> Reading[None]:
        """Read the arguments of a call. Positional ones get the names of the declared parameters in order."""
        write, cursor = self._context.sink.write_arguments, self._cursor
        names = list(self._context.tools[name].parameter_types)
        count = 0
        while True:
            yield from cursor.skip()
            if (yield from cursor.accept(")")):
                break
            write(", " if count else "{")
            key = yield from self._read_keyword()
            if not key:
                key = names[count] if count < len(names) else f"argument_{count + 1}"
            write('"')
            self._context.sink.write_string(key)
            write('": ')
            yield from self._read_value(0, ",)")
            count += 1
            yield from cursor.skip()
            yield from cursor.accept(",")
        write("}" if count else "{}")

    def _read_keyword(self) -> Reading[str]:
        """Read `name=`, or nothing."""
        cursor = self._cursor
        start = cursor.position
        while True:
            match = _NAME.match(cursor.text, start)
            end = start if match is None else match.end()
            if end < len(cursor.text) or cursor.is_final or end - start > _MAX_NAME_CHARS:
                break
            yield
        if match is not None:
            cursor.position = end
            yield from cursor.skip()
            if (yield from cursor.accept("=")):
                yield from cursor.skip()
                return match.group()
        cursor.position = start
        return ""

    def _read_value(self, depth: int, stops: str) -> Reading[None]:
        """Read a literal and write it as JSON. Any other expression becomes a string with its source."""
        cursor = self._cursor
        yield from cursor.skip()
        char = yield from cursor.require()
        if char in "'\"":
            self._context.sink.write_arguments('"')
            yield from self._read_string()
            self._context.sink.write_arguments('"')
        elif char in "[(" and depth < _MAX_DEPTH:
            yield from self._read_list(depth + 1)
        elif char == "{" and depth < _MAX_DEPTH:
            yield from self._read_dict(depth + 1)
        else:
            text = yield from self._read_expression(stops)
            self._context.sink.write_arguments(convert_value(self._context.codec.decode(text), ()))

    def _read_list(self, depth: int) -> Reading[None]:
        cursor, write = self._cursor, self._context.sink.write_arguments
        closer = _BRACKETS[cursor.text[cursor.position]]
        cursor.position += 1
        write("[")
        is_first = True
        while True:
            yield from cursor.skip()
            if (yield from cursor.accept(closer)):
                break
            if not is_first:
                write(", ")
            is_first = False
            yield from self._read_value(depth, "," + closer)
            yield from cursor.skip()
            yield from cursor.accept(",")
        write("]")

    def _read_dict(self, depth: int) -> Reading[None]:
        cursor, write = self._cursor, self._context.sink.write_arguments
        cursor.position += 1
        write("{")
        is_first = True
        while True:
            yield from cursor.skip()
            if (yield from cursor.accept("}")):
                break
            write('"' if is_first else ', "')
            is_first = False
            if (yield from cursor.require()) in "'\"":
                yield from self._read_string()
            else:
                self._context.sink.write_string((yield from self._read_expression(":}")).strip())
            write('": ')
            yield from cursor.skip()
            if (yield from cursor.accept(":")):
                yield from self._read_value(depth, ",}")
            else:
                write("null")
            yield from cursor.skip()
            yield from cursor.accept(",")
        write("}")

    def _read_string(self) -> Reading[None]:
        """Read a string literal and write its value."""
        cursor, sink = self._cursor, self._context.sink
        quote = cursor.text[cursor.position]
        cursor.position += 1
        while True:
            yield from cursor.require()
            text, start = cursor.text, cursor.position
            end = start
            while end < len(text) and text[end] not in ("\\", quote):
                end += 1
            sink.write_string(text[start:end])
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
        cursor, sink = self._cursor, self._context.sink
        char = yield from cursor.require()
        cursor.position += 1
        size = _HEX_DIGITS.get(char)
        if size is None:
            sink.write_string(_ESCAPES.get(char, "\\" + char))
            return
        digits = ""
        while len(digits) < size and (yield from cursor.require()) in "0123456789abcdefABCDEF":
            digits += cursor.text[cursor.position]
            cursor.position += 1
        code = int(digits, 16) if len(digits) == size else -1
        if 0xD800 <= code <= 0xDFFF:
            sink.write_arguments(f"\\u{code:04x}")
        elif 0 <= code <= 0x10FFFF:
            sink.write_string(chr(code))
        else:
            sink.write_string(f"\\{char}{digits}")

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
