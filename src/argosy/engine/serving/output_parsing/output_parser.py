"""Incremental parser of model output: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from argosy.constraints import Tool
from argosy.engine.serving.output_parsing.call_reader import CallContext, CallReader
from argosy.engine.serving.output_parsing.cursor import (
    Cursor,
    LiteralSet,
    MarkerCodec,
    NotACallError,
    OutputEndedError,
    Reading,
)
from argosy.engine.serving.output_parsing.events import OutputEvent, Piece
from argosy.engine.serving.output_parsing.harmony import HarmonyReader, HarmonySyntax
from argosy.engine.serving.output_parsing.json_calls import (
    JsonCallReader,
    JsonSyntax,
    NamedJsonCallReader,
    NamedJsonSyntax,
)
from argosy.engine.serving.output_parsing.mapping_calls import MappingCallReader, MappingSyntax
from argosy.engine.serving.output_parsing.output_format import OutputFormat
from argosy.engine.serving.output_parsing.python_calls import PythonCallReader, PythonSyntax
from argosy.engine.serving.output_parsing.sink import EventSink
from argosy.engine.serving.output_parsing.tagged_calls import TaggedCallReader, TagSyntax


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
        literal = yield from cursor.pass_text(self._content_stops, sink.write_content)
        if not literal:
            return
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
            literal = yield from cursor.pass_text(self._reasoning_stops, sink.write_reasoning)
            if not literal:
                sink.flush_reasoning()
                return
            if literal in self._closers:
                break
            if literal in self._enders or (
                self._calls is not None and (yield from self._try_call(self._calls, literal))
            ):
                self.in_reasoning = False
                return
        cursor.position += len(literal)
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


class OutputParser:
    """Parser of one output. Never raises.

    The joined events depend only on the concatenated pieces. Events returned so far depend only on the pieces fed so
    far, so a parser that replays the same pieces continues exactly where another one stopped.

    Markers that are special tokens of the model count only as `MarkerToken`, other markers as text. Text that is not a
    well-formed call is content. A call that has started and turns out to be malformed, or is cut, has no `CallEnd`. An
    opening marker without the name of a tool at the end of the output is dropped.

    Args:
        output_format: Format of the model, adapted to its vocabulary.
        tools: Tools of the request.
        in_reasoning: Whether the prompt has opened the reasoning block.
        parse_calls: Whether calls are recognised. Else their text is content.
    """

    def __init__(
        self,
        output_format: OutputFormat,
        tools: Sequence[Tool],
        *,
        in_reasoning: bool,
        parse_calls: bool = True,
    ) -> None:
        self._cursor = Cursor()
        self._codec = MarkerCodec(output_format.vocabulary)
        self._sink = EventSink(
            self._codec,
            self._cursor,
            trims_content=output_format.trims_content,
            trims_reasoning=output_format.trims_reasoning,
        )
        context = CallContext(
            self._cursor, self._codec, self._sink, {tool.name: tool for tool in tools}
        )
        self._reader: HarmonyReader | TextReader
        if isinstance(output_format.syntax, HarmonySyntax):
            self._reader = HarmonyReader(
                context, in_reasoning=in_reasoning, parse_calls=parse_calls
            )
        else:
            calls = _create_reader(output_format, context) if parse_calls else None
            self._reader = TextReader(output_format, context, calls, in_reasoning=in_reasoning)
        self._run = self._read()
        self._is_done = False
        self._advance()

    @property
    def in_reasoning(self) -> bool:
        """Whether the next piece belongs to a reasoning block, or ends it."""
        return self._reader.in_reasoning

    def feed(self, pieces: Iterable[Piece]) -> list[OutputEvent]:
        """Add pieces and return the events that they decide."""
        self._cursor.text += self._codec.encode_pieces(pieces)
        self._advance()
        return self._sink.take()

    def finish(self) -> list[OutputEvent]:
        """End the output and return the last events."""
        self._cursor.is_final = True
        self._advance()
        return self._sink.take()

    def _advance(self) -> None:
        if not self._is_done:
            self._is_done = next(self._run, True) is True

    def _read(self) -> Reading[None]:
        try:
            yield from self._reader.read()
        except OutputEndedError:
            return


def _create_reader(output_format: OutputFormat, context: CallContext) -> CallReader | None:
    match output_format.syntax:
        case JsonSyntax() as syntax:
            return JsonCallReader(context, syntax)
        case NamedJsonSyntax() as syntax:
            return NamedJsonCallReader(context, syntax)
        case TagSyntax() as syntax:
            return TaggedCallReader(context, syntax)
        case PythonSyntax() as syntax:
            return PythonCallReader(context, syntax)
        case MappingSyntax() as syntax:
            return MappingCallReader(context, syntax)
        case _:
            return None
