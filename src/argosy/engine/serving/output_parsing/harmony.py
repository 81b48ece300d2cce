"""Messages on channels, as gpt-oss writes them (the harmony format).

A message has a header with a channel, a recipient and a content type. The analysis channel is reasoning, messages to
`functions.NAME` are calls, and all other messages on the channels `final` and `commentary` are the answer.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from argosy.engine.serving.output_parsing.call_reader import CallContext
from argosy.engine.serving.output_parsing.cursor import (
    Cursor,
    LiteralSet,
    MarkerCodec,
    OutputEndedError,
    Reading,
)
from argosy.engine.serving.output_parsing.sink import EventSink

START = "<|start|>"
END = "<|end|>"
MESSAGE = "<|message|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
CALL = "<|call|>"
RETURN = "<|return|>"
TOKENS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)
FUNCTIONS = "functions."
_ANSWER_CHANNELS = ("final", "commentary")
_RECIPIENT = re.compile(r"\bto=(\S+)")
_CHANNEL = re.compile(r"\s*(\w+)")
_CONTENT_TYPE = re.compile(r"\s+\w+\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonySyntax:
    """Calls are messages with a recipient."""


class _Header(NamedTuple):
    """Meaning of a message's header."""

    channel: str
    recipient: str
    rest: str
    """Text that belongs to no known part of a header."""


class HarmonyReader:
    """Parser of a whole output in harmony's format."""

    def __init__(self, context: CallContext, *, in_reasoning: bool, parse_calls: bool) -> None:
        self._context = context
        self._cursor: Cursor = context.cursor
        self._codec: MarkerCodec = context.codec
        self._sink: EventSink = context.sink
        self._parse_calls = parse_calls
        encode = self._codec.encode
        self._message = encode(MESSAGE)
        self._channel = encode(CHANNEL)
        self._constrain = encode(CONSTRAIN)
        self._start = encode(START)
        self._ends = tuple(map(encode, (END, CALL, RETURN)))
        self._header_stops = LiteralSet((self._message, self._start, *self._ends))
        self._message_stops = LiteralSet((*self._ends, self._start))
        self.in_reasoning = in_reasoning

    def read(self) -> Reading[None]:
        """Read messages up to the end of the output. The prompt has opened the first one."""
        cursor = self._cursor
        if self.in_reasoning:
            yield from self._read_message(_Header("analysis", "", ""))
            yield from cursor.accept(self._start)
        while not cursor.is_final or not cursor.at_end:
            try:
                text, stop = yield from cursor.read_until(self._header_stops, limit=sys.maxsize)
            except OutputEndedError:
                text, stop = cursor.text[cursor.position :], ""
                cursor.position = len(cursor.text)
            header = self._parse_header(text)
            cursor.position += len(stop)
            if stop == self._message:
                yield from self._read_message(header)
            elif header.rest:
                self._begin_text(header)
                self._write_text(header, header.rest)
            yield from cursor.accept(self._start)
            cursor.release()

    def _read_message(self, header: _Header) -> Reading[None]:
        """Read the body of a message, and the marker that ends it."""
        cursor = self._cursor
        if self._parse_calls and header.recipient.startswith(FUNCTIONS):
            yield from self._read_call(header.recipient.removeprefix(FUNCTIONS))
            return
        self._begin_text(header)
        self._write_text(header, header.rest)
        literal = yield from cursor.pass_text(
            self._message_stops, partial(self._write_text, header)
        )
        if literal != self._start:
            cursor.position += len(literal)
        self.in_reasoning = False

    def _read_call(self, name: str) -> Reading[None]:
        """Read the arguments of a call, and the marker that ends it."""
        context, cursor, sink = self._context, self._cursor, self._sink
        yield from cursor.skip()
        char = yield from cursor.require()
        sink.start_call(name)
        if char == "{":
            yield from context.stream_arguments(self._message_stops)
        else:
            yield from context.write_rest(self._message_stops)
        sink.end_call()
        yield from context.skip_until(self._message_stops)
        yield from cursor.accept(*self._ends)

    def _parse_header(self, text: str) -> _Header:
        """Return the meaning of a header. A later channel replaces an earlier one."""
        spaced = text.replace(self._constrain, " ").replace(self._channel, " ")
        recipients = _RECIPIENT.findall(spaced)
        recipient = recipients[-1] if recipients else ""
        if self._channel not in text:
            return _Header("final", recipient, "")
        described = text.rpartition(self._channel)[2].partition(self._constrain)[0]
        match = _CHANNEL.match(described)
        rest = _RECIPIENT.sub("", described if match is None else described[match.end() :])
        if not rest.strip() or _CONTENT_TYPE.fullmatch(rest):
            rest = ""
        channel = "" if match is None else match.group(1)
        return _Header("" if rest and channel != "final" else channel, recipient, rest)

    def _begin_text(self, header: _Header) -> None:
        self.in_reasoning = header.channel not in _ANSWER_CHANNELS
        self._sink.begin_text()

    def _write_text(self, header: _Header, text: str) -> None:
        """Write text of a message where its channel belongs. Messages to built-in tools are left out."""
        if header.recipient and header.recipient != "assistant":
            return
        if self.in_reasoning:
            self._sink.write_reasoning(text)
        else:
            self._sink.write_content(text)
