"""Results of `LLM` and `AsyncLLM`, and the collector that assembles them from token deltas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import UNSET

from argosy.engine.engine_request import EngineRequest
from argosy.engine.scheduling import Logprob
from argosy.engine.serving.api_server.responses import build_message
from argosy.engine.serving.core_messages import Delta
from argosy.engine.serving.output_parsing.events import OutputEvent
from argosy.engine.serving.preprocessing.response_spec import ResponseSpec
from argosy.engine.serving.text.choice import Choice, ParsedChoice
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import ApiError, FinishReason, ResponseWarning, ToolCall


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """Continuation of a prompt."""

    index: int
    """Index among the `n` continuations of the prompt."""
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    """Reason for the end. None while the continuation runs, or if it failed with `error`."""
    stop_reason: int | str | None
    """Stop string or stop token that ended the text, "deadline" for the request's deadline, else None."""
    logprobs: list[Logprob] | None
    """Log-probabilities, one entry per token of `token_ids`. None unless `SamplingParams.logprobs` is set."""
    error: str | None = None
    reasoning: str = ""
    """Reasoning before the text of a chat answer."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Tool calls of a chat answer."""

    def finished(self) -> bool:
        """Return whether the continuation has ended."""
        return self.finish_reason is not None or self.error is not None

    @property
    def cumulative_logprob(self) -> float | None:
        """Natural logarithm of the continuation's probability. None without `logprobs`."""
        if self.logprobs is None:
            return None
        return sum(entry.logprob for entry in self.logprobs)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Prompt and its continuations."""

    request_id: str
    prompt: str
    """Prompt text. If the caller gave token ids or messages, their decoded text."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprob] | None
    """Log-probabilities of every prompt token but the first. None unless `SamplingParams.prompt_logprobs` is set."""
    cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""
    outputs: list[CompletionOutput]
    warnings: tuple[ResponseWarning, ...] = ()
    """Differences between what was asked for and what is done, for example a relaxed schema."""

    @property
    def finished(self) -> bool:
        """Whether every continuation has ended."""
        return all(output.finished() for output in self.outputs)

    @property
    def num_cached_tokens(self) -> int:
        """`cached_tokens` under vLLM's name."""
        return self.cached_tokens


def build_failed_output(request_id: str, n: int, error: str) -> RequestOutput:
    """Return the output of a prompt that cannot be served. Each of its `n` continuations has the error."""
    return RequestOutput(
        request_id=request_id,
        prompt="",
        prompt_token_ids=[],
        prompt_logprobs=None,
        cached_tokens=0,
        outputs=[CompletionOutput(index, "", [], None, None, None, error) for index in range(n)],
    )


@dataclass(slots=True)
class _CompletionState:
    """Mutable state of one continuation."""

    request: EngineRequest
    choice: Choice
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    events: list[OutputEvent] = field(default_factory=list)
    error: str | None = None

    @property
    def is_done(self) -> bool:
        return self.error is not None or self.choice.finish_reason is not None

    def push(self, delta: Delta) -> None:
        try:
            self.choice.push(delta)
        except ApiError as error:
            self.error = error.message
        self.text += self.choice.new_text
        if isinstance(self.choice, ParsedChoice):
            self.events += self.choice.new_events
        self.tokens += self.choice.new_tokens
        self.logprobs += self.choice.new_logprobs
        self.choice.clear_output()

    def to_output(self) -> CompletionOutput:
        has_logprobs = self.request.params.logprobs is not None
        text, reasoning, tool_calls = self.text, "", list[ToolCall]()
        if isinstance(self.choice, ParsedChoice):
            message = build_message(self.choice, self.events, self.request.id)
            text = message.content or ""
            reasoning = "" if message.reasoning is UNSET else message.reasoning
            tool_calls = [] if message.tool_calls is UNSET else message.tool_calls
        return CompletionOutput(
            index=self.choice.index,
            text=text,
            reasoning=reasoning,
            tool_calls=tool_calls,
            token_ids=list(self.tokens),
            finish_reason=self.choice.finish_reason,
            stop_reason=self.choice.stop_reason,
            logprobs=list(self.logprobs) if has_logprobs else None,
            error=self.error,
        )


class RequestOutputCollector:
    """Assembles the continuations of one prompt from deltas."""

    def __init__(
        self,
        request_id: str,
        prompt_text: str | None,
        spec: ResponseSpec,
        tokenizer: Tokenizer,
    ) -> None:
        self._request_id = request_id
        self._prompt = spec.prompts[0]
        self._has_prompt_logprobs = spec.requests[0].params.prompt_logprobs is not None
        self._prompt_text = (
            tokenizer.decode(self._prompt.token_ids, skip_special_tokens=False)
            if prompt_text is None
            else prompt_text
        )
        self._warnings = tuple(spec.plan.warnings)
        self._completions = {
            choice.request.id: _CompletionState(choice.request, choice) for choice in spec.choices
        }

    @property
    def requests(self) -> Iterable[EngineRequest]:
        """Engine requests of the prompt. The lead, whose KV the siblings share, is first."""
        return (completion.request for completion in self._completions.values())

    @property
    def is_done(self) -> bool:
        """Whether every continuation has ended."""
        return all(completion.is_done for completion in self._completions.values())

    def push(self, delta: Delta) -> bool:
        """Add a delta and return whether its continuation has ended.

        A stop string ends a continuation before the engine ends the request.
        """
        completion = self._completions[delta.id]
        if not completion.is_done:
            completion.push(delta)
        return completion.is_done

    def to_output(self) -> RequestOutput:
        """Return the cumulative output."""
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt_text,
            prompt_token_ids=self._prompt.token_ids,
            prompt_logprobs=list(self._prompt.logprobs) if self._has_prompt_logprobs else None,
            cached_tokens=self._prompt.cached_tokens,
            outputs=[completion.to_output() for completion in self._completions.values()],
            warnings=self._warnings,
        )
