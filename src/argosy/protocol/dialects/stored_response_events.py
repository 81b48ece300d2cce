"""Events of a response that has ended, for clients that ask for the stream of a stored one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode
_TEXT_FIELDS = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}
_PART_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


def render_stored_events(response: dict[str, Any]) -> list[bytes]:
    """Return the events of a response that has ended, with one delta for each text."""
    return [
        format_response_event(number, kind, fields)
        for number, (kind, fields) in enumerate(_list_events(response))
    ]


def render_end_event(response: dict[str, Any], number: int) -> bytes:
    """Return the event that ends the stream of a response, with this sequence number."""
    return format_response_event(number, *_end_event(response))


def format_response_event(number: int, kind: str, fields: dict[str, Any]) -> bytes:
    """Encode one event of the Responses API."""
    event = {"type": kind, "sequence_number": number, **fields}
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), _encode(event))


def _list_events(response: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = response | {"status": "in_progress", "output": [], "usage": None}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for position, item in enumerate(response["output"]):
        empty = _empty_item(item)
        yield "response.output_item.added", {"output_index": position, "item": empty}
        place = {"output_index": position, "item_id": item.get("id")}
        if item["type"] in _TEXT_FIELDS:
            name, event = _TEXT_FIELDS[item["type"]]
            yield f"{event}.delta", {**place, "delta": item[name]}
            yield f"{event}.done", {**place, name: item[name]}
        for index, part in enumerate(item.get("content") or ()):
            yield from _list_part_events(_PART_EVENTS[item["type"]], part, place, index)
        yield "response.output_item.done", {"output_index": position, "item": item}
    yield _end_event(response)


def _end_event(response: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return f"response.{response['status']}", {"response": response}


def _list_part_events(
    event: str, part: dict[str, Any], place: dict[str, Any], index: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    where = {**place, "content_index": index}
    logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    yield "response.content_part.added", {**where, "part": part | {"text": ""}}
    yield f"{event}.delta", {**where, "delta": part["text"], **logprobs}
    yield f"{event}.done", {**where, "text": part["text"], **logprobs}
    yield "response.content_part.done", {**where, "part": part}


def _empty_item(item: dict[str, Any]) -> dict[str, Any]:
    empty = dict(item)
    if item["type"] in _TEXT_FIELDS:
        empty[_TEXT_FIELDS[item["type"]][0]] = ""
    else:
        empty["content"] = []
    if "status" in item:
        empty["status"] = "in_progress"
    return empty
