"""Incremental parser of model output: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from argosy.engine.serving.output_parsing.call_reader import CallContext, CallReader
from argosy.engine.serving.output_parsing.cursor import (
    WHITE_SPACE,
    Cursor,
    LiteralSet,
    MarkerCodec,
    NotACallError,
    OutputEnded,
    Reading,
)
from argosy.engine.serving.output_parsing.events import OutputEvent
from argosy.engine.serving.output_parsing.formats import OutputFormat
from argosy.engine.serving.output_parsing.harmony import HarmonyReader, HarmonySyntax
from argosy.engine.serving.output_parsing.json_calls import (
    JsonCallReader,
    JsonSyntax,
    NamedJsonCallReader,
    NamedJsonSyntax,
)
from argosy.engine.serving.output_parsing.mapping_calls import MappingCallReader, MappingSyntax
from argosy.engine.serving.output_parsing.pieces import Piece
from argosy.engine.serving.output_parsing.python_calls import PythonCallReader, PythonSyntax
from argosy.engine.serving.output_parsing.sink import EventSink
from argosy.engine.serving.output_parsing.tagged_calls import TaggedCallReader, TagSyntax
from argosy.engine.serving.output_parsing.tools import Tool


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
        self._format = output_format
        self._cursor = Cursor()
        self._codec = MarkerCodec(output_format.vocabulary)
        self._sink = EventSink(
            self._codec,
            self._cursor,
            trims_content=output_format.trims_content,
            trims_reasoning=output_format.trims_reasoning,
        )
        self._in_reasoning = in_reasoning
        context = CallContext(
            self._cursor, self._codec, self._sink, {tool.name: tool for tool in tools}
        )
        self._harmony: HarmonyReader | None = None
        self._calls: CallReader | None = None
        if isinstance(output_format.syntax, HarmonySyntax):
            self._harmony = HarmonyReader(
                context, in_reasoning=in_reasoning, parse_calls=parse_calls
            )
        elif parse_calls:
            self._calls = _create_reader(output_format, context)
        encode = self._codec.encode
        self._openers = tuple(encode(block.open) for block in output_format.thinking)
        self._labels = tuple(block.label for block in output_format.thinking if block.label) or ("",)
        self._closers = tuple(encode(block.close) for block in output_format.thinking)
        self._token_markers = frozenset(encode(text) for text in output_format.vocabulary)
        self._ignored = tuple(map(encode, output_format.ignored))
        triggers = () if self._calls is None else self._calls.triggers
        self._content_stops = LiteralSet(
            (*self._openers, *self._closers, *self._ignored, *triggers)
        )
        self._reasoning_enders = tuple(map(encode, output_format.reasoning_enders))
        if output_format.call_ends_reasoning:
            self._reasoning_enders += triggers
        self._reasoning_stops = LiteralSet((*self._closers, *self._reasoning_enders))
        self._run = self._read_harmony() if self._harmony else self._read_output()
        self._is_done = False
        self._advance()

    @property
    def in_reasoning(self) -> bool:
        """Whether the next piece belongs to a reasoning block, or ends it."""
        return self._in_reasoning if self._harmony is None else self._harmony.in_reasoning

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

    def _read_harmony(self) -> Reading[None]:
        assert self._harmony is not None
        try:
            yield from self._harmony.read()
        except OutputEnded:
            return

    def _read_output(self) -> Reading[None]:
        if self._in_reasoning:
            yield from self._read_reasoning()
        while not (self._cursor.is_final and self._cursor.at_end):
            yield from self._read_content()
            self._cursor.release()
        self._sink.flush_content()

    def _read_content(self) -> Reading[None]:
        """Read content up to and with the next marker that is no content."""
        cursor, sink = self._cursor, self._sink
        if self._calls is not None and self._calls.start_triggers and not sink.has_text:
            yield from self._read_space()
            if (yield from cursor.match(*self._calls.start_triggers)) and (
                yield from self._try_call("")
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
            self._in_reasoning = literal in self._openers
            yield from self._read_thinking_marker(literal)
        elif literal in self._ignored:
            cursor.position += len(literal)
        else:
            yield from self._try_call(literal)

    def _read_space(self) -> Reading[None]:
        cursor = self._cursor
        start = cursor.position
        yield from cursor.skip()
        self._sink.write_content(cursor.text[start : cursor.position])

    def _read_thinking_marker(self, literal: str) -> Reading[None]:
        """Read a marker of reasoning within content. Text that looks like one counts only before the answer."""
        cursor, sink = self._cursor, self._sink
        cursor.position += len(literal)
        if sink.has_text and literal not in self._token_markers:
            self._in_reasoning = False
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
        self._in_reasoning = True
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
            if literal in self._closers and literal:
                cursor.position += len(literal)
                break
            if literal in self._reasoning_enders and literal:
                if not self._format.call_ends_reasoning or (yield from self._try_call(literal)):
                    self._in_reasoning = False
                    return
                continue
            if cursor.is_final:
                sink.flush_reasoning()
                return
            cursor.release()
            yield
        self._in_reasoning = False
        sink.begin_text(is_answer=True)

    def _try_call(self, trigger: str) -> Reading[bool]:
        """Read calls, and return whether there was one. Else the trigger becomes text."""
        assert self._calls is not None
        cursor, sink = self._cursor, self._sink
        calls = sink.calls
        start = cursor.mark = cursor.position
        try:
            yield from self._calls.read()
        except NotACallError:
            if sink.calls > calls:
                return True
        except OutputEnded:
            if trigger or sink.calls > calls:
                cursor.position = len(cursor.text)
                return True
        else:
            cursor.mark = None
            return True
        cursor.mark = None
        cursor.position = start + len(trigger)
        if self._in_reasoning:
            sink.write_reasoning(trigger)
        elif trigger:
            sink.write_content(trigger)
        else:
            sink.write_content(cursor.text[start])
            cursor.position += 1
        return False


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


__all__ = ["WHITE_SPACE", "OutputParser"]
