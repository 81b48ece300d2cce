"""Choice whose output is parsed into reasoning, content and tool calls."""

from __future__ import annotations

from collections import Counter

from argosy.constraints import validate_document
from argosy.engine.engine_request import EngineRequest
from argosy.engine.serving.core_messages import Delta
from argosy.engine.serving.output_parsing import OutputParser, Piece
from argosy.engine.serving.output_parsing.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentText,
    OutputEvent,
    ReasoningText,
)
from argosy.engine.serving.text.choice import Choice, PromptState
from argosy.engine.serving.text.custom_tool_input import CustomInputDecoder
from argosy.engine.serving.text.detokenizer import Detokenizer
from argosy.engine.serving.text.output_plan import OutputPlan
from argosy.engine.serving.text.tokenizer import Tokenizer

_EVENT_NAMES: dict[type[OutputEvent], str] = {
    ReasoningText: "reasoning",
    ContentText: "content",
    CallStart: "call_start",
    CallArguments: "call_arguments",
    CallEnd: "call_end",
}


class ParsedChoice(Choice):
    """Choice whose output is parsed into `new_events`. Its `new_text` stays empty.

    Resumed tokens pass through the parser without output, so that it continues exactly where the resumed stream ended.
    """

    def __init__(
        self,
        index: int,
        request: EngineRequest,
        prompt: PromptState,
        tokenizer: Tokenizer,
        *,
        plan: OutputPlan,
        is_complete: bool = False,
    ) -> None:
        self.plan = plan
        self.reasoning_tokens = 0
        """Output tokens inside the reasoning block, without its markers. Includes resumed tokens."""
        self.custom_calls: dict[int, CustomInputDecoder] = {}
        """Decoders of the calls of custom tools by call number. All other calls are calls of functions."""
        self.started_calls = 0
        self.ended_calls = 0
        """Tool calls that the output completed. Fewer than `started_calls` if one was cut or malformed."""
        self.event_counts: Counter[str] = Counter()
        """Number of parser events by kind, of resumed tokens too."""
        self.document_problem: str | None = None
        """Why the finished content does not match its schema, which was relaxed. None if it does."""
        self._document: list[str] = []
        self._custom_tools = {tool.name for tool in plan.tools if tool.kind == "custom"}
        if plan.output_format is None:
            raise ValueError("the plan has no output format; use a Choice")
        self._parser = OutputParser(
            plan.output_format,
            plan.tools,
            in_reasoning=plan.in_reasoning,
            parse_calls=plan.parse_calls,
        )
        self.new_events: list[OutputEvent] = []
        """Parsed output since the last `clear_output`."""
        super().__init__(index, request, prompt, tokenizer, is_complete=is_complete)
        self._push_tokens(request.resumed_tokens)
        self.new_events.clear()

    def clear_output(self) -> None:
        """Forget the new output, which was encoded."""
        super().clear_output()
        self.new_events = []

    def _create_detokenizer(self, tokenizer: Tokenizer) -> Detokenizer:
        return Detokenizer(tokenizer, self.request.params, [], self.plan.markers)

    def _add_tokens(self, delta: Delta) -> None:
        self._count_tokens(delta, self._push_tokens(delta.tokens))

    def _push_tokens(self, tokens: list[int]) -> int:
        """Parse tokens and return how many belong to the choice.

        Tokens are parsed one by one, so that the reasoning tokens can be counted.
        """
        used_tokens = 0
        for token in tokens:
            was_reasoning = self._parser.in_reasoning
            pieces, used = self._detokenizer.push([token])
            used_tokens += used
            self._add_pieces(pieces)
            self.reasoning_tokens += was_reasoning and self._parser.in_reasoning
        return used_tokens

    def _add_pieces(self, pieces: list[Piece]) -> None:
        self._record(self._parser.feed(pieces))

    def _end_output(self) -> None:
        self._record(self._parser.finish())
        if (
            self.finish_reason == "stop"
            and self._detokenizer.stop_string is None
            and self.ended_calls
            and not self.plan.is_named_call
        ):
            self.finish_reason = "function_call" if self.plan.is_legacy else "tool_calls"
        document = self.plan.document
        if document is not None and self.finish_reason == "stop":
            self.document_problem = validate_document(document, "".join(self._document))

    def _record(self, events: list[OutputEvent]) -> None:
        for event in events:
            self.event_counts[_EVENT_NAMES[type(event)]] += 1
            match event:
                case CallStart(call, name):
                    self.started_calls += 1
                    if name in self._custom_tools:
                        self.custom_calls[call] = CustomInputDecoder()
                case CallArguments(call, text) if call in self.custom_calls:
                    text = self.custom_calls[call].feed(text)
                    if text:
                        self.new_events.append(CallArguments(call, text))
                    continue
                case CallEnd():
                    self.ended_calls += 1
                case ContentText(text) if self.plan.document is not None:
                    self._document.append(text)
            self.new_events.append(event)
