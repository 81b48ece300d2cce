"""Calls as tags with one element for each argument.

Formats of Qwen3-Coder, GLM, DeepSeek since V3.2 and Kimi K3.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

from argosy.engine.serving.output_parsing.call_reader import CallContext, discard
from argosy.engine.serving.output_parsing.cursor import (
    WHITE_SPACE,
    LiteralSet,
    NotACallError,
    OutputEndedError,
    Reading,
)
from argosy.engine.serving.output_parsing.typed_values import ValueWriter

_ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class TagSyntax:
    """A call is a tag with a name, and an element for each argument.

    Args:
        section_open: Text before all calls, or empty.
        section_close: Text after all calls, or empty.
        wrapper_open: Text around one call, or empty.
        wrapper_close: Text after one call, or empty.
        name_open: Text before the name.
        name_close: Text after the name.
        call_close: Text after the arguments. Empty if `wrapper_close` ends the call.
        key_open: Text before the name of an argument.
        key_close: Text after the name of an argument, up to the value if there are no attributes.
        value_open: Text between the name and the value, or empty.
        value_close: Text after the value.
        tag_end: Text that ends the attributes of a tag, or empty if tags have none.
        type_attribute: Attribute that holds the type of an argument, or empty if the schema decides.
        has_escapes: Whether names are escaped as in XML.
        has_bare_calls: Whether models leave out the wrapper.
        has_line_breaks: Whether a value stands on lines of its own.
        separator: White space between elements that the model was trained to write.
        call_separator: White space between calls.
        has_index: Whether the tag of a call has its number as an attribute.
    """

    section_open: str = ""
    section_close: str = ""
    wrapper_open: str = ""
    wrapper_close: str = ""
    name_open: str = ""
    name_close: str
    call_close: str = ""
    key_open: str
    key_close: str
    value_open: str = ""
    value_close: str
    tag_end: str = ""
    type_attribute: str = ""
    has_escapes: bool = False
    has_bare_calls: bool = False
    has_line_breaks: bool = False
    separator: str = ""
    call_separator: str = ""
    has_index: bool = False

    def escape(self, name: str) -> str:
        """Return the name of a tool or an argument as it stands in a tag."""
        return name.replace("&", "&amp;").replace('"', "&quot;") if self.has_escapes else name


class TaggedCallReader:
    """Parser of `TagSyntax`."""

    def __init__(self, context: CallContext, syntax: TagSyntax) -> None:
        self._context = context
        self._cursor = context.cursor
        self._syntax = syntax = context.encode_syntax(syntax)
        self._tag_stops = LiteralSet((syntax.tag_end,))
        self._key_stops = LiteralSet((syntax.key_close,))
        self._first_call = syntax.wrapper_open or syntax.name_open
        closers = (syntax.call_close, syntax.wrapper_close)
        self._closers = tuple(filter(None, closers))
        self._element_stops = LiteralSet((syntax.key_open, *closers, syntax.section_close))
        self._section_stops = LiteralSet((self._first_call, syntax.section_close))
        names: tuple[str, ...] = (syntax.name_close,)
        if not syntax.name_open:
            names = ("\n", syntax.key_open, syntax.wrapper_close)
        self._name_stops = LiteralSet(names)
        value_stops = [syntax.value_close]
        if syntax.has_line_breaks:
            value_stops += [syntax.key_open, syntax.call_close]
        elif not syntax.call_close:
            value_stops += [syntax.wrapper_close]
        self._value_stops = LiteralSet(value_stops)
        bare = syntax.name_open if syntax.has_bare_calls else ""
        self.triggers = tuple(
            dict.fromkeys(filter(None, (syntax.section_open, syntax.wrapper_open, bare)))
        ) or (syntax.name_open,)
        self.start_triggers: tuple[str, ...] = ()

    def read(self) -> Reading[None]:
        """Read a section of calls, or one call without a section."""
        context, cursor = self._context, self._cursor
        calls = context.sink.calls
        if not self._syntax.section_open:
            yield from self._read_call()
            return
        yield from cursor.expect(self._syntax.section_open)
        while True:
            if context.sink.calls > calls:
                yield from context.skip_until(self._section_stops)
            else:
                yield from cursor.skip()
            if (yield from cursor.accept(self._syntax.section_close)):
                return
            yield from self._read_call()

    def _read_call(self) -> Reading[None]:
        context, cursor = self._context, self._cursor
        is_wrapped = bool(self._syntax.wrapper_open) and bool(
            (yield from cursor.accept(self._syntax.wrapper_open))
        )
        if is_wrapped:
            yield from cursor.skip()
        if self._syntax.name_open:
            yield from cursor.expect(self._syntax.name_open)
        text, _ = yield from cursor.read_until(self._name_stops)
        must_exist = self._syntax.has_bare_calls and not is_wrapped
        name = context.check_name(self._unescape(text), must_exist=must_exist)
        if self._syntax.name_open:
            yield from cursor.accept(self._syntax.name_close)
        is_empty = False
        if self._syntax.tag_end:
            attributes, _ = yield from cursor.read_until(self._tag_stops)
            yield from cursor.accept(self._syntax.tag_end)
            is_empty = attributes.rstrip().endswith("/")
        context.sink.start_call(name)
        if is_empty:
            context.sink.write_arguments("{}")
            context.sink.end_call()
            return
        yield from self._read_arguments(name)

    def _read_arguments(self, name: str) -> Reading[None]:
        """Read all arguments and the end of the call."""
        context, cursor = self._context, self._cursor
        tool = context.tools.get(name)
        types = {} if tool is None else tool.parameter_types
        keys: set[str] = set()
        while True:
            yield from context.skip_until(self._element_stops)
            if not (yield from cursor.accept(self._syntax.key_open)):
                break
            key, declared = yield from self._read_key()
            if key in keys:
                yield from self._read_value(
                    ValueWriter(discard, context.codec, ()), types.keys() - keys
                )
                continue
            keys.add(key)
            context.sink.write_arguments("{" if len(keys) == 1 else ", ")
            context.sink.write_arguments('"')
            context.sink.write_string(key)
            context.sink.write_arguments('": ')
            writer = ValueWriter(
                context.sink.write_arguments,
                context.codec,
                types.get(key, frozenset()) if declared is None else declared,
            )
            yield from self._read_value(writer, types.keys() - keys)
        if self._syntax.call_close and (yield from cursor.accept(self._syntax.call_close)):
            if self._syntax.wrapper_close:
                yield from context.accept_after_space(self._syntax.wrapper_close)
        elif self._syntax.wrapper_close:
            yield from cursor.accept(self._syntax.wrapper_close)
        context.sink.write_arguments("}" if keys else "{}")
        context.sink.end_call()

    def _read_key(self) -> Reading[tuple[str, frozenset[str] | None]]:
        """Read the name of an argument, and its declared type if the tag has one, up to the value."""
        cursor, syntax = self._cursor, self._syntax
        key, _ = yield from cursor.read_until(self._key_stops)
        yield from cursor.accept(self._syntax.key_close)
        declared: frozenset[str] | None = None
        attributes = ""
        if self._syntax.tag_end:
            attributes, _ = yield from cursor.read_until(self._tag_stops)
            yield from cursor.accept(self._syntax.tag_end)
        if syntax.type_attribute:
            value = dict(_ATTRIBUTE.findall(attributes)).get(syntax.type_attribute, "")
            declared = frozenset({"string"} if value in ("true", "string") else {"value"})
        if self._syntax.value_open:
            yield from self._context.accept_after_space(self._syntax.value_open)
        return self._unescape(self._context.codec.decode(key.strip())), declared

    def _unescape(self, text: str) -> str:
        return html.unescape(text) if self._syntax.has_escapes else text

    def _read_value(self, writer: ValueWriter, other_keys: set[str]) -> Reading[None]:
        """Read a value and what closes it.

        A value on lines of its own ends with a tag at the start of a line. Models leave out closing tags: the next tag
        ends a value as well, if what follows shows that it is no part of the value.
        """
        cursor = self._cursor
        has_line_breaks = self._syntax.has_line_breaks and bool((yield from cursor.accept("\n")))
        held = ""
        while True:
            end, literal = self._value_stops.search(
                cursor.text, cursor.position, is_final=cursor.is_final
            )
            text = held + cursor.text[cursor.position : end]
            cursor.position = end
            held = "\n" if has_line_breaks and text.endswith("\n") else ""
            text = text.removesuffix(held)
            writer.write(text)
            if not literal:
                if cursor.is_final:
                    raise OutputEndedError
                cursor.release()
                yield
                continue
            is_line = bool(held) or not has_line_breaks
            cursor.position += len(literal)
            ends = yield from self._ends_value(literal, other_keys, is_line=is_line)
            if ends:
                writer.end()
                if literal != self._syntax.value_close:
                    cursor.position -= len(literal)
                return
            writer.write(held + literal)
            held = ""

    def _ends_value(self, literal: str, other_keys: set[str], *, is_line: bool) -> Reading[bool]:
        """Return whether a tag that has just been read ends a value."""
        cursor = self._cursor
        if literal == self._syntax.value_close:
            if is_line:
                return True
            return (yield from self._is_followed_by(self._syntax.key_open, self._syntax.call_close))
        if not is_line and literal != self._syntax.wrapper_close:
            return False
        if literal == self._syntax.key_open:
            start = cursor.position
            try:
                key, _ = yield from cursor.read_until(self._key_stops, limit=256)
            except (NotACallError, OutputEndedError):
                key = ""
            cursor.position = start
            return key.strip() in other_keys
        if literal == self._syntax.call_close:
            return (yield from self._is_followed_by(self._syntax.wrapper_close, ""))
        return (yield from self._is_followed_by(self._syntax.wrapper_open, ""))

    def _is_followed_by(self, *literals: str) -> Reading[bool]:
        """Return whether one of `literals` follows after white space. An empty one stands for the end of the output."""
        cursor = self._cursor
        start = cursor.position
        yield from cursor.skip(WHITE_SPACE)
        literal = yield from cursor.match(*filter(None, literals))
        at_end = "" in literals and not (yield from cursor.peek())
        cursor.position = start
        return bool(literal) or at_end
