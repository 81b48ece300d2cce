"""The prompts of a body as token ids, at a cost bounded by the context of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from argosy.engine.serving.core_messages import Ready
from argosy.engine.serving.preprocessing import chat_messages, parameter_rules
from argosy.engine.serving.text.chat_template import ChatTemplate
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import (
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    TokenizeRequest,
    invalid,
)

MAX_SEQUENCES = 1024
"""Most sequences (prompts times choices) of one HTTP request."""
_PROBE_CHARS_PER_TOKEN = 8
_PROBE_MARGIN = 8
_TOKENIZE_CONTEXTS = 4
"""`/tokenize` counts texts of up to so many contexts."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to go on from, and their text as the client sent it."""

    ids: list[int]
    text: str


class Prompts:
    """Reads the prompts of bodies for one model. Immutable; may be used from many threads.

    Raises ApiError (400) for whatever cannot be a prompt of this model.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, ready: Ready) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._vocab_size = ready.vocab_size
        self._model_tokens = ready.max_model_len
        self.context_tokens = min(ready.max_model_len, ready.num_blocks * ready.block_size)
        """Most tokens of one sequence: the model's limit, or the whole KV cache where that is less."""

    def chat(self, body: ChatCompletionRequest, at: int | None) -> Prompt:
        """The conversation as the model's template renders it at that Unix time; None: now."""
        text = self._render(body, at)
        ids = self._encode(text, "messages", body, special=bool(body.add_special_tokens))
        return self._truncated(ids, text, body)

    def completion(self, body: CompletionRequest) -> list[Prompt]:
        """The prompts in order: texts are encoded, token ids checked."""
        given = _several(body.prompt)
        if len(given) * (body.n or 1) > MAX_SEQUENCES:
            raise invalid(
                f"{len(given)} prompts with {body.n or 1} choices each are more than the "
                f"{MAX_SEQUENCES} sequences of one request. Send them in several.",
                "prompt",
            )
        return [self._one(prompt, body) for prompt in given]

    def tokenize(self, body: TokenizeRequest) -> list[int]:
        """Token ids of a prompt, or of messages, as a completion or a chat would have them."""
        most = self.context_tokens * _TOKENIZE_CONTEXTS
        if (body.prompt is None) == (body.messages is None):
            raise invalid("Give either 'prompt' or 'messages'.", "prompt")
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            return self._bounded(body.prompt, "prompt", most, special=special)
        special = bool(body.add_special_tokens)
        return self._bounded(self._render(body), "messages", most, special=special)

    def left(self, prompts: list[Prompt], param: str) -> int:
        """Tokens left in the context after the longest prompt: at least 1."""
        if any(not prompt.ids for prompt in prompts):
            raise invalid(f"'{param}' has no tokens to go on from. Give at least one.", param)
        longest = max(len(prompt.ids) for prompt in prompts)
        if longest >= self.context_tokens:
            raise self._too_long(param, longest)
        return self.context_tokens - longest

    def fit(self, prompts: list[Prompt], max_tokens: int, param: str) -> None:
        """Refuse prompts that leave less than `max_tokens` of the context."""
        longest = max(len(prompt.ids) for prompt in prompts)
        if longest + max_tokens > self.context_tokens:
            raise self._too_long(param, longest, max_tokens)

    def _render(self, body: ChatCompletionRequest | TokenizeRequest, at: int | None = None) -> str:
        follow_on = bool(body.continue_final_message)
        if follow_on and body.add_generation_prompt:
            raise invalid(
                "'continue_final_message' and 'add_generation_prompt' exclude each other. Set one.",
                "continue_final_message",
            )
        wanted = body.add_generation_prompt
        given = body.messages or []
        if len(given) > self.context_tokens:  # a template gives each at least a token
            raise self._too_long("messages", len(given))
        return self._template.render(
            chat_messages.turns(given),
            add_generation_prompt=not follow_on if wanted is None else wanted,
            continue_final_message=follow_on,
            variables=body.chat_template_kwargs,
            at=at,
        )

    def _one(self, given: str | list[int], body: CompletionRequest) -> Prompt:
        if isinstance(given, str):
            special = body.add_special_tokens is not False
            return self._truncated(
                self._encode(given, "prompt", body, special=special), given, body
            )
        if body.truncate_prompt_tokens is None and len(given) > self.context_tokens:
            raise self._too_long("prompt", len(given))
        prompt = self._truncated(given, "", body)
        parameter_rules.token_ids("prompt", prompt.ids, self._vocab_size)
        return Prompt(prompt.ids, self._tokenizer.decode(prompt.ids)) if body.echo else prompt

    def _truncated(self, ids: list[int], text: str, body: GenerationRequest) -> Prompt:
        """The last (or first) tokens where the body asks for no more."""
        most = body.truncate_prompt_tokens
        if most is None or len(ids) <= most:
            return Prompt(ids, text)
        kept = ids[:most] if body.truncation_side == "right" else ids[-most:]
        return Prompt(kept, self._tokenizer.decode(kept))

    def _encode(
        self, text: str, param: str, body: GenerationRequest, *, special: bool
    ) -> list[int]:
        most = body.truncate_prompt_tokens
        if most is None:
            return self._bounded(text, param, self.context_tokens, special=special)
        reach = (min(most, self.context_tokens) + _PROBE_MARGIN) * self._tokenizer.longest_token
        window = text[:reach] if body.truncation_side == "right" else text[-reach:]
        return self._tokens(window, param, special=special)

    def _bounded(self, text: str, param: str, most: int, *, special: bool) -> list[int]:
        """Token ids of `text`; what has far more than `most` is refused without reading it all."""
        if len(text) > most * self._tokenizer.longest_token:
            raise self._too_long(param, len(text) // self._tokenizer.longest_token)
        probe = most * _PROBE_CHARS_PER_TOKEN
        if len(text) > 2 * probe:
            beginning = self._tokens(text[:probe], param, special=False)
            if len(beginning) > most + _PROBE_MARGIN:
                raise self._too_long(param, len(beginning))
        return self._tokens(text, param, special=special)

    def _tokens(self, text: str, param: str, *, special: bool) -> list[int]:
        try:
            ids = self._tokenizer.encode(text, special)
        except ValueError as error:
            raise invalid(f"'{param}' cannot be encoded: {error}. Correct it.", param) from error
        parameter_rules.token_ids(param, ids, self._vocab_size)
        return ids

    def _too_long(self, param: str, prompt_tokens: int, max_tokens: int | None = None) -> ApiError:
        limit = f"This model's maximum context length is {self.context_tokens} tokens"
        if self.context_tokens < self._model_tokens:
            limit += f" (what the KV cache holds; the model could take {self._model_tokens})"
        asked = f"{prompt_tokens} or more tokens in '{param}' and at least one to generate"
        if max_tokens is not None:
            total = prompt_tokens + max_tokens
            asked = f"{total} tokens ({prompt_tokens} in '{param}', {max_tokens} to generate)"
        message = f"{limit}, but the request asks for {asked}. Shorten it or lower max_tokens."
        return invalid(message, param, "context_length_exceeded")


def _several(given: str | list[str | int | list[int]]) -> Sequence[str | list[int]]:
    """The four shapes of `prompt` as a list of prompts."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise invalid("'prompt' is empty. Give a text or token ids.", "prompt")
    if len({type(item) for item in given}) > 1:
        raise invalid("'prompt' mixes texts and token ids. Send one kind in a request.", "prompt")
    ids = [item for item in given if isinstance(item, int)]
    return [ids] if ids else [item for item in given if not isinstance(item, int)]
