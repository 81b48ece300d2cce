"""Translation of the Responses API's tools: functions, custom tools, and namespaces of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from argosy.protocol.dialects.chat_request import function_tool
from argosy.protocol.errors import ApiError, invalid_request
from argosy.protocol.openai_requests import JsonObject

_NAMESPACE_SEPARATOR = "__"
_CALLABLE_TYPES = ("function", "custom")
"""No set, because the type in a request may be a value that has no hash."""


class ToolName(NamedTuple):
    """Name of a tool as the client knows it."""

    name: str
    namespace: str | None = None


class TranslatedTools(msgspec.Struct, frozen=True, kw_only=True):
    """Tools of a chat, with the client's names for them."""

    chat_tools: list[dict[str, Any]]
    names: dict[str, ToolName]
    """The client's name of each tool by the name in the chat."""
    ignored: tuple[str, ...]
    """Paths of tools that this server does not run, and of formats that it does not enforce."""

    def get_tool(self, chat_name: str) -> ToolName:
        """Return the client's name of a tool that the model called."""
        return self.names.get(chat_name) or ToolName(chat_name)


def translate_tools(tools: Sequence[JsonObject]) -> TranslatedTools:
    """Translate `tools`.

    Raises:
        ApiError: 400 if a tool is malformed.
    """
    chat_tools: list[dict[str, Any]] = []
    names: dict[str, ToolName] = {}
    ignored: list[str] = []

    def add(tool: JsonObject, path: str, namespace: str | None) -> None:
        kind = tool.get("type")
        if kind not in _CALLABLE_TYPES:
            ignored.append(path)
            return
        name = _require_text(tool, "name", path)
        chat_name = join_name(namespace, name)
        names[chat_name] = ToolName(name, namespace)
        if kind == "custom":
            chat_tools.append(_translate_custom(tool, chat_name, path, ignored))
        else:
            description, strict = tool.get("description"), tool.get("strict")
            chat_tools.append(
                function_tool(chat_name, description, tool.get("parameters"), strict=strict)
            )

    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if tool.get("type") != "namespace":
            add(tool, path, None)
            continue
        namespace, members = _require_text(tool, "name", path), tool.get("tools")
        if not isinstance(members, list) or not all(isinstance(one, dict) for one in members):
            message = f"'{path}.tools' must be a list of tools."
            raise invalid_request(message, f"{path}.tools", "invalid_type")
        for number, member in enumerate(members):
            add(member, f"{path}.tools[{number}]", namespace)
    return TranslatedTools(chat_tools=chat_tools, names=names, ignored=tuple(ignored))


def translate_tool_choice(
    choice: str | JsonObject | None, tools: TranslatedTools
) -> str | JsonObject | None:
    """Translate `tool_choice`.

    Raises:
        ApiError: 400 if the choice requires a tool that is ignored or missing.
    """
    if choice is None or isinstance(choice, str):
        if choice == "required" and not tools.chat_tools:
            raise _unavailable_tool()
        return choice if tools.chat_tools else None
    if choice.get("type") == "allowed_tools":
        return _translate_allowed_tools(choice, tools)
    return _translate_reference(choice, tools, "tool_choice")


def _translate_allowed_tools(choice: JsonObject, tools: TranslatedTools) -> JsonObject:
    references = choice.get("tools")
    if not isinstance(references, list):
        message = "'tool_choice.tools' must be a list of tools."
        raise invalid_request(message, "tool_choice.tools", "invalid_type")
    known = [
        _translate_reference(reference, tools, f"tool_choice.tools[{index}]")
        for index, reference in enumerate(references)
        if isinstance(reference, dict) and reference.get("type") in _CALLABLE_TYPES
    ]
    if not known:
        raise _unavailable_tool()
    allowed = {"mode": choice.get("mode") or "auto", "tools": known}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _translate_reference(reference: JsonObject, tools: TranslatedTools, path: str) -> JsonObject:
    kind = reference.get("type")
    if kind not in _CALLABLE_TYPES:
        raise _unavailable_tool()
    name, namespace = _require_text(reference, "name", path), reference.get("namespace")
    chat_name = join_name(namespace, name)
    if chat_name not in tools.names:
        raise _unavailable_tool()
    return {"type": kind, kind: {"name": chat_name}}


def _unavailable_tool() -> ApiError:
    message = (
        "'tool_choice' requires a tool that the request does not offer, or that this server does not run. "
        "Add the tool, or use auto."
    )
    return invalid_request(message, "tool_choice")


def _translate_custom(
    tool: JsonObject, chat_name: str, path: str, ignored: list[str]
) -> dict[str, Any]:
    """Translate a custom tool. A grammar of an unknown syntax becomes a part of its description."""
    custom = {"name": chat_name, "description": tool.get("description") or ""}
    text_format = tool.get("format")
    if isinstance(text_format, dict) and text_format.get("type") == "grammar":
        if text_format.get("syntax") in ("lark", "regex"):
            custom["format"] = text_format
        else:
            ignored.append(f"{path}.format")
            syntax, definition = text_format.get("syntax"), text_format.get("definition")
            custom["description"] += f"\n\nThe input follows this {syntax} grammar:\n{definition}"
    return {"type": "custom", "custom": custom}


def join_name(namespace: object, name: str) -> str:
    """Return the name of a tool in the chat. Only a text is a namespace."""
    if not isinstance(namespace, str):
        return name
    separator = "" if namespace.endswith("_") else _NAMESPACE_SEPARATOR
    return f"{namespace}{separator}{name}"


def _require_text(value: JsonObject, name: str, path: str) -> str:
    text = value.get(name)
    if not isinstance(text, str) or not text:
        message = f"Missing parameter '{path}.{name}'. Add it."
        raise invalid_request(message, f"{path}.{name}", "missing_required_parameter")
    return text
