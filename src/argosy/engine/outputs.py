"""What `LLM` and `AsyncLLM` hand back, and how it is put together from deltas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from argosy.engine.serving.core_messages import Delta, EngineRequest, TokenLogprob
from argosy.engine.serving.preprocessing.request_processor import PreparedRequest
from argosy.engine.serving.text.choice import Choice
from argosy.engine.serving.text.choice import PromptState as PromptState
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import ApiError, FinishReason


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    """Which of the `n` continuations this is."""
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    """Why it ended; None while it goes on, or when `error` says what went wrong."""
    stop_reason: int | str | None
    """The stop string or stop token that ended it; None for the model's own end."""
    logprobs: list[TokenLogprob] | None
    """One for each of `token_ids`, when `SamplingParams.logprobs` asked for them."""
    error: str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Natural-log probability of the whole continuation, when log-probabilities are there."""
        if self.logprobs is None:
            return None
        return sum(entry.logprob for entry in self.logprobs)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its continuations."""

    request_id: str
    prompt: str
    """The text that was given, or that the given tokens or messages amount to."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprob] | None
    """For each token of the prompt but the first, when `SamplingParams.prompt_logprobs` is set."""
    cached_tokens: int
    """Prompt tokens that the prefix cache saved computing."""
    outputs: list[CompletionOutput]


@dataclass(slots=True)
class _CompletionState:
    """A continuation as far as it has come."""

    request: EngineRequest
    choice: Choice
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None

    @property
    def is_done(self) -> bool:
        return self.error is not None or self.choice.finish_reason is not None

    def push(self, delta: Delta) -> None:
        try:
            self.choice.push(delta)
        except ApiError as error:
            self.error = error.message
        piece = self.choice.drain()
        self.text += piece.text
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs

    def to_output(self) -> CompletionOutput:
        wanted = self.request.params.logprobs is not None
        return CompletionOutput(
            index=self.choice.index,
            text=self.text,
            token_ids=list(self.tokens),
            finish_reason=self.choice.finish_reason,
            stop_reason=self.choice.stop_reason,
            logprobs=list(self.logprobs) if wanted else None,
            error=self.error,
        )


class RequestOutputCollector:
    """Puts the continuations of one prompt together."""

    def __init__(
        self,
        request_id: str,
        prompt_text: str | None,
        prepared: PreparedRequest,
        tokenizer: Tokenizer,
    ) -> None:
        first = prepared.requests[0]
        self._request_id = request_id
        self._prompt_state = PromptState(first.prompt, None)
        self._has_prompt_logprobs = first.params.prompt_logprobs is not None
        ids = first.prompt
        self._prompt_text = (
            tokenizer.decode(ids, skip_special_tokens=False) if prompt_text is None else prompt_text
        )
        self._completions = {
            request.id: _CompletionState(
                request, Choice(index, request, self._prompt_state, tokenizer)
            )
            for index, request in enumerate(prepared.requests)
        }

    @property
    def requests(self) -> Iterable[EngineRequest]:
        """The engine requests, a lead before its siblings."""
        return (answer.request for answer in self._completions.values())

    @property
    def is_done(self) -> bool:
        """Whether every continuation has ended."""
        return all(answer.is_done for answer in self._completions.values())

    def push(self, delta: Delta) -> bool:
        """Take a delta; whether its continuation has ended (by a stop string: before the engine)."""
        answer = self._completions[delta.id]
        if not answer.is_done:
            answer.push(delta)
        return answer.is_done

    def to_output(self) -> RequestOutput:
        """Everything so far."""
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt_text,
            prompt_token_ids=self._prompt_state.token_ids,
            prompt_logprobs=list(self._prompt_state.logprobs)
            if self._has_prompt_logprobs
            else None,
            cached_tokens=self._prompt_state.cached_tokens,
            outputs=[answer.to_output() for answer in self._completions.values()],
        )
