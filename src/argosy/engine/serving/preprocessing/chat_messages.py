"""Conversion of a chat body's messages to the plain messages that a chat template reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from argosy.constraints import CUSTOM_INPUT
from argosy.protocol import (
    ChatMessageParam,
    ContentPart,
    JsonObject,
    invalid_request,
    unsupported_parameter,
)

CallIdMapper = Callable[[str, str, int], str]
"""Maps (id, function name, number of the call in the conversation) to an id that the model's family accepts."""


def keep_call_id(call_id: str, name: str, number: int) -> str:  # noqa: ARG001 - a `CallIdMapper`
    """Return the id unchanged."""
    return call_id


def to_template_messages(
    messages: list[ChatMessageParam], map_call_id: CallIdMapper = keep_call_id
) -> list[dict[str, Any]]:
    """Convert messages to the fields that templates use.

    Content parts are joined to one text. The arguments of tool calls become mappings, which templates expect, in the
    client's key order. A call whose arguments are no JSON object keeps them as the text of `arguments`. Reasoning gets
    every name under which templates look for it.

    Args:
        messages: Messages of the body.
        map_call_id: Maps the ids of tool calls.

    Raises:
        ApiError: 400 naming the message, for content other than text, and for a malformed tool call.
    """
    if not messages:
        raise invalid_request("'messages' is empty. Send at least one message.", "messages")
    converter = _Converter(map_call_id)
    return [converter.convert(message, f"messages[{i}]") for i, message in enumerate(messages)]


class _Converter:
    """Converter of one conversation, which remembers the tool calls that later messages refer to."""

    def __init__(self, map_call_id: CallIdMapper) -> None:
        self._map_call_id = map_call_id
        self._calls: dict[str, tuple[str, str]] = {}
        """Client's id of each call so far -> mapped id and function name."""
        self._num_calls = 0
        self._last_name = ""

    def convert(self, message: ChatMessageParam, path: str) -> dict[str, Any]:
        if message.audio:
            raise unsupported_parameter(f"{path}.audio", "This model reads text only.")
        if message.role in {"tool", "function"}:
            return self._convert_result(message, path)
        result: dict[str, Any] = {"role": message.role, "content": _text_content(message, path)}
        if message.name is not None:
            result["name"] = message.name
        reasoning = _reasoning(message)
        if reasoning:
            result |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), reasoning)
        calls = [
            self._convert_call(call, f"{path}.tool_calls[{i}]")
            for i, call in enumerate(message.tool_calls or ())
        ]
        if message.function_call:
            legacy_call = {"id": "", "type": "function", "function": message.function_call}
            calls.append(self._convert_call(legacy_call, f"{path}.function_call"))
        if calls:
            result["tool_calls"] = calls
        return result

    def _convert_call(self, call: JsonObject, path: str) -> dict[str, Any]:
        kind = "custom" if call.get("type") == "custom" else "function"
        function = call.get(kind)
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise invalid_request(
                f"'{path}.{kind}.name' is missing. Send the call as the model made it.",
                f"{path}.{kind}.name",
            )
        client_id = call.get("id")
        call_id = client_id if isinstance(client_id, str) else ""
        mapped_id = self._map_call_id(call_id, name, self._num_calls)
        self._num_calls += 1
        self._calls[call_id] = (mapped_id, name)
        self._last_name = name
        arguments = (
            {CUSTOM_INPUT: str(function.get("input") or "")}
            if kind == "custom"
            else _parse_arguments(function.get("arguments"))
        )
        return {
            "id": mapped_id,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _convert_result(self, message: ChatMessageParam, path: str) -> dict[str, Any]:
        call_id = message.tool_call_id or ""
        mapped_id, name = self._calls.get(call_id, (call_id, message.name or self._last_name))
        return {
            "role": "tool",
            "content": _text_content(message, path),
            "tool_call_id": mapped_id,
            "name": message.name or name,
        }


def _parse_arguments(arguments: object) -> dict[str, Any]:
    """Return the arguments of a call as a mapping. Models sometimes write invalid JSON, and the loop must go on."""
    value: object = arguments
    if isinstance(arguments, str):
        if not arguments.strip():
            return {}
        try:
            value = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            value = arguments
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"arguments": value}


def _reasoning(message: ChatMessageParam) -> str:
    """Return the reasoning of an assistant's message, which clients send back under several names."""
    for text in (message.reasoning_content, message.reasoning, message.thinking):
        if text:
            return text
    blocks = [*(message.thinking_blocks or ()), *(message.reasoning_details or ())]
    texts = [
        block.get("thinking") or block.get("text") for block in blocks if isinstance(block, dict)
    ]
    return "".join(text for text in texts if isinstance(text, str))


def _text_content(message: ChatMessageParam, path: str) -> str | None:
    """Return the text of a message. None stands for tool calls without text, which templates distinguish from ""."""
    match message.content:
        case str(text):
            return text
        case None if message.role == "assistant":
            return message.refusal or (None if message.tool_calls else "")
        case None:
            raise invalid_request(
                f"'{path}.content' is missing. Send the text of the message.", f"{path}.content"
            )
        case parts:
            texts = [_part_text(part, f"{path}.content[{i}]") for i, part in enumerate(parts)]
            return "\n".join(text for text in texts if text is not None)


def _part_text(part: ContentPart, path: str) -> str | None:
    """Return the text of a part. Reasoning in the content is dropped, as templates drop that of earlier turns."""
    match part.type:
        case "text" | "input_text" | "output_text":
            text = part.text
        case "refusal":
            text = part.refusal
        case "thinking" | "reasoning" | "redacted_thinking":
            return None
        case part_type:
            raise unsupported_parameter(
                path, f"This model reads text only, not '{part_type[:64]}'."
            )
    if text is None:
        raise invalid_request(f"'{path}' has no text. Add the text or remove the part.", path)
    return text
