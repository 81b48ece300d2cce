"""One choice of an answer: turns its deltas into text, counts its tokens, and knows how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from argosy.engine.serving.core_messages import Delta, EngineRequest, TokenLogprob
from argosy.engine.serving.text.detokenizer import Detokenizer
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import ApiError, FinishReason


@dataclass(slots=True)
class PromptState:
    """A prompt and what the engine said of it; shared by the choices that continue it."""

    token_ids: list[int]
    echo_text: str | None
    """Its text, when the answer begins with it."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """For positions 1.., as far as they are known."""
    cached_tokens: int = 0
    """Found here; 0 where the stream that this one carries on has told how many it found."""
    is_resumed: bool = False
    """It has."""
    block_names: bytes = b""
    """Names of its first full KV blocks, where they are cached."""


class ChoiceOutput(NamedTuple):
    """What a choice got since the last `take`."""

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob]
    """One for each of `tokens`, when asked for."""
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class Choice:
    """The state of one choice. Pure: no clock, no I/O."""

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
        """Set from the start where the whole answer was told before: nothing is generated."""
        self.stop_reason: int | str | None = None
        self.generated_tokens = 0
        """Output tokens that count so far, those of a resume not included."""
        self._eos_token_ids = frozenset(tokenizer.eos_token_ids) - set(
            request.params.stop_token_ids
        )
        self._detokenizer = Detokenizer(tokenizer, request.params, request.resumed_tokens)
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    @property
    def output_tokens(self) -> int:
        """Output tokens that count, those of a resume included."""
        return len(self.request.resumed_tokens) + self.generated_tokens

    @property
    def pending_tokens(self) -> list[int]:
        """The tokens that the next `take` will give; not to be changed."""
        return self._tokens

    def push(self, delta: Delta) -> None:
        """Take a delta. Raises ApiError when it says that the request failed.

        A stop string may end the choice (`finish` is set) although the engine would go on.
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
        elif delta.finish_reason == "error":
            reason = delta.error or "the engine gave no reason"
            raise ApiError(
                500, "engine_error", f"The engine could not finish the request: {reason}."
            )
        elif delta.finish_reason == "cancelled":
            raise ApiError(499, "cancelled", "The request was cancelled before it was done.")
        elif delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self._text.append(self._detokenizer.flush())
            if delta.stop_token is not None and delta.stop_token not in self._eos_token_ids:
                self.stop_reason = delta.stop_token

    def _add_tokens(self, delta: Delta) -> None:
        added = self._detokenizer.push(delta.tokens)
        self._text.append(added.text)
        self._tokens += delta.tokens[: added.used_tokens]
        self._logprobs += delta.logprobs[: added.used_tokens]
        self.generated_tokens += added.used_tokens

    def drain(self) -> ChoiceOutput:
        """Everything new since the last call."""
        piece = ChoiceOutput(
            text="".join(self._text),
            tokens=self._tokens,
            logprobs=self._logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        self._text, self._tokens, self._logprobs = [], [], []
        return piece


class ScoringChoice(Choice):
    """A choice of no tokens (`max_tokens` 0): only what the engine says of the prompt counts."""

    def push(self, delta: Delta) -> None:
        """Take a delta; the one token that the engine samples is left out."""
        super().push(delta)
        if self.finish_reason == "stop":
            self.finish_reason, self.stop_reason = "length", None

    def _add_tokens(self, delta: Delta) -> None:
        """Nothing belongs to the answer."""
