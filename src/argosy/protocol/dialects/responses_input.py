"""Translation of the Responses API's input items to the messages of a chat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from argosy.protocol.dialects.chat_request import (
    MessageList,
    decode_text_file,
    function_call,
    image_part,
)
from argosy.protocol.dialects.responses_tools import join_name
from argosy.protocol.errors import invalid_request
from argosy.protocol.openai_requests import JsonObject

_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "compaction": "cmp",
}
MAX_ITEM_ID_CHARS = 200
"""Longest id of a client that an item keeps. PostgreSQL cannot index texts of some kilobytes."""
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})


def normalize_input(value: str | list[JsonObject] | None) -> list[JsonObject]:
    """Return the input as items that name their type. A text is a user's message."""
    if value is None:
        return []
    if isinstance(value, str):
        content = [{"type": "input_text", "text": value}]
        return [{"type": "message", "role": "user", "content": content}]
    return [
        item if "type" in item else {"type": "message", **item}
        for item in map(_drop_null_id, value)
    ]


def list_references(items: Iterable[JsonObject]) -> list[str]:
    """Return the ids of the stored items to which these items refer."""
    return [_text(item.get("id")) for item in items if item.get("type") == "item_reference"]


def resolve_references(
    items: Sequence[JsonObject],
    history: Sequence[JsonObject],
    stored_items: Mapping[str, JsonObject],
) -> list[JsonObject]:
    """Replace references by the items to which they refer, or remove them if the history has these.

    Args:
        items: New input items.
        history: Items of earlier turns.
        stored_items: Stored items by id.

    Raises:
        ApiError: 400 if an item is not stored.
    """
    history_ids = {item.get("id") for item in history}
    resolved = []
    for index, item in enumerate(items):
        if item.get("type") != "item_reference":
            resolved.append(item)
        elif (item_id := _text(item.get("id"))) not in history_ids:
            if item_id not in stored_items:
                message = (
                    f"'input[{index}]' refers to an item that is not stored. Send the item itself."
                )
                raise invalid_request(message, f"input[{index}]")
            resolved.append(stored_items[item_id])
    return resolved


def assign_item_ids(items: Iterable[JsonObject], new_id: Callable[[], str]) -> list[JsonObject]:
    """Return the items with an id each, as they are stored. Ids that a store may not hold are replaced.

    Args:
        items: The items.
        new_id: Returns random digits.
    """
    assigned = []
    for item in items:
        stored = dict(item)
        if not _is_usable_id(stored.get("id")):
            stored["id"] = f"{_ID_PREFIXES.get(str(item.get('type')), 'item')}_{new_id()}"
        if stored.get("type") == "message":
            stored.setdefault("status", "completed")
            if isinstance(stored.get("content"), str):
                kind = "output_text" if stored.get("role") == "assistant" else "input_text"
                stored["content"] = [{"type": kind, "text": stored["content"]}]
        assigned.append(stored)
    return assigned


def _is_usable_id(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_ITEM_ID_CHARS and value.isprintable()


class InputTranslator:
    """Translator of one request's items, which collects what it leaves out.

    Args:
        decrypt: Decrypts reasoning; None for what this server has not encrypted.
    """

    def __init__(self, decrypt: Callable[[str], str | None]) -> None:
        self._decrypt = decrypt
        self._messages = MessageList()
        self.ignored: list[str] = []

    def translate(
        self, instructions: str | None, history: Sequence[JsonObject], items: Sequence[JsonObject]
    ) -> list[dict[str, Any]]:
        """Translate instructions, items of earlier turns and new items to messages.

        Raises:
            ApiError: 400 if an item is malformed.
        """
        if instructions:
            self._messages.add_system(instructions)
        for item in history:
            self._add(item, "previous_response_id")
        for index, item in enumerate(items):
            self._add(item, f"input[{index}]")
        if not self._messages.messages:
            message = "The request has no input. Send 'input'."
            raise invalid_request(message, "input", "missing_required_parameter")
        return self._messages.messages

    def _add(self, item: JsonObject, path: str) -> None:
        match item.get("type"):
            case "message" | "agent_message":
                self._add_message(item, path)
            case "reasoning":
                self._add_reasoning(item)
            case "function_call":
                name = self._call_name(item, path)
                arguments = _text(item.get("arguments"))
                self._messages.add_call(function_call(_text(item.get("call_id")), name, arguments))
            case "custom_tool_call":
                call = {"name": self._call_name(item, path), "input": _text(item.get("input"))}
                call_id = _text(item.get("call_id"))
                self._messages.add_call({"id": call_id, "type": "custom", "custom": call})
            case "function_call_output" | "custom_tool_call_output":
                self._add_call_output(item, path)
            case "compaction" | "compaction_summary":
                summary = self._decrypt(_text(item.get("encrypted_content")))
                if summary is None:
                    self.ignored.append(path)
                else:
                    self._messages.add_user(summary)
            case _:
                self.ignored.append(path)

    def _add_message(self, item: JsonObject, path: str) -> None:
        parts = self._parts(item.get("content"), f"{path}.content")
        texts = [part["text"] for part in parts if part["type"] == "text"]
        match item.get("role"):
            case "user":
                self._messages.add_user(parts if len(texts) < len(parts) else "\n".join(texts))
            case "assistant":
                self._messages.add_assistant_text("".join(texts))
            case "system" | "developer":
                self._messages.add_system("\n".join(texts))
            case _:
                message = f"'{path}.role' must be user, assistant, system or developer."
                raise invalid_request(message, f"{path}.role")

    def _add_reasoning(self, item: JsonObject) -> None:
        """Add reasoning in plain text or encrypted by this server. Other servers' encryption is left out.

        A summary stands for reasoning that the item does not have.
        """
        encrypted = item.get("encrypted_content")
        text = self._decrypt(encrypted) if isinstance(encrypted, str) else None
        if text is None:
            parts = self._parts(item.get("content") or item.get("summary") or [], "content")
            text = "".join(part["text"] for part in parts if part["type"] == "text")
        if text:
            self._messages.add_reasoning(text)

    def _add_call_output(self, item: JsonObject, path: str) -> None:
        parts = self._parts(item.get("output"), f"{path}.output")
        text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        self._messages.add_tool_result(_text(item.get("call_id")), text)
        if images := [part for part in parts if part["type"] != "text"]:
            self._messages.add_user(images)

    def _call_name(self, item: JsonObject, path: str) -> str:
        name = item.get("name")
        if not isinstance(name, str) or not name:
            message = f"Missing parameter '{path}.name'. Add it."
            raise invalid_request(message, f"{path}.name", "missing_required_parameter")
        return join_name(item.get("namespace"), name)

    def _parts(self, content: object, path: str) -> list[dict[str, Any]]:
        """Translate content to parts of a chat's message. Parts without effect are noted and left out."""
        if content is None:
            return []
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        if not isinstance(content, list):
            return [{"type": "text", "text": msgspec.json.encode(content).decode()}]
        parts = []
        for index, part in enumerate(content):
            kind = _text(part.get("type")) if isinstance(part, dict) else ""
            if kind in _TEXT_PARTS:
                parts.append({"type": "text", "text": _text(part.get("text"))})
            elif kind == "refusal":
                parts.append({"type": "text", "text": _text(part.get("refusal"))})
            elif kind == "input_image" and isinstance(part.get("image_url"), str):
                parts.append(image_part(part["image_url"], part.get("detail")))
            elif kind == "input_file" and isinstance(part.get("file_data"), str):
                name = _text(part.get("filename"))
                text = decode_text_file(part["file_data"], f"{path}[{index}].file_data", name)
                parts.append({"type": "text", "text": f"{name}\n{text}" if name else text})
            elif kind in {"input_image", "input_file", "input_audio"}:
                part_path = f"{path}[{index}]"
                message = f"'{part_path}' is a stored file or audio. Send text or a text file, or an image by URL."
                raise invalid_request(message, part_path, "unsupported_parameter")
            else:
                self.ignored.append(f"{path}[{index}]")
        return parts


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _drop_null_id(item: JsonObject) -> JsonObject:
    return {name: value for name, value in item.items() if not (name == "id" and value is None)}
