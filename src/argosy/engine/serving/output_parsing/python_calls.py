"""Calls as a Python list, `[f(a=1), g(b='x')]`, which Llama 4, ToolACE and others write.

Values are converted to JSON as they arrive and never evaluated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from argosy.engine.serving.output_parsing.call_reader import CallContext
from argosy.engine.serving.output_parsing.cursor import LiteralSet, Reading
from argosy.engine.serving.output_parsing.typed_values import PythonLiteralReader, convert_value

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_MAX_NAME_CHARS = 256


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
        self._values = PythonLiteralReader(
            context.cursor, context.codec, context.sink.write_arguments, _convert_expression
        )
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
            yield from self._values.read(",)")
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


def _convert_expression(text: str) -> str:
    """Return a number or constant as JSON text. Any other expression becomes a string with its source."""
    return convert_value(text, ())
