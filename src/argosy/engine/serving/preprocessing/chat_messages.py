"""From the messages of a chat body to the plain ones that a chat template reads."""

from __future__ import annotations

from typing import Any

from argosy.engine.serving.preprocessing.parameter_rules import unsupported
from argosy.protocol import ContentPart, Message, invalid

_NOT_YET = ("tool_calls", "tool_call_id", "function_call", "audio")


def turns(messages: list[Message]) -> list[dict[str, Any]]:
    """Role, text and what else templates know of each message; content parts become one text.

    Raises ApiError (400) naming the message for anything but text.
    """
    if not messages:
        raise invalid("'messages' is empty. Give at least one message.", "messages")
    return [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _turn(message: Message, at: str) -> dict[str, Any]:
    fields = {
        "tool_calls": message.tool_calls,
        "tool_call_id": message.tool_call_id,
        "function_call": message.function_call,
        "audio": message.audio,
    }
    for name in _NOT_YET:
        if fields[name]:
            raise unsupported(f"{at}.{name}", "Only text can be served yet.")
    if message.role in {"tool", "function"}:
        raise unsupported(f"{at}.role", "Tool calling is not supported yet.")
    turn: dict[str, Any] = {"role": message.role, "content": _content(message, at)}
    if message.name is not None:
        turn["name"] = message.name
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        turn |= {"reasoning_content": reasoning, "reasoning": reasoning}
    return turn


def _content(message: Message, at: str) -> str:
    match message.content:
        case str(text):
            return text
        case None if message.role == "assistant":
            return message.refusal or ""
        case None:
            raise invalid(
                f"'{at}.content' is missing. Give the text of the message.", f"{at}.content"
            )
        case parts:
            texts = [_part(part, f"{at}.content[{i}]") for i, part in enumerate(parts)]
            return "\n".join(texts)


def _part(part: ContentPart, at: str) -> str:
    match part.type:
        case "text" | "input_text" | "output_text":
            text = part.text
        case "refusal":
            text = part.refusal
        case kind:
            raise unsupported(at, f"This model reads text only, not '{kind[:64]}'.")
    if text is None:
        raise invalid(f"'{at}' has no text. Give it, or leave the part out.", at)
    return text
