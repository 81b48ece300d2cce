"""Conversion of a chat body's messages to the plain messages that a chat template reads."""

from __future__ import annotations

from typing import Any

from argosy.engine.serving.preprocessing.parameter_rules import unsupported_parameter
from argosy.protocol import ChatMessageParam, ContentPart, invalid_request

_UNSUPPORTED_FIELDS = ("tool_calls", "tool_call_id", "function_call", "audio")


def to_template_messages(messages: list[ChatMessageParam]) -> list[dict[str, Any]]:
    """Convert messages to the fields that templates use. Content parts are joined to one text.

    Raises:
        ApiError: 400 naming the message, for any content other than text.
    """
    if not messages:
        raise invalid_request("'messages' is empty. Send at least one message.", "messages")
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
            raise unsupported_parameter(f"{path}.{name}", "Only text is supported yet.")
    if message.role in {"tool", "function"}:
        raise unsupported_parameter(f"{path}.role", "Tool calling is not supported yet.")
    template_message: dict[str, Any] = {
        "role": message.role,
        "content": _text_content(message, path),
    }
    if message.name is not None:
        template_message["name"] = message.name
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        template_message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    return template_message


def _text_content(message: ChatMessageParam, path: str) -> str:
    match message.content:
        case str(text):
            return text
        case None if message.role == "assistant":
            return message.refusal or ""
        case None:
            raise invalid_request(
                f"'{path}.content' is missing. Send the text of the message.", f"{path}.content"
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
        case part_type:
            raise unsupported_parameter(
                path, f"This model reads text only, not '{part_type[:64]}'."
            )
    if text is None:
        raise invalid_request(f"'{path}' has no text. Add the text or remove the part.", path)
    return text
