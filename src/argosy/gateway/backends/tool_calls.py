"""Tool calls of other servers in the shape that clients of the OpenAI API need.

Each call has an index, in streams its id and name come once, its arguments are text, and a choice with calls ends for
them. Servers leave out indexes or give all calls the same one, repeat ids and names, send arguments as objects, or end
with `stop`. Clients then lose calls or fail.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from argosy.gateway.backends.stream_events import MALFORMED_EVENT_ERRORS

_ID_BYTES = 12
_FINISH_REASONS = {"tool_calls": "tool_calls", "function_call": "function_call"}
"""Finish reason of a choice by the field in which its calls are."""


class ToolCallNormalizer:
    """Normalizer of the calls in one response, which remembers the calls of each choice."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, str, object], int] = {}
        """Index of a call by its choice and by the id or the index that the server gave it."""
        self._counts: dict[int, int] = {}
        """Number of calls of each choice."""
        self._named: set[tuple[int, int]] = set()
        """Choice and index of the calls whose name was sent."""
        self._reasons: dict[int, str] = {}
        """Finish reason of the choices that have calls."""

    @property
    def has_calls(self) -> bool:
        """Whether the response has calls so far, which change the finish reason."""
        return bool(self._reasons)

    def normalize(self, body: bytes) -> bytes:
        """Return a chunk or a whole response with its calls as clients need them. Malformed ones stay as they are."""
        try:
            response = msgspec.json.decode(body)
            is_changed = [self._normalize_choice(choice) for choice in response["choices"]]
        except MALFORMED_EVENT_ERRORS:
            return body
        return msgspec.json.encode(response) if any(is_changed) else body

    def _normalize_choice(self, choice: dict[str, Any]) -> bool:
        number = choice.get("index", 0)
        is_delta = "delta" in choice
        message: dict[str, Any] = choice.get("delta" if is_delta else "message") or {}
        calls = message.get("tool_calls")
        for name, reason in _FINISH_REASONS.items():
            if message.get(name):
                self._reasons.setdefault(number, reason)
        normalized = [self._normalize_call(number, call, is_delta=is_delta) for call in calls or ()]
        is_changed = bool(calls) and normalized != calls
        if is_changed:
            message["tool_calls"] = normalized
        if choice.get("finish_reason") == "stop" and number in self._reasons:
            choice["finish_reason"] = self._reasons[number]
            is_changed = True
        return is_changed

    def _normalize_call(
        self, choice: int, call: dict[str, Any], *, is_delta: bool
    ) -> dict[str, Any]:
        kind = "custom" if call.get("custom") else "function"
        body = dict(call.get(kind) or {})
        for name in ("arguments", "input"):
            if not isinstance(body.get(name), str | None):
                body[name] = msgspec.json.encode(body[name]).decode()
        position = self._find(choice, call, has_name=bool(body.get("name"))) if is_delta else None
        is_first = position is None
        if position is None:
            position = self._counts.get(choice, 0)
            self._counts[choice] = position + 1
        for place in _list_places(choice, call):
            self._places.setdefault(place, position)
            if is_first and place[1] == "index":  # a server may use one index for all calls
                self._places[place] = position
        normalized = call | {kind: body}
        if is_delta:
            normalized["index"] = position
        if is_first:
            normalized["id"] = call.get("id") or f"call_{secrets.token_hex(_ID_BYTES)}"
            normalized["type"] = call.get("type") or kind
        else:
            _drop_set(normalized, "id")
        if (choice, position) in self._named:
            _drop_set(body, "name")
        elif body.get("name"):
            self._named.add((choice, position))
        return normalized

    def _find(self, choice: int, call: dict[str, Any], *, has_name: bool) -> int | None:
        """Return the index of the call that a delta continues; None if it begins another one.

        An id that is new begins a call, unless the delta has no name: some servers invent an id for each delta.
        """
        known = [
            self._places[place] for place in _list_places(choice, call) if place in self._places
        ]
        is_known_id = (choice, "id", call.get("id")) in self._places
        if known and (is_known_id or not (has_name and call.get("id"))):
            return known[0]
        if has_name or not self._counts.get(choice) or isinstance(call.get("index"), int):
            return None
        return self._counts[choice] - 1


def _list_places(choice: int, call: dict[str, Any]) -> list[tuple[int, str, object]]:
    """Return the keys by which a later delta may refer to a call: its id, and its index at the server."""
    values = [(name, call.get(name)) for name in ("id", "index")]
    return [
        (choice, name, value)
        for name, value in values
        if isinstance(value, str | int) and value != ""
    ]


def _drop_set(fields: dict[str, Any], name: str) -> None:
    """Remove a field, unless it is empty, which clients ignore."""
    if fields.get(name):
        del fields[name]
