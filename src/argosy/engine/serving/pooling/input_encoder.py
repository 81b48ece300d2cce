"""Encoder of a pooling request's inputs to token ids, with prompts, pairs and truncation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

from argosy.engine.pooling import PoolingInfo
from argosy.engine.serving.preprocessing.sampling_params import check_token_ids
from argosy.engine.serving.text.chat_template import ChatTemplate
from argosy.engine.serving.text.tokenizer import EncodedInput, Tokenizer
from argosy.protocol import MODEL_LIMIT, ApiError, invalid_request

_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Prompt of Qwen3-Reranker (Zhang et al. 2025), for checkpoints whose template does not render a pair."""
_PAIR_ROLES = ("query", "document")
_PROBES = (("a", "b"), ("c", "d"))
_MAX_TEMPLATES = 64
"""Maximum number of instructions whose suffix is kept."""


Items = TypeVar("Items", str, list[int])


class InputLimits(NamedTuple):
    """Limits of one request's inputs in tokens."""

    truncate_tokens: int | None = None
    """Limit to which longer inputs are truncated. None refuses inputs that exceed the model's limit."""
    first_text: int | None = None
    """Limit of the first text of a pair."""
    second_text: int | None = None
    """Limit of the second text of a pair."""
    keeps_end: bool = False
    """Whether truncated texts keep their ends, and not their beginnings."""

    def cut(self, items: Items, limit: int | None) -> Items:
        """Truncate a text or a list of token ids to a limit. None does not truncate."""
        if limit is None or len(items) <= limit:
            return items
        return items[len(items) - limit :] if self.keeps_end else items[:limit]


class InputEncoder:
    """Encodes inputs for one model. Thread-safe. Raises `ApiError` (400) for inputs that it cannot serve."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, info: PoolingInfo, vocab_size: int
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._info = info
        self._vocab_size = vocab_size
        self._renders_roles = all(template.reads(role) for role in _PAIR_ROLES)
        self._find_suffix = lru_cache(_MAX_TEMPLATES)(self._compute_suffix)

    def encode_text(
        self, item: str | Sequence[int], prompt: str, limits: InputLimits, param: str
    ) -> list[int]:
        """Encode a text after a prompt. Token ids are taken as they are, without a prompt."""
        max_tokens = self._max_tokens(limits)
        if not isinstance(item, str):
            ids = limits.cut(list(item), max_tokens)
            check_token_ids(param, ids, self._vocab_size)
        else:
            ids = self._encode(prompt + item, None, max_tokens, param, limits).token_ids
        return self._check_length(ids, param)

    def count_prompt_tokens(self, prompt: str) -> int:
        """Return the number of tokens that a prompt adds before a text, special tokens included."""
        ids = self._tokenizer.encode_input(self._normalize(prompt)).token_ids
        return len(ids) - (bool(ids) and ids[-1] in self._tokenizer.special_ids)

    def encode_pair(
        self, first: str, second: str, prompt: str, limits: InputLimits, param: str
    ) -> EncodedInput:
        """Encode a pair of texts, of which the first comes after the prompt.

        A chat template renders the pair for language models, with the prompt as the system message.
        """
        max_tokens = self._max_tokens(limits)
        if self._info.renders_pairs:
            first = self._shorten(first, limits.first_text, limits, param)
            second = self._shorten(second, limits.second_text, limits, param)
            text = self._render(first, second, prompt)
            ids = self._encode_rendered(text, prompt, max_tokens, limits, param)
            return EncodedInput(self._check_length(ids, param), None)
        encoded = self._encode(prompt + first, second, max_tokens, param, limits)
        self._check_length(encoded.token_ids, param)
        return encoded

    def _normalize(self, text: str) -> str:
        return text.lower() if self._info.is_lowercased else text

    def _max_tokens(self, limits: InputLimits) -> int | None:
        """Return the limit to which inputs are truncated, or None for no truncation."""
        limit = limits.truncate_tokens
        if limit is None:
            return None
        if limit == MODEL_LIMIT:
            return self._info.max_input_tokens
        if limit < 1:
            raise invalid_request(
                f"'truncate_prompt_tokens' is {limit}. Send a positive number, or -1 for the model's limit.",
                "truncate_prompt_tokens",
            )
        return min(limit, self._info.max_input_tokens)

    def _check_length(self, ids: list[int], param: str) -> list[int]:
        if not ids:
            raise invalid_request(f"'{param}' has an input without tokens. Send text.", param)
        limit = self._info.max_input_tokens
        if len(ids) > limit:
            raise _length_error(f"{len(ids)}", limit, param)
        return ids

    def _encode(
        self,
        text: str,
        second: str | None,
        max_tokens: int | None,
        param: str,
        limits: InputLimits,
    ) -> EncodedInput:
        texts = [
            self._clip(each, max_tokens, limits, param)
            for each in (text, second)
            if each is not None
        ]
        try:
            return self._tokenizer.encode_input(
                *texts,
                max_tokens=max_tokens,
                max_text_tokens=(limits.first_text, limits.second_text),
                keeps_end=limits.keeps_end,
            )
        except ValueError as error:
            raise invalid_request(
                f"'{param}' cannot be encoded: {error}. Correct the text.", param
            ) from error

    def _clip(self, text: str, max_tokens: int | None, limits: InputLimits, param: str) -> str:
        """Bound the work for a text that is much too long: cut what would be truncated, or refuse it."""
        limit = self._info.max_input_tokens
        max_chars = (limit + 1) * self._tokenizer.max_token_chars
        if len(text) > max_chars and max_tokens is None:
            raise _length_error(f"more than {limit}", limit, param)
        return self._normalize(limits.cut(text, max_chars))

    def _shorten(self, text: str, max_tokens: int | None, limits: InputLimits, param: str) -> str:
        """Return the first, or last, `max_tokens` tokens of a text."""
        if max_tokens is None:
            return text
        ids = self._encode_plain(text, param)
        if len(ids) <= max_tokens:
            return text
        return self._tokenizer.decode(limits.cut(ids, max_tokens), skip_special_tokens=False)

    def _render(self, first: str, second: str, prompt: str) -> str:
        if not self._renders_roles:
            instruction = prompt or _DEFAULT_INSTRUCTION
            return f"{_PREFIX}<Instruct>: {instruction}\n<Query>: {first}\n<Document>: {second}{_SUFFIX}"
        messages = [
            *([{"role": "system", "content": prompt}] if prompt else []),
            *(
                {"role": role, "content": text}
                for role, text in zip(_PAIR_ROLES, (first, second), strict=True)
            ),
        ]
        return self._template.render(messages, add_generation_prompt=False)

    def _encode_rendered(
        self, text: str, prompt: str, max_tokens: int | None, limits: InputLimits, param: str
    ) -> list[int]:
        """Encode a rendered pair. The end of the template, which follows both texts, is never truncated."""
        ids = self._encode_plain(text, param)
        if max_tokens is None or len(ids) <= max_tokens or limits.keeps_end:
            return limits.cut(ids, max_tokens)
        suffix = self._find_suffix(prompt)[-max_tokens:]
        return [*ids[: max_tokens - len(suffix)], *suffix]

    def _encode_plain(self, text: str, param: str) -> list[int]:
        """Encode a text without special tokens."""
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except ValueError as error:
            raise invalid_request(
                f"'{param}' cannot be encoded: {error}. Correct the text.", param
            ) from error

    def _compute_suffix(self, prompt: str) -> tuple[int, ...]:
        """Return the tokens with which every rendered pair ends, whatever its texts are."""
        first, second = (
            self._encode_plain(self._render(*probe, prompt), "instruction")[::-1]
            for probe in _PROBES
        )
        common = next(
            (
                index
                for index, pair in enumerate(zip(first, second, strict=False))
                if len(set(pair)) > 1
            ),
            0,
        )
        return tuple(first[:common][::-1])


def _length_error(found: str, limit: int, param: str) -> ApiError:
    return invalid_request(
        f"This model's maximum input length is {limit} tokens, but an input of '{param}' has {found}. "
        "Shorten it, or set truncate_prompt_tokens to -1.",
        param,
        "context_length_exceeded",
    )
