"""Forms of a conversation that chat templates take: messages are merged, moved or split, and no text is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from argosy.engine.serving.text.template_capabilities import (
    LATER_SYSTEM,
    REASONING_NAMES,
    TOOL_DEFAULTS,
    Content,
    ContentForm,
    Message,
    TemplateCapabilities,
    parts_of,
)

_SPEAKERS = frozenset({"user", "assistant"})
SYSTEM_ROLES = frozenset({"system", "developer"})
_SEPARATOR = "\n\n"
"""Between the texts of messages that become one."""


def adapt_messages(messages: Sequence[Message], can: TemplateCapabilities) -> list[Message]:
    """Return a conversation in a form that the template takes. What it takes as it is, stays as it is.

    Args:
        messages: Messages whose content is a text, a list of text parts, or None beside calls.
        can: What the template takes.
    """
    adapted = list(messages)
    if any(message.get("tool_calls") or message["role"] == "tool" for message in adapted):
        adapted = _adapt_calls(adapted, can)
    if can.system != "several" or can.late_system < _SPEAKERS:
        adapted = _place_system_messages(adapted, can)
    if can.repeatable < _SPEAKERS or not can.takes_user_after_result:
        adapted = _alternate(adapted, can)
    adapted = _add_missing_user(adapted, can)
    return [_with_content_form(message, can, index) for index, message in enumerate(adapted)]


def complete_tool(tool: Mapping[str, Any], can: TemplateCapabilities) -> Mapping[str, Any]:
    """Return a function with empty values for the fields without which the template fails."""
    function = tool["function"]
    missing = {name: TOOL_DEFAULTS[name] for name in can.needed_tool_fields if name not in function}
    return {**tool, "function": {**function, **missing}} if missing else tool


def joined_text(content: object) -> str:
    """Return content as one text, with a line for each part."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content if isinstance(content, str) else ""


# --- calls of tools ------------------------------------------------------------------------------


def _adapt_calls(messages: Sequence[Message], can: TemplateCapabilities) -> list[Message]:
    adapted: list[Message] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        if not message.get("tool_calls"):
            adapted.append(
                message
                if message["role"] != "tool" or can.shows_calls
                else _result_as_user(message)
            )
            continue
        start = index
        while index < len(messages) and messages[index]["role"] == "tool":
            index += 1
        adapted += _adapt_turn(message, messages[start:index], can)
    return adapted


def _adapt_turn(
    message: Message, results: Sequence[Message], can: TemplateCapabilities
) -> Iterator[Message]:
    """Yield a message with calls and its results, together or one call after the other, or as texts."""
    calls = message["tool_calls"]
    separates_text = bool(message.get("content")) and (
        can.text_beside_calls == "never"
        or (can.text_beside_calls == "sometimes" and REASONING_NAMES[0] in message)
    )
    if not can.shows_calls or (separates_text and "assistant" not in can.repeatable):
        plain = {name: value for name, value in message.items() if name != "tool_calls"}
        text = "\n".join(json.dumps(call["function"], ensure_ascii=False) for call in calls)
        yield {**plain, "content": _join(message.get("content"), text)}
        yield from map(_result_as_user, results)
        return
    if separates_text:
        yield {"role": message["role"], "content": message["content"]}
        message = {**message, "content": None}
    if len(calls) == 1 or can.takes_parallel_calls:
        yield message
        yield from results
        return
    remaining = list(results)
    for call in calls:
        yield {**message, "tool_calls": [call]}
        message = {"role": message["role"], "content": None}
        own = [result for result in remaining if result.get("tool_call_id") == call["id"]]
        remaining = [result for result in remaining if result not in own]
        yield from own
    yield from remaining


def _result_as_user(message: Message) -> Message:
    text = f"Result of {message.get('name') or 'the call'}:\n{joined_text(message.get('content'))}"
    return {"role": "user", "content": text}


# --- order of roles ------------------------------------------------------------------------------


def _place_system_messages(messages: Sequence[Message], can: TemplateCapabilities) -> list[Message]:
    """Move system messages to the start, as one if the template takes only one, or make them the user's."""
    if can.system == "none":
        return [
            {**message, "role": "user"} if message["role"] in SYSTEM_ROLES else message
            for message in messages
        ]
    system: list[Message] = []
    others: list[Message] = []
    speaker = ""
    for message in messages:
        if message["role"] in SYSTEM_ROLES and speaker not in can.late_system:
            system.append(message)
            continue
        others.append(message)
        if message["role"] not in SYSTEM_ROLES:
            speaker = "assistant" if message["role"] == "tool" else message["role"]
    if can.system == "one" and len(system) > 1:
        content = None
        for message in system:
            content = _join(content, message.get("content"))
        system = [{**system[0], "content": content}]
    return [*system, *others]


def _alternate(messages: Sequence[Message], can: TemplateCapabilities) -> list[Message]:
    """Merge messages of a role that the template does not take twice in a row, and answer results before the user."""
    adapted: list[Message] = []
    speaker, spoken = "", 0
    """Role and index of the last message that is no system message."""
    for message in messages:
        role = message["role"]
        if role == speaker and role in _SPEAKERS - can.repeatable:
            adapted[spoken] = _merge(adapted[spoken], message)
            continue
        if (speaker, role) == ("tool", "user") and not can.takes_user_after_result:
            adapted.append({"role": "assistant", "content": "OK."})
        if role not in SYSTEM_ROLES:
            speaker, spoken = role, len(adapted)
        adapted.append(message)
    return adapted


def _merge(first: Message, second: Message) -> Message:
    merged = {**second, **first, "content": _join(first.get("content"), second.get("content"))}
    for name in REASONING_NAMES:
        texts = [message[name] for message in (first, second) if message.get(name)]
        if texts:
            merged[name] = _SEPARATOR.join(texts)
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        merged["tool_calls"] = calls
    return merged


def _add_missing_user(messages: list[Message], can: TemplateCapabilities) -> list[Message]:
    """Add an empty message of the user before a welcome, and after system messages without a conversation."""
    start = next(
        (i for i, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES),
        len(messages),
    )
    if start == len(messages):
        is_missing = not can.takes_system_alone
    else:
        place = "after system" if start else "first"
        is_missing = messages[start]["role"] == "assistant" and place not in can.welcome
    if not is_missing:
        return messages
    return [*messages[:start], {"role": "user", "content": ""}, *messages[start:]]


# --- content -------------------------------------------------------------------------------------


def _with_content_form(message: Message, can: TemplateCapabilities, index: int) -> Message:
    content = message.get("content")
    if content is None:
        if message.get("tool_calls"):
            if can.call_content == "absent":
                return {name: value for name, value in message.items() if name != "content"}
            return {**message, "content": None if can.call_content == "none" else ""}
        return message
    role = message["role"]
    if role in SYSTEM_ROLES:
        role = LATER_SYSTEM if index and LATER_SYSTEM in can.content else "system"
    form: ContentForm = can.content.get(role, "text")
    if form == "any" or (form == "parts" and isinstance(content, list)):
        return message
    text = joined_text(content)
    return {**message, "content": text if form == "text" else parts_of(text)}


def _join(first: Content, second: Content) -> str | list[dict[str, str]]:
    """Return the content of two messages as one. Parts stay parts."""
    if not first or not second:
        return first or second or ""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{_SEPARATOR}{second}"
    return list(
        chain.from_iterable(
            content if isinstance(content, list) else parts_of(content)
            for content in (first, second)
        )
    )
