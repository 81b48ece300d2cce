"""Parsing of output that consists of reasoning, text and calls behind markers."""

from __future__ import annotations

from argosy.engine.serving.output_parsing.call_reader import CallContext, CallReader
from argosy.engine.serving.output_parsing.cursor import (
    LiteralSet,
    NotACallError,
    OutputEndedError,
    Reading,
)
from argosy.engine.serving.output_parsing.output_format import OutputFormat


class TextReader:
    """Parser of a whole output with markers around reasoning and calls.

    Args:
        output_format: Format of the model.
        context: Input and output.
        calls: Parser of calls, or None if their text is content.
        in_reasoning: Whether the prompt has opened the reasoning block.
    """

    def __init__(
        self,
        output_format: OutputFormat,
        context: CallContext,
        calls: CallReader | None,
        *,
        in_reasoning: bool,
    ) -> None:
        self.in_reasoning = in_reasoning
        """Whether the next text belongs to a reasoning block."""
        self._cursor = context.cursor
        self._sink = context.sink
        self._calls = calls
        encode = context.codec.encode
        self._openers = tuple(encode(block.open) for block in output_format.thinking)
        self._closers = tuple(encode(block.close) for block in output_format.thinking)
        self._labels = tuple(block.label for block in output_format.thinking) or ("",)
        self._tokens = frozenset(map(encode, output_format.vocabulary))
        self._ignored = tuple(map(encode, output_format.frame or ()))
        self._enders = tuple(map(encode, output_format.reasoning_enders))
        triggers = () if calls is None else calls.triggers
        self._content_stops = LiteralSet(
            (*self._openers, *self._closers, *self._ignored, *triggers)
        )
        self._reasoning_stops = LiteralSet(
            (
                *self._closers,
                *self._enders,
                *(triggers if output_format.call_ends_reasoning else ()),
            )
        )

    def read(self) -> Reading[None]:
        """Read the whole output."""
        if self.in_reasoning:
            yield from self._read_reasoning()
        while not (self._cursor.is_final and self._cursor.at_end):
            yield from self._read_content()
            self._cursor.release()
        self._sink.flush_content()

    def _read_content(self) -> Reading[None]:
        """Read content up to and with the next marker that is no content."""
        cursor, sink = self._cursor, self._sink
        calls = self._calls
        if calls is not None and calls.start_triggers and not sink.has_text:
            yield from self._read_space()
            if (yield from cursor.match(*calls.start_triggers)) and (
                yield from self._try_call(calls, "")
            ):
                return
        while True:
            end, literal = self._content_stops.search(
                cursor.text, cursor.position, is_final=cursor.is_final
            )
            sink.write_content(cursor.text[cursor.position : end])
            cursor.position = end
            if literal:
                break
            if cursor.is_final:
                return
            cursor.release()
            yield
        if literal in self._openers or literal in self._closers:
            self.in_reasoning = literal in self._openers
            yield from self._read_thinking_marker(literal)
        elif literal in self._ignored:
            cursor.position += len(literal)
        elif calls is not None:
            yield from self._try_call(calls, literal)

    def _read_space(self) -> Reading[None]:
        cursor = self._cursor
        start = cursor.position
        yield from cursor.skip()
        self._sink.write_content(cursor.text[start : cursor.position])

    def _read_thinking_marker(self, literal: str) -> Reading[None]:
        """Read a marker of reasoning within content. Text that looks like one counts only before the answer."""
        cursor, sink = self._cursor, self._sink
        cursor.position += len(literal)
        if sink.has_text and literal not in self._tokens:
            self.in_reasoning = False
            sink.write_content(literal)
        elif literal in self._openers:
            yield from self._read_reasoning()
        elif sink.has_text:
            sink.write_content(literal)
        else:
            sink.begin_text(is_answer=True)

    def _read_reasoning(self) -> Reading[None]:
        """Read reasoning behind its opening marker, and the closing marker."""
        cursor, sink = self._cursor, self._sink
        self.in_reasoning = True
        sink.begin_text()
        yield from cursor.accept(*self._labels)
        yield from cursor.accept("\n")
        yield from cursor.accept(*self._openers)
        while True:
            end, literal = self._reasoning_stops.search(
                cursor.text, cursor.position, is_final=cursor.is_final
            )
            sink.write_reasoning(cursor.text[cursor.position : end])
            cursor.position = end
            if literal and literal in self._closers:
                cursor.position += len(literal)
                break
            if literal:
                if literal in self._enders:
                    self.in_reasoning = False
                    return
                if self._calls is not None and (yield from self._try_call(self._calls, literal)):
                    self.in_reasoning = False
                    return
                continue
            if cursor.is_final:
                sink.flush_reasoning()
                return
            cursor.release()
            yield
        self.in_reasoning = False
        sink.begin_text(is_answer=True)

    def _try_call(self, reader: CallReader, trigger: str) -> Reading[bool]:
        """Read calls, and return whether there was one. Else the trigger becomes text."""
        cursor, sink = self._cursor, self._sink
        calls = sink.calls
        start = cursor.mark = cursor.position
        try:
            yield from reader.read()
        except NotACallError:
            if sink.calls > calls:
                return True
        except OutputEndedError:
            if trigger or sink.calls > calls:
                cursor.position = len(cursor.text)
                return True
        else:
            cursor.mark = None
            return True
        cursor.mark = None
        cursor.position = start + len(trigger)
        if self.in_reasoning:
            sink.write_reasoning(trigger)
        elif trigger:
            sink.write_content(trigger)
        else:
            sink.write_content(cursor.text[start])
            cursor.position += 1
        return False
