"""Conversion of a chat body's messages to the plain messages that the model's chat template takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from argosy.constraints import CUSTOM_INPUT
from argosy.engine.serving.text.message_forms import adapt_messages, joined_text
from argosy.engine.serving.text.template_capabilities import (
    REASONING_NAMES,
    TemplateCapabilities,
    parts_of,
)
from argosy.protocol import (
    ChatMessageParam,
    ContentPart,
    JsonObject,
    invalid_request,
    unsupported_parameter,
)

_COMPARED_CHARS = 64
"""Number of characters at the end of a text by which it is found in a prompt."""
MEDIA_KINDS = ("image", "audio", "video", "file")
_TAKES_ALL = TemplateCapabilities()
CallIdMapper = Callable[[str, str, int], str]
"""Maps (id, function name, number of the call in the conversation) to an id that the model's family accepts."""


def keep_call_id(call_id: str, name: str, number: int) -> str:  # noqa: ARG001 - a `CallIdMapper`
    """Return the id unchanged."""
    return call_id


class TemplateMessages(NamedTuple):
    """Conversation in the form that the template takes."""

    messages: list[dict[str, Any]]
    ignored: tuple[str, ...]
    """Paths of the content that does not reach the template."""
    doubtful: list[tuple[str, str]]
    """Path and text of the content that the template may leave out."""

    def find_unshown(self, prompt: str) -> tuple[str, ...]:
        """Return the paths of the doubtful content whose end is not in the prompt. Takes time linear in the prompt."""
        unshown, position = [], 0
        for path, text in self.doubtful:
            end = text.strip()[-_COMPARED_CHARS:]
            for each in dict.fromkeys((end, json.dumps(end, ensure_ascii=False)[1:-1])):
                found = prompt.find(each, position)  # most templates keep the order
                if found < 0:
                    found = prompt.find(each, 0, position + len(each))
                if found >= 0:
                    position = found
                    break
            else:
                unshown.append(path)
        return tuple(unshown)


def to_template_messages(
    messages: list[ChatMessageParam],
    numbers: Sequence[int],
    map_call_id: CallIdMapper = keep_call_id,
    can: TemplateCapabilities = _TAKES_ALL,
    *,
    refuse_media: bool = False,
) -> TemplateMessages:
    """Convert messages to the fields and the form that the template takes.

    The arguments of tool calls become mappings in the client's key order, or stay JSON text. A call whose arguments are
    no JSON object keeps them as the text of `arguments`. Reasoning gets every name under which templates look for it.
    Pictures, sounds and files before the last message become a short text, since a client sends the whole history with
    each request.

    Args:
        messages: Messages of the body, or the rest of a conversation that is too long.
        numbers: Index of each message in the body, for errors and for the names of what is ignored.
        map_call_id: Maps the ids of tool calls.
        can: What the template takes.
        refuse_media: Refuse pictures, sounds and files in earlier messages too.

    Raises:
        ApiError: 400 naming the message, for content other than text in the last one, and for a malformed tool call.
    """
    if not messages:
        raise invalid_request("'messages' is empty. Send at least one message.", "messages")
    converter = _Converter(map_call_id, can)
    converted = []
    for number, message in zip(numbers, messages, strict=True):
        converter.refuses_media = refuse_media or number == numbers[-1]
        converted.append(converter.convert(message, f"messages[{number}]"))
    return TemplateMessages(
        adapt_messages(converted, can), tuple(converter.ignored), converter.doubtful
    )


class _Converter:
    """Converter of one conversation, which remembers the tool calls that later messages refer to."""

    def __init__(self, map_call_id: CallIdMapper, can: TemplateCapabilities) -> None:
        self.ignored: list[str] = []
        self.doubtful: list[tuple[str, str]] = []
        self.refuses_media = True
        """Whether the next message may have text only."""
        self._can = can
        self._map_call_id = map_call_id
        self._calls: dict[str, tuple[str, str]] = {}
        """Client's id of each call so far -> mapped id and function name."""
        self._num_calls = 0
        self._last_name = ""

    def convert(self, message: ChatMessageParam, path: str) -> dict[str, Any]:
        content = self._content(message, path)
        if content and not self._can.shows_every_message:
            self.doubtful.append((f"{path}.content", joined_text(content)))
        if message.role in {"tool", "function"}:
            return self._convert_result(message, content)
        result: dict[str, Any] = {"role": message.role, "content": content}
        if message.name is not None:
            result["name"] = message.name
            if message.role not in self._can.named:
                self.ignored.append(f"{path}.name")
        if message.refusal and content != message.refusal:
            self.ignored.append(f"{path}.refusal")
        name, reasoning = _reasoning(message)
        if reasoning:
            result |= dict.fromkeys(REASONING_NAMES, reasoning)
            if self._can.reasoning == "never":
                self.ignored.append(f"{path}.{name}")
            elif self._can.reasoning == "sometimes":
                self.doubtful.append((f"{path}.{name}", reasoning))
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
        given = function.get("arguments")
        arguments: object = (
            {CUSTOM_INPUT: str(function.get("input") or "")}
            if kind == "custom"
            else _parse_arguments(given)
        )
        if self._can.arguments == "text" and self._can.shows_calls:
            is_object = isinstance(given, str) and given.lstrip().startswith("{")
            arguments = given if is_object else json.dumps(arguments, ensure_ascii=False)
        if not self._can.shows_every_message:
            texts = [text for text in _parse_arguments(given).values() if isinstance(text, str)]
            self.doubtful.append((path, max(texts, key=len, default=name)))
        return {
            "id": mapped_id,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _convert_result(self, message: ChatMessageParam, content: object) -> dict[str, Any]:
        call_id = message.tool_call_id or ""
        mapped_id, name = self._calls.get(call_id, (call_id, message.name or self._last_name))
        return {
            "role": "tool",
            "content": content,
            "tool_call_id": mapped_id,
            "name": message.name or name,
        }

    def _content(self, message: ChatMessageParam, path: str) -> str | list[dict[str, str]] | None:
        """Return the text or the text parts of a message.

        None stands for tool calls without text, which templates distinguish from "".
        """
        has_calls = bool(message.tool_calls or message.function_call)
        if message.audio:
            omitted = self._omit_media("audio", f"{path}.audio")
            if message.content is None:
                return omitted
        match message.content:
            case str(text):
                return text
            case None if message.role == "assistant":
                return message.refusal or (None if has_calls else "")
            case None:
                raise invalid_request(
                    f"'{path}.content' is missing. Send the text of the message.", f"{path}.content"
                )
            case parts:
                texts = [
                    self._part_text(part, f"{path}.content[{i}]") for i, part in enumerate(parts)
                ]
                kept = [part for text in texts if text is not None for part in parts_of(text)]
                return kept or (None if has_calls else "")

    def _part_text(self, part: ContentPart, path: str) -> str | None:
        """Return the text of a part, or None for reasoning, which `_reasoning` reads."""
        match part.type:
            case "text" | "input_text" | "output_text":
                text = part.text
            case "refusal":
                text = part.refusal
            case "thinking" | "reasoning":
                return None
            case "redacted_thinking":  # only the server that made it can read it
                self.ignored.append(path)
                return None
            case part_type:
                return self._omit_media(part_type, path)
        if text is None:
            raise invalid_request(f"'{path}' has no text. Add the text or remove the part.", path)
        return text

    def _omit_media(self, part_type: str, path: str) -> str:
        """Return the text instead of a picture, a sound or a file of an earlier message."""
        kind = next((kind for kind in MEDIA_KINDS if kind in part_type), None)
        if kind is None or self.refuses_media:
            raise unsupported_parameter(
                path, f"This model reads text only, not '{part_type[:64]}'."
            )
        self.ignored.append(path)
        return f"[{kind} omitted]"


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


def _reasoning(message: ChatMessageParam) -> tuple[str, str]:
    """Return the reasoning of an assistant's message, and the field in which the client sends it back."""
    for name in REASONING_NAMES:
        if text := getattr(message, name):
            return name, text
    for name in ("thinking_blocks", "reasoning_details"):
        blocks = [block for block in getattr(message, name) or () if isinstance(block, dict)]
        if text := "".join(
            _block_text(block.get("thinking") or block.get("text")) for block in blocks
        ):
            return name, text
    parts = message.content if isinstance(message.content, list) else ()
    texts = [
        _block_text(part.thinking or part.reasoning or part.text)
        for part in parts
        if part.type in {"thinking", "reasoning"}
    ]
    return "content", "".join(texts)


def _block_text(value: object) -> str:
    """Return the text of reasoning, which some clients send as a list of blocks."""
    if isinstance(value, list):
        return "".join(_block_text(block.get("text")) for block in value if isinstance(block, dict))
    return value if isinstance(value, str) else ""
