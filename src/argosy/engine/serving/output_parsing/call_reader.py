"""Common parts of the parsers of tool calls."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from argosy.constraints import Tool
from argosy.engine.serving.output_parsing.cursor import (
    WHITE_SPACE,
    Cursor,
    LiteralSet,
    MarkerCodec,
    NotACallError,
    OutputEndedError,
    Reading,
)
from argosy.engine.serving.output_parsing.json_text import (
    MalformedJsonError,
    Write,
    read_structure,
)
from argosy.engine.serving.output_parsing.sink import EventSink

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Syntax = TypeVar("Syntax", bound="DataclassInstance")
_NAME = re.compile(r"[^\s\"'{}<>()\ud800-\udfff]{1,256}")


class CallReader(Protocol):
    """Parser of the tool calls of one syntax. Literals are encoded."""

    triggers: tuple[str, ...]
    """Literals that begin calls anywhere in the answer."""
    start_triggers: tuple[str, ...]
    """Literals that begin calls only where the answer begins, or after another call."""

    def read(self) -> Reading[None]:
        """Read calls from the position of a trigger.

        Raises:
            NotACallError: The text is not a call.
            OutputEndedError: The output ends before the end of the calls.
        """
        ...


@dataclass(frozen=True, slots=True)
class CallContext:
    """Input, output and tools of a parser of calls."""

    cursor: Cursor
    codec: MarkerCodec
    sink: EventSink
    tools: Mapping[str, Tool]

    def encode_syntax(self, syntax: Syntax) -> Syntax:
        """Return a syntax, a dataclass, in whose texts special tokens are characters of the codec."""
        encode = self.codec.encode
        encoded: dict[str, object] = {}
        for each in fields(syntax):
            value = getattr(syntax, each.name)
            if isinstance(value, str):
                encoded[each.name] = encode(value)
            elif isinstance(value, tuple):
                encoded[each.name] = tuple(map(encode, value))
        return replace(syntax, **encoded)

    def check_name(self, text: str | None, *, must_exist: bool = False) -> str:
        """Return a valid name of a tool.

        Raises:
            NotACallError: The text cannot be a name, or it is no tool's name although it must be one.
        """
        name = "" if text is None else text.strip()
        if _NAME.fullmatch(name) is None or (must_exist and name not in self.tools):
            raise NotACallError
        return name

    def stream_arguments(self, stops: LiteralSet) -> Reading[bool]:
        """Pass JSON arguments on as they arrive. Return whether they are well-formed.

        Malformed arguments are passed on as they are, up to one of `stops`.

        Raises:
            OutputEndedError: The output ends before the arguments.
        """
        try:
            yield from read_structure(self.cursor, self.codec, self.sink.write_arguments)
        except MalformedJsonError:
            yield from self.write_rest(stops)
            return False
        return True

    def write_rest(self, stops: LiteralSet) -> Reading[None]:
        """Pass all text up to one of `stops` on as arguments.

        Raises:
            OutputEndedError: The output ends before one of `stops`.
        """
        yield from self._pass_text(
            stops, lambda text: self.sink.write_arguments(self.codec.decode(text))
        )

    def skip_until(self, stops: LiteralSet) -> Reading[None]:
        """Skip text that has no meaning, up to one of `stops`.

        Raises:
            OutputEndedError: The output ends before one of `stops`.
        """
        yield from self._pass_text(stops, discard)

    def _pass_text(self, stops: LiteralSet, write: Write) -> Reading[None]:
        if not (yield from self.cursor.pass_text(stops, write)):
            raise OutputEndedError

    def accept_after_space(self, *literals: str, also_skip: str = "") -> Reading[bool]:
        """Read white space and one of `literals`, or nothing. Return whether a literal was read.

        Args:
            literals: Texts to read. Empty ones are ignored.
            also_skip: Characters that are skipped as white space is.
        """
        cursor = self.cursor
        start = cursor.position
        yield from cursor.skip(WHITE_SPACE + also_skip)
        if any(literals) and (yield from cursor.accept(*filter(None, literals))):
            return True
        cursor.position = start
        return False


def discard(text: str) -> None:
    """Take text that has no meaning, such as the value of a repeated argument."""
    del text
