"""Documents of the training text: conversations with tools, calls and reasoning, or plain prose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Call of a tool by the assistant."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """Turn of a conversation. `role` is 'system', 'user', 'assistant' or 'tool'."""

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """Conversation with the definitions of its tools, or plain prose if `messages` is empty."""

    messages: tuple[Message, ...] = ()
    prose: str = ""
    tools: tuple[dict[str, Any], ...] = ()
