"""From the messages of a chat body to the plain ones that a chat template reads."""

from __future__ import annotations

from typing import Any

from argosy.engine.serving.preprocessing.parameter_rules import unsupported_parameter
from argosy.protocol import ChatMessageParam, ContentPart, invalid_request

_UNSUPPORTED_FIELDS = ("tool_calls", "tool_call_id", "function_call", "audio")


def to_template_messages(messages: list[ChatMessageParam]) -> list[dict[str, Any]]:
    """Role, text and what else templates know of each message; content parts become one text.

    Raises ApiError (400) naming the message for anything but text.
    """
    if not messages:
        raise invalid_request("'messages' is empty. Give at least one message.", "messages")
    return [_to_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _to_template_message(message: ChatMessageParam, path: str) -> dict[str, Any]:
    fields = {
        "tool_calls": message.tool_calls,
        "tool_call_id": message.tool_call_id,
        "function_call": message.function_call,
        "audio": message.audio,
    }
    for name in _UNSUPPORTED_FIELDS:
        if fields[name]:
            raise unsupported_parameter(f"{path}.{name}", "Only text can be served yet.")
    if message.role in {"tool", "function"}:
        raise unsupported_parameter(f"{path}.role", "Tool calling is not supported yet.")
    turn: dict[str, Any] = {"role": message.role, "content": _text_content(message, path)}
    if message.name is not None:
        turn["name"] = message.name
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        turn |= {"reasoning_content": reasoning, "reasoning": reasoning}
    return turn


def _text_content(message: ChatMessageParam, path: str) -> str:
    match message.content:
        case str(text):
            return text
        case None if message.role == "assistant":
            return message.refusal or ""
        case None:
            raise invalid_request(
                f"'{path}.content' is missing. Give the text of the message.", f"{path}.content"
            )
        case parts:
            texts = [_part_text(part, f"{path}.content[{i}]") for i, part in enumerate(parts)]
            return "\n".join(texts)


def _part_text(part: ContentPart, path: str) -> str:
    match part.type:
        case "text" | "input_text" | "output_text":
            text = part.text
        case "refusal":
            text = part.refusal
        case kind:
            raise unsupported_parameter(path, f"This model reads text only, not '{kind[:64]}'.")
    if text is None:
        raise invalid_request(f"'{path}' has no text. Give it, or leave the part out.", path)
    return text
