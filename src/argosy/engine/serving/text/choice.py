"""Choices of a response, built from the core's deltas: plain text, or output that is parsed as the output plan says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from argosy.constraints import OutputConstraint, Relaxation, Tool, validate_document
from argosy.engine.engine_request import EngineRequest
from argosy.engine.execution.drafting.prediction import PredictionCursor
from argosy.engine.scheduling import Logprob
from argosy.engine.serving.core_messages import Delta, check_success
from argosy.engine.serving.output_parsing import OutputFormat, OutputParser, Piece
from argosy.engine.serving.output_parsing.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentText,
    OutputEvent,
    ReasoningText,
)
from argosy.engine.serving.text.custom_tool_input import CustomInputDecoder
from argosy.engine.serving.text.detokenizer import Detokenizer
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import (
    EarlyStopReason,
    FinishReason,
    ReasoningBlock,
    ResponseWarning,
    find_early_stop,
)

_EVENT_NAMES: dict[type[OutputEvent], str] = {
    ReasoningText: "reasoning",
    ContentText: "content",
    CallStart: "call_start",
    CallArguments: "call_arguments",
    CallEnd: "call_end",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlan:
    """Constraints of an output, and the way in which it is parsed."""

    output_format: OutputFormat | None = None
    """Format by which the output is parsed. None if it is plain text."""
    markers: Mapping[int, str] = field(default_factory=dict)
    """Text of each special token that structures the output."""
    tools: tuple[Tool, ...] = ()
    parse_calls: bool = False
    in_reasoning: bool = False
    """Whether the prompt has opened the reasoning block."""
    include_reasoning: bool = True
    """Whether the response contains the reasoning."""
    is_named_call: bool = False
    """Whether the request forced one named tool. Its finish reason is then `stop`, as with OpenAI's API."""
    is_legacy: bool = False
    """Whether the request used `functions`, whose one call is a `function_call`."""
    document: OutputConstraint | None = None
    """Constraint that is not enforced completely, so that the finished content is validated."""
    grammar: str = ""
    """Grammar of the output. Empty if it is not constrained."""
    compile_s: float | None = None
    """Seconds to compile the grammar, 0 if it was cached. None without a grammar."""
    reasoning: ReasoningBlock | None = None
    banned_token_ids: tuple[int, ...] = ()
    relaxations: tuple[tuple[str, Relaxation], ...] = ()
    """Request field and keyword of each part of a schema that is not enforced."""
    ignored_fields: tuple[str, ...] = ()
    """Fields of the request without effect on this output."""

    @property
    def warnings(self) -> list[ResponseWarning]:
        """A warning for each keyword that is not enforced."""
        return [
            ResponseWarning(
                code="schema_relaxed",
                message=f"The keyword '{item.keyword}' at {item.pointer} is not enforced: {item.reason}.",
                param=param,
            )
            for param, item in self.relaxations
        ]


@dataclass(slots=True)
class PromptState:
    """A prompt and the data that the engine reports about it, shared by the prompt's choices."""

    token_ids: list[int]
    text: str = ""
    """Text as the client sent it, or as the chat template rendered it. Dropped after the preparation unless echoed."""
    is_echoed: bool = False
    """Whether the response begins with the prompt (`echo`)."""
    logprobs: list[Logprob] = field(default_factory=list)
    """Log-probabilities of prompt positions 1, 2, ..., as far as they are known."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache. Stays 0 if the resumed stream already reported its own number."""
    is_resumed: bool = False
    """Whether the stream that this one resumes already reported the prompt's cached tokens."""
    ignored_fields: tuple[str, ...] = ()
    """Paths of the parts of a conversation that the prompt does not have."""
    block_names: bytes = b""
    """Names of the prompt's first full KV blocks, if they are cached."""


class Choice:
    """State of one choice. Uses no clock and does no I/O."""

    def __init__(
        self,
        index: int,
        request: EngineRequest,
        prompt: PromptState,
        tokenizer: Tokenizer,
        *,
        is_complete: bool = False,
    ) -> None:
        self.index = index
        self.request = request
        self.prompt = prompt
        self.finish_reason: FinishReason | None = "stop" if is_complete else None
        """Set from the start if the resumed stream already delivered the whole choice. Nothing is generated then."""
        self.stop_reason: int | str | None = None
        self.generated_tokens = 0
        """Output tokens that count so far, without resumed ones."""
        self.accepted_drafts = 0
        """Number of them that were drafts."""
        self.draft_saved_s = 0.0
        """Seconds by which drafts made them arrive earlier."""
        self.queue_s = 0.0
        """Seconds in the engine's queue."""
        self._eos_token_ids = frozenset(tokenizer.eos_token_ids) - set(
            request.params.stop_token_ids
        )
        self._detokenizer = self._create_detokenizer(tokenizer)
        self.prediction: PredictionCursor | None = None
        """Position of the output in the text that the request predicts, if it does."""
        if request.prediction:
            self.prediction = PredictionCursor(request.prediction)
            self.prediction.advance(request.resumed_tokens)
        self._text: list[str] = []
        self.new_tokens: list[int] = []
        """Tokens since the last `clear_output`."""
        self.new_logprobs: list[Logprob] = []
        """Log-probability of each of `new_tokens` if they are wanted."""

    @property
    def output_tokens(self) -> int:
        """Output tokens that count, including resumed ones."""
        return len(self.request.resumed_tokens) + self.generated_tokens

    @property
    def early_stop(self) -> EarlyStopReason | None:
        """Why the choice was ended early. None if it was not, or still runs."""
        return find_early_stop(self.finish_reason, self.stop_reason)

    @property
    def new_text(self) -> str:
        """Text since the last `clear_output`. Empty for choices that parse their output."""
        return "".join(self._text)

    def add_text(self, text: str) -> None:
        """Add text that the model did not generate, such as the beginning of the message that it continues."""
        self._text.append(text)

    def push(self, delta: Delta) -> None:
        """Add a delta.

        A stop string may end the choice (`finish_reason` is set) although the engine would continue.

        Raises:
            ApiError: 500 if the engine failed the request, 400 if the request itself is the cause, 499 if it was
                cancelled.
        """
        prompt = self.prompt
        if self.request.parent_id is None:
            prompt.logprobs += delta.prompt_logprobs
            if not prompt.is_resumed:
                prompt.cached_tokens = delta.cached_tokens or prompt.cached_tokens
            prompt.block_names = delta.prompt_block_names or prompt.block_names
        self._add_tokens(delta)
        if self._detokenizer.stop_string is not None:
            self.finish_reason = "stop"
            self.stop_reason = self._detokenizer.stop_string
            self._end_output()
        elif delta.finish_reason is not None:
            check_success(delta)
            if delta.finish_reason == "timeout":
                self.finish_reason, self.stop_reason = "length", "deadline"
            elif delta.finish_reason in ("stop", "length"):
                self.finish_reason = delta.finish_reason
            self._add_pieces([self._detokenizer.flush()])
            self._end_output()
            if delta.stop_token is not None and delta.stop_token not in self._eos_token_ids:
                self.stop_reason = delta.stop_token

    def _create_detokenizer(self, tokenizer: Tokenizer) -> Detokenizer:
        return Detokenizer(tokenizer, self.request.params, self.request.resumed_tokens)

    def _add_pieces(self, pieces: list[Piece]) -> None:
        """Add detokenized output. The text consists of strings only, because nothing asks for markers."""
        self._text += [piece for piece in pieces if isinstance(piece, str)]

    def _end_output(self) -> None:
        """Complete the output after its last piece. `finish_reason` is set already."""

    def _add_tokens(self, delta: Delta) -> None:
        pieces, used_tokens = self._detokenizer.push(delta.tokens)
        self._add_pieces(pieces)
        self._count_tokens(delta, used_tokens)

    def _count_tokens(self, delta: Delta, used_tokens: int) -> None:
        """Count the leading tokens of a delta that belong to the choice."""
        self.new_tokens += delta.tokens[:used_tokens]
        self.new_logprobs += delta.logprobs[:used_tokens]
        self.generated_tokens += used_tokens
        self.accepted_drafts += min(delta.accepted_drafts, max(0, used_tokens - 1))
        self.draft_saved_s += delta.draft_saved_s
        if self.prediction is not None:
            self.prediction.advance(delta.tokens[:used_tokens])

    def clear_output(self) -> None:
        """Forget the new output, which was encoded."""
        self._text, self.new_tokens, self.new_logprobs = [], [], []


class ScoringChoice(Choice):
    """A choice without output tokens (`max_tokens` 0). Only the prompt's log-probabilities matter."""

    def push(self, delta: Delta) -> None:
        """Add a delta. The one token that the engine samples is dropped."""
        super().push(delta)
        if self.finish_reason == "stop":
            self.finish_reason, self.stop_reason = "length", None

    def _add_tokens(self, delta: Delta) -> None:
        """Drop the tokens, since none belong to the response."""


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

    def add_text(self, text: str) -> None:
        self.new_events.append(ContentText(text))

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
