"""Prompts of `LLM` and `AsyncLLM`, in every shape that vLLM accepts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from argosy.protocol import ApiError, invalid_request

TokenIds = Iterable[int]
"""Token ids, as a list, an array of numpy or a tensor of torch."""
PromptInput = str | TokenIds | Mapping[str, Any]
"""Prompt: text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`, the latter two with `cache_salt`."""
PromptsInput = PromptInput | Iterable[PromptInput]
"""A prompt, or several of any kind."""
Conversation = Iterable[Mapping[str, Any]]
"""Messages in the format of the OpenAI API, such as `{"role": "user", "content": "Hello"}`."""

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_UNSUPPORTED_KEYS = {
    "multi_modal_data": "Models take text only.",
    "multi_modal_uuids": "Models take text only.",
    "media_io_kwargs": "Models take text only.",
    "mm_processor_kwargs": "Models take text only.",
    "prompt_embeds": "Give `prompt` or `prompt_token_ids`.",
    "encoder_prompt": "Encoder-decoder models are not supported. Give `prompt`.",
    "decoder_prompt": "Encoder-decoder models are not supported. Give `prompt`.",
    "token_type_ids": "Remove them.",
    "prompt_token_offsets": "Remove them.",
    "arrival_time": "Remove it.",
    "type": "Remove it.",
}
"""Keys of vLLM's prompt dictionaries without an equivalent. They are accepted if their value is empty."""


class Prompt(NamedTuple):
    """Prompt of one request, as text or as token ids."""

    content: str | list[int]
    cache_salt: str | None = None


def split_prompts(prompts: PromptsInput) -> list[PromptInput]:
    """Return one prompt or several as a list, without validating each.

    Raises:
        ValueError: The sequence mixes token ids and prompts.
        TypeError: `prompts` is of another type.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    items = _to_list(prompts, "prompts")
    numbers: list[Any] = [item for item in items if isinstance(item, (int, float))]
    if not numbers:
        return items
    if len(numbers) < len(items):
        raise ValueError("prompts mix token ids and prompts; give a list of lists of ids")
    return [numbers]


def parse_prompt(prompt: PromptInput) -> Prompt:
    """Validate the shape of a prompt.

    Raises:
        ApiError: 400 naming the key or the type.
    """
    if isinstance(prompt, str):
        return Prompt(str(prompt))
    if not isinstance(prompt, Mapping):
        return Prompt(_parse_token_ids(prompt))
    for key in prompt:
        if key in _UNSUPPORTED_KEYS and not _is_empty(prompt[key]):
            raise _invalid_prompt(f"'{key}' is not supported. {_UNSUPPORTED_KEYS[key]}")
        if key not in _UNSUPPORTED_KEYS and key not in _PROMPT_KEYS:
            raise _invalid_prompt(
                f"The prompt has the unknown key '{key}'. Use {', '.join(_PROMPT_KEYS)}."
            )
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if token_ids is not None:
        content: str | list[int] = _parse_token_ids(token_ids)
    elif isinstance(text, str):
        content = str(text)
    else:
        raise _invalid_prompt(
            "The prompt has no text. Give it the key 'prompt' or 'prompt_token_ids'."
        )
    return Prompt(content, prompt.get("cache_salt"))


def split_conversations(messages: Conversation | Iterable[Conversation]) -> list[Conversation]:
    """Return one conversation or several as a list.

    Raises:
        ValueError: The sequence mixes messages and conversations.
        TypeError: `messages` is of another type.
    """
    if isinstance(messages, Mapping):
        return [[messages]]
    items: list[Any] = _to_list(messages, "messages")
    message_list = [item for item in items if isinstance(item, Mapping)]
    conversations: list[Conversation] = [
        _to_list(item, "messages") for item in items if not isinstance(item, Mapping)
    ]
    if message_list and conversations:
        raise ValueError(
            "messages mix conversations and messages; give one conversation or a list of conversations"
        )
    return [message_list] if message_list else conversations


def _to_list(values: object, name: str) -> list[Any]:
    """Return the items of any iterable but text. Arrays of numpy and torch become lists."""
    plain = to_plain(values)
    if isinstance(plain, (str, bytes)) or not isinstance(plain, Iterable):
        raise TypeError(f"{name} is {_describe(plain)}; give text, token ids, or a list of them")
    return [to_plain(item) for item in plain]


def _parse_token_ids(values: object) -> list[int]:
    plain = to_plain(values)
    if isinstance(plain, (str, bytes, Mapping)) or not isinstance(plain, Iterable):
        raise _invalid_prompt(f"The prompt is {_describe(plain)}. Give text or token ids.")
    token_ids = [to_plain(value) for value in plain]
    for value in token_ids:
        if type(value) is not int:
            raise _invalid_prompt(
                f"A token id is {_describe(value)}. Token ids must be integers, in a flat list."
            )
    return token_ids


def _is_empty(value: object) -> bool:
    return value is None or value in ({}, [])


def _describe(value: object) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


def _invalid_prompt(message: str) -> ApiError:
    return invalid_request(message, "prompt")


def to_plain(value: Any) -> Any:  # noqa: ANN401 - arguments have any type
    """Convert scalars and arrays of numpy and torch, and collections of them, to plain Python values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple, set, frozenset, range)):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {to_plain(key): to_plain(item) for key, item in value.items()}
    return value
