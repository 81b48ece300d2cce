"""Content of one version of a prompt: a text or the messages of a chat as templates, and default parameters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from argosy.settings import ByOperator

MAX_PROMPT_CHARS = 1 << 16
"""Maximum length of all templates of a prompt together, and of its parameters as JSON."""
REQUEST_MESSAGES = "messages"
"""Placeholder of the request's own messages. A chat without it ends with them."""
PARAMETERS = frozenset(
    {
        *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop"),
        *("max_tokens", "max_completion_tokens", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "response_format", "tools", "tool_choice", "parallel_tool_calls"),
        *("reasoning_effort", "verbosity", "chat_template_kwargs"),
    }
)
"""Fields of a request for which a prompt may have defaults."""


class PromptMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message of a chat, or a place for messages that the request brings."""

    role: ByOperator[Literal["system", "developer", "user", "assistant"] | None] = None
    """Role of the message."""
    content: ByOperator[Annotated[str, Meta(max_length=MAX_PROMPT_CHARS)] | None] = None
    """Template of its text."""
    placeholder: ByOperator[
        Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,39}$(?!\n)", examples=["history"])] | None
    ] = None
    """Variable whose messages stand here, in place of a role and a content. `messages` are those of the request."""


class PromptContent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Version of a prompt: templates and default parameters."""

    text: ByOperator[Annotated[str, Meta(max_length=MAX_PROMPT_CHARS)] | None] = None
    """Template of a text. It is the prompt of a completion, and the system message of a chat."""
    messages: ByOperator[Annotated[tuple[PromptMessage, ...], Meta(max_length=100)]] = ()
    """Templates of the messages of a chat, in place of a text."""
    parameters: ByOperator[dict[str, Any]] = msgspec.field(default_factory=dict)
    """Fields of requests, such as `model` or `temperature`, that apply where a request has none."""
