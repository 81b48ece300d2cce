"""Tokenizer for the prompts of request bodies, with a cost bounded by the model's context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from argosy.engine.serving.core_messages import CoreReady
from argosy.engine.serving.preprocessing import chat_messages
from argosy.engine.serving.preprocessing.chat_messages import CallIdMapper, keep_call_id
from argosy.engine.serving.preprocessing.message_truncation import (
    count_chars,
    truncate_messages,
)
from argosy.engine.serving.preprocessing.sampling_params import check_token_ids
from argosy.engine.serving.text.chat_template import ChatTemplate
from argosy.engine.serving.text.choice import PromptState
from argosy.engine.serving.text.message_forms import complete_tool
from argosy.engine.serving.text.template_capabilities import TemplateCapabilities
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import (
    ApiError,
    ChatCompletionRequest,
    ChatMessageParam,
    CompletionRequest,
    GenerationRequest,
    Prediction,
    TokenizeRequest,
    invalid_request,
)

MAX_SEQUENCES_PER_REQUEST = 1024
"""Maximum number of sequences (prompts times choices) of one HTTP request."""
_PROBE_CHARS_PER_TOKEN = 8
_PROBE_MARGIN_TOKENS = 8
_OUTPUT_SHARE = 8
"""Part of the context that a truncated conversation leaves for the answer, if the body sets no lower limit."""
_TOO_LONG_CODES = ("context_length_exceeded", "chat_template_limit_exceeded")
_MAX_TOKENIZE_CONTEXTS = 4
"""Longest text that `/tokenize` accepts, in multiples of the model's context."""


class PromptTokenizer:
    """Tokenizes the prompts of request bodies for one model.

    Raises `ApiError` (400) for prompts that this model cannot serve. Immutable and thread-safe.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        ready: CoreReady,
        map_call_id: CallIdMapper = keep_call_id,
    ) -> None:
        self._map_call_id = map_call_id
        self._tokenizer = tokenizer
        self._template = template
        self._vocab_size = ready.vocab_size
        self.max_context_tokens = ready.max_model_len
        """Maximum tokens of one sequence: the model's limit, or that of the KV cache if that is smaller."""

    def tokenize_chat(
        self,
        body: ChatCompletionRequest,
        *,
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        created_at: int | None,
        refuse_media: bool = False,
    ) -> PromptState:
        """Render and encode a conversation, without its oldest messages if it is too long and the body allows it.

        Args:
            body: The request.
            tools: Tools for the template.
            variables: Variables for the template.
            created_at: Unix time that the template sees. None means now.
            refuse_media: Refuse pictures, sounds and files in earlier messages too.
        """

        def tokenize(messages: list[ChatMessageParam]) -> PromptState:
            text, ignored = self._render(
                body,
                messages,
                tools,
                variables,
                created_at=created_at,
                refuse_media=refuse_media,
            )
            ids = self._encode(
                text, "messages", body, add_special_tokens=bool(body.add_special_tokens)
            )
            prompt = self._truncate(ids, text, body)
            prompt.ignored_fields = ignored
            return prompt

        if body.truncation != "auto":
            return tokenize(body.messages)
        return self._fit_conversation(body, tokenize)

    def _fit_conversation(
        self,
        body: ChatCompletionRequest,
        tokenize: Callable[[list[ChatMessageParam]], PromptState],
    ) -> PromptState:
        """Return the prompt of a conversation without its oldest messages, if it is too long otherwise."""
        needed = body.max_completion_tokens or body.max_tokens or 1
        room = max(needed, self.max_context_tokens // _OUTPUT_SHARE)
        if body.clamp_max_tokens:
            needed, room = 1, min(room, self.max_context_tokens // _OUTPUT_SHARE)

        max_chars = self.max_context_tokens * self._tokenizer.max_token_chars

        def fit(messages: list[ChatMessageParam], output_tokens: int) -> PromptState | None:
            if count_chars(messages) > max_chars:
                return None  # without the cost of the template
            try:
                prompt = tokenize(messages)
            except ApiError as error:
                if error.code not in _TOO_LONG_CODES:
                    raise
                return None
            has_room = len(prompt.token_ids) + output_tokens <= self.max_context_tokens
            return prompt if has_room else None

        fitting = fit(body.messages, needed)
        if fitting is not None:
            return fitting
        truncated = truncate_messages(
            body.messages, lambda messages: fit(messages, room)
        ) or truncate_messages(body.messages, lambda messages: fit(messages, needed))
        if truncated is None:
            return tokenize(body.messages)  # the caller refuses it, unless this does
        prompt, dropped = truncated
        prompt.ignored_fields += dropped
        return prompt

    def tokenize_completion(self, body: CompletionRequest) -> list[PromptState]:
        """Encode text prompts and validate prompts of token ids. Returns them in order."""
        prompts = _split_prompts(body.prompt)
        if len(prompts) * (body.n or 1) > MAX_SEQUENCES_PER_REQUEST:
            raise invalid_request(
                f"{len(prompts)} prompts with {body.n or 1} choices each are more than the "
                f"{MAX_SEQUENCES_PER_REQUEST} sequences of one request. Send several requests.",
                "prompt",
            )
        return [self._tokenize_prompt(prompt, body) for prompt in prompts]

    def tokenize(
        self,
        body: TokenizeRequest,
        tools: Sequence[Mapping[str, Any]],
        *,
        refuse_media: bool = False,
    ) -> PromptState:
        """Return the prompt that a completion or a chat would have for the prompt or the messages.

        The chat template sees `tools`.
        """
        max_tokens = self.max_context_tokens * _MAX_TOKENIZE_CONTEXTS
        given = [n for n in ("prompt", "messages", "content") if getattr(body, n) is not None]
        if len(given) != 1:
            raise invalid_request("Send one of 'prompt', 'messages' and 'content'.", "prompt")
        if body.prompt is not None:
            add_special_tokens = body.add_special_tokens is not False
            return PromptState(
                self._encode_bounded(
                    body.prompt, "prompt", max_tokens, add_special_tokens=add_special_tokens
                )
            )
        if body.content is not None:
            return PromptState(
                self._encode_bounded(
                    body.content, "content", max_tokens, add_special_tokens=bool(body.add_special)
                )
            )
        text, ignored = self._render(
            body,
            body.messages or [],
            tools,
            body.chat_template_kwargs or {},
            refuse_media=refuse_media,
        )
        ids = self._encode_bounded(
            text, "messages", max_tokens, add_special_tokens=bool(body.add_special_tokens)
        )
        return PromptState(ids, text, ignored_fields=ignored)

    def encode_bias(self, text: str) -> list[int]:
        """Return the tokens of a text to which `logit_bias` applies."""
        return self._encode_bounded(
            text, "logit_bias", self.max_context_tokens, add_special_tokens=False
        )

    def encode_prediction(self, prediction: Prediction | None) -> list[int]:
        """Return the tokens of a predicted output, which may be as long as the context."""
        if prediction is None:
            return []
        content, param = prediction.content, "prediction"
        if not isinstance(content, str):
            texts = [part.text for part in content if part.type == "text" and part.text is not None]
            if len(texts) < len(content):
                raise invalid_request(
                    "'prediction.content' has a part that is no text. Send texts only.", param
                )
            content = "".join(texts)
        ids = self._encode_bounded(
            content, param, self.max_context_tokens, add_special_tokens=False
        )
        if len(ids) > self.max_context_tokens:
            message = (
                f"'prediction' has {len(ids)} tokens, which is more than the model's context of "
                f"{self.max_context_tokens}. Shorten it."
            )
            raise invalid_request(message, param, "context_length_exceeded")
        return ids

    def remaining_tokens(self, prompts: list[PromptState], param: str) -> int:
        """Return the number of context tokens left after the longest prompt, at least 1.

        Raises:
            ApiError: 400 if a prompt is empty or fills the context.
        """
        if any(not prompt.token_ids for prompt in prompts):
            raise invalid_request(f"'{param}' contains no tokens. Send at least one.", param)
        longest = max(len(prompt.token_ids) for prompt in prompts)
        if longest >= self.max_context_tokens:
            raise self._context_length_error(param, longest)
        return self.max_context_tokens - longest

    def check_fit(self, prompts: list[PromptState], max_tokens: int, param: str) -> None:
        """Raise `ApiError` (400) if a prompt leaves less than `max_tokens` of the context."""
        longest = max(len(prompt.token_ids) for prompt in prompts)
        if longest + max_tokens > self.max_context_tokens:
            raise self._context_length_error(param, longest, max_tokens)

    def _render(
        self,
        body: ChatCompletionRequest | TokenizeRequest,
        messages: list[ChatMessageParam],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        created_at: int | None = None,
        refuse_media: bool = False,
    ) -> tuple[str, tuple[str, ...]]:
        """Return the prompt's text, and the paths of what the template leaves out."""
        continue_final = bool(body.continue_final_message)
        if continue_final and body.add_generation_prompt:
            raise invalid_request(
                "'continue_final_message' and 'add_generation_prompt' exclude each other. Set only one.",
                "continue_final_message",
            )
        add_generation_prompt = body.add_generation_prompt
        # a template renders each message to at least one token
        if len(messages) > self.max_context_tokens:
            raise self._context_length_error("messages", len(messages))
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final

        numbers: Sequence[int] = range(len(messages))
        if body.messages and len(messages) < len(body.messages):  # without the oldest ones
            number_by_id = {id(message): number for number, message in enumerate(body.messages)}
            numbers = [number_by_id[id(message)] for message in messages]

        def render(can: TemplateCapabilities) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
            converted = chat_messages.to_template_messages(
                messages, numbers, self._map_call_id, can, refuse_media=refuse_media
            )
            text = self._template.render(
                converted.messages,
                tools=[complete_tool(tool, can) for tool in tools],
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final,
                variables=variables,
                created_at=created_at,
            )
            return text, converted.ignored, converted.find_unshown(text)

        can = self._template.capabilities(with_tools=bool(tools))
        text, ignored, unshown = render(can)
        if unshown and not can.shows_every_message:
            # some templates drop a system message depending on what follows, but not a user's
            text, ignored, unshown = min(
                (text, ignored, unshown),
                render(replace(can, system="none")),
                key=lambda result: len(result[2]),
            )
        return text, ignored + unshown

    def _tokenize_prompt(self, prompt: str | list[int], body: CompletionRequest) -> PromptState:
        if isinstance(prompt, str):
            add_special_tokens = body.add_special_tokens is not False
            ids = self._encode(prompt, "prompt", body, add_special_tokens=add_special_tokens)
            tokenized = self._truncate(ids, prompt, body)
            tokenized.is_echoed = bool(body.echo)
            return tokenized
        if body.truncate_prompt_tokens is None and len(prompt) > self.max_context_tokens:
            raise self._context_length_error("prompt", len(prompt))
        tokenized = self._truncate(prompt, "", body)
        check_token_ids("prompt", tokenized.token_ids, self._vocab_size)
        if body.echo:
            tokenized.is_echoed = True
            tokenized.text = self._tokenizer.decode(tokenized.token_ids)
        return tokenized

    def _truncate(self, ids: list[int], text: str, body: GenerationRequest) -> PromptState:
        """Keep the last (or first) tokens if the body limits the prompt."""
        max_tokens = body.truncate_prompt_tokens
        if max_tokens is None or len(ids) <= max_tokens:
            return PromptState(ids, text)
        kept = ids[:max_tokens] if body.truncation_side == "right" else ids[-max_tokens:]
        return PromptState(kept, self._tokenizer.decode(kept))

    def _encode(
        self, text: str, param: str, body: GenerationRequest, *, add_special_tokens: bool
    ) -> list[int]:
        max_tokens = body.truncate_prompt_tokens
        if max_tokens is None:
            return self._encode_bounded(
                text, param, self.max_context_tokens, add_special_tokens=add_special_tokens
            )
        window_chars = (
            min(max_tokens, self.max_context_tokens) + _PROBE_MARGIN_TOKENS
        ) * self._tokenizer.max_token_chars
        window = text[:window_chars] if body.truncation_side == "right" else text[-window_chars:]
        return self._encode_checked(window, param, add_special_tokens=add_special_tokens)

    def _encode_bounded(
        self, text: str, param: str, max_tokens: int, *, add_special_tokens: bool
    ) -> list[int]:
        """Encode `text`. A text with far more than `max_tokens` is rejected without encoding all of it."""
        if len(text) > max_tokens * self._tokenizer.max_token_chars:
            raise self._context_length_error(param, len(text) // self._tokenizer.max_token_chars)
        probe_chars = max_tokens * _PROBE_CHARS_PER_TOKEN
        if len(text) > 2 * probe_chars:
            probe_ids = self._encode_checked(text[:probe_chars], param, add_special_tokens=False)
            if len(probe_ids) > max_tokens + _PROBE_MARGIN_TOKENS:
                raise self._context_length_error(param, len(probe_ids))
        return self._encode_checked(text, param, add_special_tokens=add_special_tokens)

    def _encode_checked(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        try:
            ids = self._tokenizer.encode(text, add_special_tokens)
        except ValueError as error:
            raise invalid_request(
                f"'{param}' cannot be encoded: {error}. Correct the text.", param
            ) from error
        check_token_ids(param, ids, self._vocab_size)
        return ids

    def _context_length_error(
        self, param: str, prompt_tokens: int, max_tokens: int | None = None
    ) -> ApiError:
        limit = f"This model's maximum context length is {self.max_context_tokens} tokens"
        needed = f"{prompt_tokens} or more tokens in '{param}' and at least one to generate"
        if max_tokens is not None:
            total = prompt_tokens + max_tokens
            needed = f"{total} tokens ({prompt_tokens} in '{param}', {max_tokens} to generate)"
        message = f"{limit}, but the request needs {needed}. Shorten it or lower max_tokens."
        return invalid_request(message, param, "context_length_exceeded")


def _split_prompts(prompt: str | list[str | int | list[int]]) -> Sequence[str | list[int]]:
    """Return the four shapes of `prompt` as a list of prompts."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid_request("'prompt' is empty. Send a text or token ids.", "prompt")
    if len({type(item) for item in prompt}) > 1:
        raise invalid_request(
            "'prompt' mixes texts and token ids. Send only one kind in a request.", "prompt"
        )
    ids = [item for item in prompt if isinstance(item, int)]
    return [ids] if ids else [item for item in prompt if not isinstance(item, int)]
