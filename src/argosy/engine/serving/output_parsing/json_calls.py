"""Calls as JSON: objects with name and arguments, or arguments behind a name.

Formats of Hermes, Qwen, Llama, Mistral, DeepSeek, Kimi, Phi and Granite.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from argosy.engine.serving.output_parsing.call_reader import CallContext
from argosy.engine.serving.output_parsing.cursor import LiteralSet, NotACallError, Reading
from argosy.engine.serving.output_parsing.json_text import decode_string, read_value

_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_NAME_KEYS = frozenset({"name", "function"})
_ID_SUFFIX = re.compile(r":\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonSyntax:
    """A call is a JSON object with name and arguments, alone or in an array.

    Args:
        open: Text before the calls. Several spellings may be accepted, of which the first is the usual one. Empty if a
            call begins with its bracket, which then must name a known tool.
        close: Text after the calls, or empty.
        arguments_key: Usual key of the arguments.
        is_array: Whether calls usually stand in one array, else each has its own object.
        separator: Text between calls.
    """

    open: tuple[str, ...]
    close: str = ""
    arguments_key: str = "arguments"
    is_array: bool = False
    separator: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedJsonSyntax:
    """A call is a name and JSON arguments, between markers.

    Args:
        section_open: Text before all calls, or empty.
        section_close: Text after all calls, or empty.
        call_open: Text before a call.
        call_close: Text after a call, or empty.
        name_prefix: Text before the name.
        optional_prefix: Beginning of the name that is no part of it. Models may leave it out.
        name_end: Texts of which one ends the name.
        id_open: Text between the name and an id of the call, or empty.
        has_index: Whether a colon and the number of the call follow the name.
        arguments_open: Text before the arguments that may be missing.
        arguments_close: Text after the arguments that may be missing.
        separator: Text between calls.
    """

    section_open: str = ""
    section_close: str = ""
    call_open: str
    call_close: str = ""
    name_prefix: str = ""
    optional_prefix: str = ""
    name_end: tuple[str, ...]
    id_open: str = ""
    has_index: bool = False
    arguments_open: str = ""
    arguments_close: str = ""
    separator: str = ""


class JsonCallReader:
    """Parser of `JsonSyntax`."""

    def __init__(self, context: CallContext, syntax: JsonSyntax) -> None:
        encode = context.codec.encode
        self._context = context
        self._cursor = context.cursor
        self._open = tuple(encode(text) for text in syntax.open if text)
        self._close = encode(syntax.close)
        self._is_bare = "" in syntax.open
        self._stops = LiteralSet((self._close, *self._open))
        self.triggers = self._open
        self.start_triggers = (
            ("{", "[") if self._is_bare and syntax.is_array else ("{",) * self._is_bare
        )

    def read(self) -> Reading[None]:
        """Read an opening text, the calls behind it, and the closing text."""
        cursor = self._cursor
        has_marker = bool(self._open) and bool((yield from cursor.accept(*self._open)))
        yield from self.read_objects(must_exist=not has_marker)

    def read_objects(self, *, must_exist: bool = False) -> Reading[None]:
        """Read the calls behind the opening text, and the closing text."""
        context, cursor = self._context, self._cursor
        calls = context.sink.calls
        yield from cursor.skip()
        try:
            yield from self._read_body(must_exist=must_exist)
        except NotACallError:
            if context.sink.calls == calls:
                raise
            if self._close:
                yield from context.skip_until(self._stops)
        yield from context.accept_after_space(self._close, also_skip="}]")

    def _read_body(self, *, must_exist: bool) -> Reading[None]:
        cursor = self._cursor
        is_array = bool((yield from cursor.accept("[")))
        yield from cursor.skip()
        if is_array and (yield from cursor.accept("]")):
            return
        yield from self._read_object(must_exist=must_exist)
        while True:
            if is_array and (yield from self._context.accept_after_space("]")):
                return
            if not (yield from self._read_next_object(must_exist=must_exist)):
                return

    def _read_next_object(self, *, must_exist: bool) -> Reading[bool]:
        """Read a separator and a further object. Return whether there was one; else nothing is read."""
        context, cursor = self._context, self._cursor
        calls = context.sink.calls
        cursor.mark = start = cursor.position
        try:
            yield from cursor.skip()
            yield from cursor.expect(";", ",")
            yield from cursor.skip()
            yield from self._read_object(must_exist=must_exist)
        except NotACallError:
            if context.sink.calls > calls:
                raise
            cursor.mark = None
            cursor.position = start
            return False
        return True

    def _read_object(self, *, must_exist: bool, is_inner: bool = False) -> Reading[None]:
        """Read one object. Its keys may have any order, and further keys are ignored.

        Args:
            must_exist: Whether the name must be the name of a tool.
            is_inner: Whether this is the function within the object of a call.
        """
        context, cursor = self._context, self._cursor
        yield from cursor.expect("{")
        name = ""
        arguments: str | None = None
        has_started = False
        while True:
            yield from cursor.skip(" \t\r\n,")
            if (yield from cursor.accept("}")):
                break
            if (yield from cursor.require()) != '"':
                raise NotACallError
            key = decode_string((yield from read_value(cursor, context.codec)))
            yield from cursor.skip()
            yield from cursor.expect(":")
            yield from cursor.skip()
            char = yield from cursor.require()
            if key == "function" and char == "{" and not (has_started or is_inner):
                yield from self._read_object(must_exist=must_exist, is_inner=True)
                has_started = True
            elif key in _NAME_KEYS and char == '"' and not name:
                text = decode_string((yield from read_value(cursor, context.codec)))
                name = context.check_name(text, must_exist=must_exist)
            elif key in _ARGUMENT_KEYS and arguments is None and not has_started:
                if name:
                    yield from self._stream_arguments(name)
                    has_started = True
                else:
                    arguments = yield from read_value(cursor, context.codec)
            elif must_exist and key not in ("type", "id", "name", "function"):
                raise NotACallError
            else:
                yield from read_value(cursor, context.codec)
        if not has_started:
            if not name:
                raise NotACallError
            context.sink.start_call(name)
            context.sink.write_arguments(_unwrap(arguments))
        if not is_inner:
            context.sink.end_call()

    def _stream_arguments(self, name: str) -> Reading[None]:
        context, cursor = self._context, self._cursor
        if (yield from cursor.require()) != "{":
            arguments = _unwrap((yield from read_value(cursor, context.codec)))
            context.sink.start_call(name)
            context.sink.write_arguments(arguments)
            return
        context.sink.start_call(name)
        if not (yield from context.stream_arguments(self._stops)):
            raise NotACallError


class NamedJsonCallReader:
    """Parser of `NamedJsonSyntax`."""

    def __init__(self, context: CallContext, syntax: NamedJsonSyntax) -> None:
        self._context = context
        self._cursor = context.cursor
        self._syntax = syntax = context.encode_syntax(syntax)
        self._name_stops = LiteralSet((*syntax.name_end, syntax.id_open, "{", syntax.call_close))
        self._id_stops = LiteralSet(syntax.name_end)
        self._call_stops = LiteralSet((syntax.call_close, syntax.call_open, syntax.section_close))
        self._section_stops = LiteralSet((syntax.call_open, syntax.section_close))
        self.triggers = tuple(filter(None, (syntax.section_open, syntax.call_open)))
        self.start_triggers: tuple[str, ...] = ()

    def read(self) -> Reading[None]:
        """Read a section of calls, or one call without a section."""
        context, cursor = self._context, self._cursor
        calls = context.sink.calls
        if not self._syntax.section_open or not (
            yield from cursor.accept(self._syntax.section_open)
        ):
            yield from self._read_call()
            return
        has_noise = False
        while True:
            if context.sink.calls > calls:
                yield from context.skip_until(self._section_stops)
            else:
                noise, _ = yield from cursor.read_until(self._section_stops)
                has_noise = has_noise or (not noise.isspace() and bool(noise))
            if (yield from cursor.accept(self._syntax.section_close)):
                if context.sink.calls == calls and has_noise:
                    raise NotACallError
                return
            yield from self._read_call()

    def _read_call(self) -> Reading[None]:
        context, cursor, syntax = self._context, self._cursor, self._syntax
        yield from cursor.expect(self._syntax.call_open)
        yield from cursor.skip()
        if (yield from cursor.match("[", "{")):
            yield from self._read_objects()
            return
        if self._syntax.name_prefix:
            yield from cursor.expect(self._syntax.name_prefix)
        text, stop = yield from cursor.read_until(self._name_stops)
        if syntax.has_index:
            text = _ID_SUFFIX.sub("", text.strip())
        name = context.check_name(text.strip().removeprefix(syntax.optional_prefix))
        if stop == self._syntax.id_open and stop:
            yield from cursor.read_until(self._id_stops)
        yield from cursor.accept(*self._syntax.name_end)
        if syntax.arguments_open:
            yield from context.accept_after_space(syntax.arguments_open)
        yield from cursor.skip()
        char = yield from cursor.require()
        context.sink.start_call(name)
        is_well_formed = True
        if char == "{":
            is_well_formed = yield from context.stream_arguments(self._call_stops)
        elif self._syntax.call_close and (yield from cursor.match(self._syntax.call_close)):
            context.sink.write_arguments("{}")
        else:
            yield from context.write_rest(self._call_stops)
        if is_well_formed:
            yield from context.accept_after_space(syntax.arguments_close)
        if self._syntax.call_close:
            yield from context.skip_until(self._call_stops)
            yield from cursor.accept(self._syntax.call_close)
        context.sink.end_call()

    def _read_objects(self) -> Reading[None]:
        """Read calls as JSON objects, as older models of the family write them."""
        reader = JsonCallReader(
            self._context, JsonSyntax(open=("",), close=self._syntax.call_close, is_array=True)
        )
        yield from reader.read_objects()


def _unwrap(arguments: str | None) -> str:
    """Return arguments as an object's text, if they are missing or a string that holds one."""
    if arguments is None or arguments == "null":
        return "{}"
    text = decode_string(arguments) if arguments.startswith('"') else None
    return text if text is not None and text.lstrip().startswith("{") else arguments
