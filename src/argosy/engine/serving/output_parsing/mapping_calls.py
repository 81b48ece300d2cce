"""Calls as a name and a mapping with unquoted keys and marked strings, `call:f{city:<|"|>Paris<|"|>,n:3}`.

Formats of Gemma 4 and FunctionGemma.
"""

from __future__ import annotations

from dataclasses import dataclass

from argosy.engine.serving.output_parsing.call_reader import CallContext
from argosy.engine.serving.output_parsing.cursor import (
    LiteralSet,
    NotACallError,
    OutputEndedError,
    Reading,
)
from argosy.engine.serving.output_parsing.json_text import (
    MalformedJsonError,
    read_structure,
)
from argosy.engine.serving.output_parsing.typed_values import convert_value

_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MappingSyntax:
    """A call is a name and a mapping.

    Args:
        open: Text before the name.
        close: Text after the mapping.
        quote: Marker before and after a string.
    """

    open: str
    close: str
    quote: str


class MappingCallReader:
    """Parser of `MappingSyntax`."""

    def __init__(self, context: CallContext, syntax: MappingSyntax) -> None:
        encode = context.codec.encode
        self._context = context
        self._cursor = context.cursor
        self._open = encode(syntax.open)
        self._close = encode(syntax.close)
        self._quote = encode(syntax.quote)
        self._quote_stops = LiteralSet((self._quote,))
        self._name_stops = LiteralSet(("{", self._close))
        self._call_stops = LiteralSet((self._close, self._open))
        self._key_stops = LiteralSet(":,}")
        self._scalar_stops = LiteralSet(",]}")
        self.triggers: tuple[str, ...] = (self._open,)
        self.start_triggers: tuple[str, ...] = ()

    def read(self) -> Reading[None]:
        """Read one call."""
        context, cursor = self._context, self._cursor
        yield from cursor.expect(self._open)
        yield from cursor.skip()
        yield from cursor.expect("call:")
        name, stop = yield from cursor.read_until(self._name_stops)
        if stop != "{":
            raise NotACallError
        name = context.check_name(name)
        context.sink.start_call(name)
        try:
            yield from self._read_collection(1)
        except NotACallError:
            yield from context.write_rest(self._call_stops)
        yield from context.skip_until(self._call_stops)
        yield from cursor.accept(self._close)
        context.sink.end_call()

    def _read_collection(self, depth: int) -> Reading[None]:
        """Read a mapping or a list behind its opening bracket."""
        cursor, sink = self._cursor, self._context.sink
        closer = {"{": "}", "[": "]"}[cursor.text[cursor.position]]
        sink.write_arguments(cursor.text[cursor.position])
        cursor.position += 1
        is_first = True
        while True:
            yield from cursor.skip()
            if (yield from cursor.accept(closer)):
                break
            if not is_first and (yield from cursor.accept(",")):
                continue
            key = ""
            if closer == "}":
                key, stop = yield from cursor.read_until(self._key_stops)
                if stop != ":":
                    raise NotACallError
                cursor.position += 1
            if not is_first:
                sink.write_arguments(", ")
            is_first = False
            if closer == "}":
                sink.write_arguments('"')
                sink.write_string(key.replace(self._quote, "").strip().strip('"'))
                sink.write_arguments('": ')
            yield from self._read_value(depth)
        sink.write_arguments(closer)

    def _read_value(self, depth: int) -> Reading[None]:
        context, cursor = self._context, self._cursor
        yield from cursor.skip()
        if (yield from cursor.accept(self._quote)):
            yield from self._read_string()
            return
        char = yield from cursor.require()
        if char == '"':
            try:
                yield from read_structure(cursor, context.codec, context.sink.write_arguments)
            except MalformedJsonError:
                raise NotACallError from None
        elif char in "{[":
            if depth >= _MAX_DEPTH:
                raise NotACallError
            yield from self._read_collection(depth + 1)
        else:
            text, _ = yield from cursor.read_until(self._scalar_stops)
            context.sink.write_arguments(convert_value(context.codec.decode(text.strip()), ()))

    def _read_string(self) -> Reading[None]:
        """Read a string behind its opening marker and write it."""
        cursor, sink = self._cursor, self._context.sink
        sink.write_arguments('"')
        literal = yield from cursor.pass_text(self._quote_stops, sink.write_string)
        if not literal:
            raise OutputEndedError
        cursor.position += len(literal)
        sink.write_arguments('"')
