"""The prompts of a body as token ids, at a cost bounded by the context of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from argosy.engine.serving.core_messages import CoreReady
from argosy.engine.serving.preprocessing import chat_messages, parameter_rules
from argosy.engine.serving.text.chat_template import ChatTemplate
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import (
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    TokenizeRequest,
    invalid_request,
)

MAX_SEQUENCES_PER_REQUEST = 1024
"""Most sequences (prompts times choices) of one HTTP request."""
_PROBE_CHARS_PER_TOKEN = 8
_PROBE_MARGIN_TOKENS = 8
_MAX_TOKENIZE_CONTEXTS = 4
"""`/tokenize` counts texts of up to so many contexts."""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """Token ids to go on from, and their text as the client sent it."""

    token_ids: list[int]
    text: str


class PromptTokenizer:
    """Reads the prompts of bodies for one model. Immutable; may be used from many threads.

    Raises ApiError (400) for whatever cannot be a prompt of this model.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, ready: CoreReady) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._vocab_size = ready.vocab_size
        self._model_max_len = ready.max_model_len
        self.max_context_tokens = min(ready.max_model_len, ready.num_blocks * ready.block_size)
        """Most tokens of one sequence: the model's limit, or the whole KV cache where that is less."""

    def tokenize_chat(self, body: ChatCompletionRequest, created_at: int | None) -> TokenizedPrompt:
        """The conversation as the model's template renders it at that Unix time; None: now."""
        text = self._render(body, created_at)
        ids = self._encode(text, "messages", body, special=bool(body.add_special_tokens))
        return self._truncate(ids, text, body)

    def tokenize_completion(self, body: CompletionRequest) -> list[TokenizedPrompt]:
        """The prompts in order: texts are encoded, token ids checked."""
        given = _split_prompts(body.prompt)
        if len(given) * (body.n or 1) > MAX_SEQUENCES_PER_REQUEST:
            raise invalid_request(
                f"{len(given)} prompts with {body.n or 1} choices each are more than the "
                f"{MAX_SEQUENCES_PER_REQUEST} sequences of one request. Send them in several.",
                "prompt",
            )
        return [self._tokenize_prompt(prompt, body) for prompt in given]

    def tokenize(self, body: TokenizeRequest) -> list[int]:
        """Token ids of a prompt, or of messages, as a completion or a chat would have them."""
        most = self.max_context_tokens * _MAX_TOKENIZE_CONTEXTS
        if (body.prompt is None) == (body.messages is None):
            raise invalid_request("Give either 'prompt' or 'messages'.", "prompt")
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            return self._encode_bounded(body.prompt, "prompt", most, special=special)
        special = bool(body.add_special_tokens)
        return self._encode_bounded(self._render(body), "messages", most, special=special)

    def remaining_tokens(self, prompts: list[TokenizedPrompt], param: str) -> int:
        """Tokens left in the context after the longest prompt: at least 1."""
        if any(not prompt.token_ids for prompt in prompts):
            raise invalid_request(
                f"'{param}' has no tokens to go on from. Give at least one.", param
            )
        longest = max(len(prompt.token_ids) for prompt in prompts)
        if longest >= self.max_context_tokens:
            raise self._context_length_error(param, longest)
        return self.max_context_tokens - longest

    def check_fit(self, prompts: list[TokenizedPrompt], max_tokens: int, param: str) -> None:
        """Refuse prompts that leave less than `max_tokens` of the context."""
        longest = max(len(prompt.token_ids) for prompt in prompts)
        if longest + max_tokens > self.max_context_tokens:
            raise self._context_length_error(param, longest, max_tokens)

    def _render(
        self, body: ChatCompletionRequest | TokenizeRequest, created_at: int | None = None
    ) -> str:
        follow_on = bool(body.continue_final_message)
        if follow_on and body.add_generation_prompt:
            raise invalid_request(
                "'continue_final_message' and 'add_generation_prompt' exclude each other. Set one.",
                "continue_final_message",
            )
        wanted = body.add_generation_prompt
        given = body.messages or []
        if len(given) > self.max_context_tokens:  # a template gives each at least a token
            raise self._context_length_error("messages", len(given))
        return self._template.render(
            chat_messages.to_template_messages(given),
            add_generation_prompt=not follow_on if wanted is None else wanted,
            continue_final_message=follow_on,
            variables=body.chat_template_kwargs,
            created_at=created_at,
        )

    def _tokenize_prompt(self, given: str | list[int], body: CompletionRequest) -> TokenizedPrompt:
        if isinstance(given, str):
            special = body.add_special_tokens is not False
            return self._truncate(self._encode(given, "prompt", body, special=special), given, body)
        if body.truncate_prompt_tokens is None and len(given) > self.max_context_tokens:
            raise self._context_length_error("prompt", len(given))
        prompt = self._truncate(given, "", body)
        parameter_rules.check_token_ids("prompt", prompt.token_ids, self._vocab_size)
        return (
            TokenizedPrompt(prompt.token_ids, self._tokenizer.decode(prompt.token_ids))
            if body.echo
            else prompt
        )

    def _truncate(self, ids: list[int], text: str, body: GenerationRequest) -> TokenizedPrompt:
        """The last (or first) tokens where the body asks for no more."""
        most = body.truncate_prompt_tokens
        if most is None or len(ids) <= most:
            return TokenizedPrompt(ids, text)
        kept = ids[:most] if body.truncation_side == "right" else ids[-most:]
        return TokenizedPrompt(kept, self._tokenizer.decode(kept))

    def _encode(
        self, text: str, param: str, body: GenerationRequest, *, special: bool
    ) -> list[int]:
        most = body.truncate_prompt_tokens
        if most is None:
            return self._encode_bounded(text, param, self.max_context_tokens, special=special)
        reach = (
            min(most, self.max_context_tokens) + _PROBE_MARGIN_TOKENS
        ) * self._tokenizer.max_token_chars
        window = text[:reach] if body.truncation_side == "right" else text[-reach:]
        return self._encode_checked(window, param, special=special)

    def _encode_bounded(
        self, text: str, param: str, max_tokens: int, *, special: bool
    ) -> list[int]:
        """Token ids of `text`; what has far more than `most` is refused without reading it all."""
        if len(text) > max_tokens * self._tokenizer.max_token_chars:
            raise self._context_length_error(param, len(text) // self._tokenizer.max_token_chars)
        probe = max_tokens * _PROBE_CHARS_PER_TOKEN
        if len(text) > 2 * probe:
            beginning = self._encode_checked(text[:probe], param, special=False)
            if len(beginning) > max_tokens + _PROBE_MARGIN_TOKENS:
                raise self._context_length_error(param, len(beginning))
        return self._encode_checked(text, param, special=special)

    def _encode_checked(self, text: str, param: str, *, special: bool) -> list[int]:
        try:
            ids = self._tokenizer.encode(text, special)
        except ValueError as error:
            raise invalid_request(
                f"'{param}' cannot be encoded: {error}. Correct it.", param
            ) from error
        parameter_rules.check_token_ids(param, ids, self._vocab_size)
        return ids

    def _context_length_error(
        self, param: str, prompt_tokens: int, max_tokens: int | None = None
    ) -> ApiError:
        limit = f"This model's maximum context length is {self.max_context_tokens} tokens"
        if self.max_context_tokens < self._model_max_len:
            limit += f" (what the KV cache holds; the model could take {self._model_max_len})"
        asked = f"{prompt_tokens} or more tokens in '{param}' and at least one to generate"
        if max_tokens is not None:
            total = prompt_tokens + max_tokens
            asked = f"{total} tokens ({prompt_tokens} in '{param}', {max_tokens} to generate)"
        message = f"{limit}, but the request asks for {asked}. Shorten it or lower max_tokens."
        return invalid_request(message, param, "context_length_exceeded")


def _split_prompts(given: str | list[str | int | list[int]]) -> Sequence[str | list[int]]:
    """The four shapes of `prompt` as a list of prompts."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise invalid_request("'prompt' is empty. Give a text or token ids.", "prompt")
    if len({type(item) for item in given}) > 1:
        raise invalid_request(
            "'prompt' mixes texts and token ids. Send one kind in a request.", "prompt"
        )
    ids = [item for item in given if isinstance(item, int)]
    return [ids] if ids else [item for item in given if not isinstance(item, int)]
