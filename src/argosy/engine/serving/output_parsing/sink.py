"""Events of a parsed output, in order, with the white space that belongs to no text left out."""

from __future__ import annotations

import msgspec

from argosy.engine.serving.output_parsing.cursor import Cursor, MarkerCodec
from argosy.engine.serving.output_parsing.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentText,
    OutputEvent,
    ReasoningText,
)
from argosy.engine.serving.output_parsing.json_text import quote_string

_TextKind = type[ContentText] | type[ReasoningText] | type[CallArguments]


class EventSink:
    """Collector of events. Decides which white space around reasoning and calls is part of the text.

    White space alone between reasoning, calls and the ends of the output is dropped.

    Args:
        codec: Mapping of special tokens.
        cursor: Position in the output, whose mark is cleared by the start of a call.
        trims_content: Whether white space before a call is a separator of the format.
        trims_reasoning: Whether white space at the end of reasoning, and line breaks behind it, are separators.
    """

    def __init__(
        self, codec: MarkerCodec, cursor: Cursor, *, trims_content: bool, trims_reasoning: bool
    ) -> None:
        self.calls = 0
        """Number of calls that have started."""
        self._codec = codec
        self._cursor = cursor
        self._trims_content = trims_content
        self._trims_reasoning = trims_reasoning
        self._events: list[OutputEvent] = []
        self._kind: _TextKind = ContentText
        self._parts: list[str] = []
        """Pieces of text of `_kind` that are no event yet."""
        self._held = ""
        """White space that is text only if more text follows."""
        self.has_text = False
        """Whether the current segment of content or reasoning has more than white space."""
        self._has_output = False
        """Whether there has been reasoning or a call."""
        self._after_reasoning = False
        self._arguments: list[str] = []

    def take(self) -> list[OutputEvent]:
        """Return the events since the last time."""
        self._flush()
        events, self._events = self._events, []
        return events

    def write_content(self, text: str) -> None:
        """Add encoded text of the answer."""
        text = self._held + self._codec.decode(text)
        if not self.has_text and self._after_reasoning and self._trims_reasoning:
            text = text.lstrip("\n")
        kept = self._hold_space(text, trims=self._trims_content)
        if kept:
            self.has_text = True
            self._add(ContentText, kept)

    def write_reasoning(self, text: str) -> None:
        """Add encoded text of the reasoning."""
        text = self._held + self._codec.decode(text)
        kept = self._hold_space(text, trims=self._trims_reasoning)
        if kept:
            self.has_text = True
            self._add(ReasoningText, kept)

    def _hold_space(self, text: str, *, trims: bool) -> str:
        """Hold back white space that may turn out to be no text, and return the text before it."""
        kept = text.rstrip() if trims or not (self.has_text or text.strip()) else text
        self._held = text[len(kept) :]
        return kept

    def begin_text(self, *, is_answer: bool = False) -> None:
        """Begin new reasoning or content. White space at the end of the old text is dropped if it is a separator.

        Args:
            is_answer: Whether this is content after a reasoning block, whose leading line breaks are separators.
        """
        self._held = ""
        self.has_text = False
        self._has_output = True
        self._after_reasoning = is_answer

    def flush_content(self) -> None:
        """End the output within content. Trailing white space belongs to the text, if there is any."""
        if self._held and (self.has_text or not self._has_output):
            self._add(ContentText, self._held)
        self._held = ""

    def flush_reasoning(self) -> None:
        """End the output within reasoning, whose trailing white space belongs to the text."""
        if self._held:
            self._add(ReasoningText, self._held)
        self._held = ""

    def start_call(self, name: str) -> None:
        """Begin a call, after which the parser cannot return to an earlier position."""
        self.begin_text()
        self._cursor.mark = None
        self._arguments.clear()
        self._flush()
        self._events.append(CallStart(self.calls, name))
        self.calls += 1

    def write_arguments(self, text: str) -> None:
        """Add JSON text of the arguments."""
        if text:
            self._arguments.append(text)
            self._add(CallArguments, text)

    def write_string(self, text: str) -> None:
        """Add encoded text as a part of a JSON string."""
        self.write_arguments(quote_string(self._codec.decode(text)))

    def end_call(self) -> None:
        """End a call. A call whose arguments are not one JSON object stays incomplete."""
        text = "".join(self._arguments)
        self._arguments.clear()
        try:
            is_object = isinstance(msgspec.json.decode(text), dict)
        except (msgspec.DecodeError, RecursionError):
            is_object = False
        if is_object:
            self._flush()
            self._events.append(CallEnd(self.calls - 1))

    def _add(self, kind: _TextKind, text: str) -> None:
        """Add a piece of text, which joins the piece before it if that is of the same kind."""
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._parts.append(text)

    def _flush(self) -> None:
        """Turn the last pieces of text into an event."""
        if not self._parts:
            return
        text = "".join(self._parts)
        self._parts.clear()
        if self._kind is CallArguments:
            self._events.append(CallArguments(self.calls - 1, text))
        elif self._kind is ReasoningText:
            self._events.append(ReasoningText(text))
        else:
            self._events.append(ContentText(text))
