"""Incremental parser of model output: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from argosy.constraints import Tool
from argosy.engine.serving.output_parsing.call_reader import CallContext, CallReader
from argosy.engine.serving.output_parsing.cursor import (
    Cursor,
    MarkerCodec,
    OutputEndedError,
    Reading,
)
from argosy.engine.serving.output_parsing.events import OutputEvent
from argosy.engine.serving.output_parsing.harmony import HarmonyReader, HarmonySyntax
from argosy.engine.serving.output_parsing.json_calls import (
    JsonCallReader,
    JsonSyntax,
    NamedJsonCallReader,
    NamedJsonSyntax,
)
from argosy.engine.serving.output_parsing.mapping_calls import MappingCallReader, MappingSyntax
from argosy.engine.serving.output_parsing.output_format import OutputFormat
from argosy.engine.serving.output_parsing.pieces import Piece
from argosy.engine.serving.output_parsing.python_calls import PythonCallReader, PythonSyntax
from argosy.engine.serving.output_parsing.sink import EventSink
from argosy.engine.serving.output_parsing.tagged_calls import TaggedCallReader, TagSyntax
from argosy.engine.serving.output_parsing.text_reader import TextReader


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
