"""Capabilities of a chat template, as `template_probe` finds them and `message_forms` respects them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

Content = str | list[dict[str, str]] | None
"""Content of a message: a text, text parts, or None beside calls."""
Message = dict[str, Any]
ContentForm = Literal["text", "any", "parts", "part"]
"""Content as one text, as text or parts, as parts only, or as a list with one part."""
SystemPlace = Literal["several", "one", "none"]
"""Several system messages at the start, one, or none at all."""
CallContent = Literal["absent", "none", "empty"]
ArgumentsForm = Literal["object", "text"]
Extent = Literal["always", "sometimes", "never"]

LATER_SYSTEM = "later system"
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Names under which templates look for the reasoning of a message."""
TOOL_DEFAULTS: Mapping[str, Any] = {
    "description": "",
    "parameters": {"type": "object", "properties": {}},
}
"""Values of a function's optional fields for templates that need them."""
REASONING_VARIABLES = (
    "reasoning_effort",
    "thinking_effort",
    "low_effort",
    "medium_effort",
    "thinking_mode",
    "enable_thinking",
    "thinking",
)
"""Variables by which templates control reasoning. The output planner sets them for the effort of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateCapabilities:
    """Forms of a conversation that a chat template takes. The defaults are assumed of one that cannot be probed."""

    content: Mapping[str, ContentForm] = field(default_factory=dict)
    """Form of the content of each role; `text` if missing. System messages after the first are `LATER_SYSTEM`."""
    system: SystemPlace = "several"
    """System messages that a conversation may begin with."""
    late_system: frozenset[str] = frozenset({"user", "assistant"})
    """Roles that a later system message may follow. Results of calls count as the assistant's."""
    repeatable: frozenset[str] = frozenset({"user", "assistant"})
    """Roles of which two messages may follow each other."""
    welcome: frozenset[str] = frozenset({"first", "after system"})
    """Where the assistant may speak before the user."""
    takes_system_alone: bool = True
    """Whether a conversation may consist of system messages."""
    shows_calls: bool = True
    """Whether calls of tools and their results appear in the prompt."""
    call_content: CallContent = "absent"
    """Content of a message with calls and no text."""
    arguments: ArgumentsForm = "object"
    """Form of the arguments of a call: an object, or its JSON text."""
    text_beside_calls: Extent = "always"
    """Whether the prompt shows the text of a message with calls. `sometimes` is only without reasoning."""
    takes_parallel_calls: bool = True
    takes_user_after_result: bool = True
    """Whether a user message may follow the result of a call."""
    needed_tool_fields: tuple[str, ...] = ()
    """Optional fields of a function without which the template fails."""
    reasoning: Extent = "sometimes"
    """Whether the reasoning of earlier messages appears in the prompt."""
    variables: frozenset[str] = frozenset()
    """Variables for reasoning whose value changes the prompt."""
    named: frozenset[str] = frozenset({"system", "user", "assistant"})
    """Roles of which the prompt shows the names of the participants (`name`)."""
    shows_every_message: bool = True
    """Whether each message of an ordinary conversation appears in the prompt."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: sorted(value) if isinstance(value, frozenset) else value
            for name, value in values.items()
        }


def parts_of(text: str) -> list[dict[str, str]]:
    """Return a text as a list with one content part."""
    return [{"type": "text", "text": text}]
