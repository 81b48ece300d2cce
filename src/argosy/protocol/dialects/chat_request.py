"""Result of translating a request to a chat, and rules that all dialects share."""

from __future__ import annotations

import contextlib
import re
from base64 import b64decode
from collections.abc import Callable
from mimetypes import guess_type
from typing import Any, Generic, TypeVar

import msgspec

from argosy.protocol.dialects.dialect_output import DialectOutput
from argosy.protocol.errors import invalid_request

OutputT_co = TypeVar("OutputT_co", bound=DialectOutput, covariant=True)

DEFAULT_EFFORT = "medium"
"""Reasoning effort of a request that enables reasoning without an effort."""
_DATA_URL = re.compile(r"data:([^;,]{1,100})(?:;[^;,]{1,100})*;base64,", re.IGNORECASE)
_TEXT_MEDIA_TYPE = re.compile(
    r"text/.+|application/(?:json|jsonl|x-ndjson|xml|toml|x?-?yaml|javascript|x-sh|sql|.+\+(?:json|xml))"
)
"""Media types of files that are read as text."""


class SharedFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of Argosy that every dialect accepts under the same name and passes on unchanged."""

    priority: int | None = None
    timeout_s: float | None = None
    session_id: str | None = None
    cache_salt: str | None = None

    def extension_fields(self) -> dict[str, Any]:
        """Return those fields that are set, with those of `ExtensionFields`."""
        values = {name: getattr(self, name, None) for name in ExtensionFields.__struct_fields__}
        return drop_unset(values)


class ExtensionFields(SharedFields, frozen=True, kw_only=True):
    """The same for chats."""

    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None


class TranslatedRequest(msgspec.Struct, Generic[OutputT_co], frozen=True, kw_only=True):
    """A request in its internal form, and the builder of its response."""

    body: dict[str, Any]
    """Body of a chat, or of a text completion."""
    output: OutputT_co
    is_completion: bool = False
    """Whether the body is that of a text completion."""
    ignored: tuple[str, ...] = ()
    """Paths of the request's fields without effect, for the response header that names them."""


class RenderedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request in its internal form, and the renderer of its response, which is never a stream."""

    body: dict[str, Any]
    render: Callable[[bytes], bytes]
    """Returns the client's response for the internal one. Raises ValueError or LookupError if that one is malformed."""
    ignored: tuple[str, ...] = ()
    """Paths of the request's fields without effect, for the response header that names them."""


class MessageList:
    """Messages of a chat in the making. Adjacent parts of one assistant turn become one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._open_turn: dict[str, Any] | None = None

    def add_system(self, text: str) -> None:
        """Add a system message. Those before all other messages are merged, since many templates read only one."""
        self._open_turn = None
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += f"\n\n{text}"
        else:
            self.messages.append({"role": "system", "content": text})

    def add_user(self, content: str | list[dict[str, Any]]) -> None:
        """Add a user message with text or content parts."""
        self._open_turn = None
        self.messages.append({"role": "user", "content": content})

    def add_tool_result(self, call_id: str, text: str, name: str | None = None) -> None:
        """Add the result of a tool call."""
        self._open_turn = None
        message = {"role": "tool", "tool_call_id": call_id, "content": text}
        self.messages.append(message if name is None else {**message, "name": name})

    def add_assistant_text(self, text: str) -> None:
        """Add text to the assistant's turn. Text after a tool call starts another message."""
        turn = self._turn(starts_message="tool_calls")
        turn["content"] = (turn["content"] or "") + text

    def add_reasoning(self, text: str) -> None:
        """Add reasoning to the assistant's turn. Reasoning after text or a call starts another message."""
        turn = self._turn(starts_message="tool_calls")
        if turn["content"]:
            self._open_turn = None
            turn = self._turn()
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def add_call(self, call: dict[str, Any]) -> None:
        """Add a tool call to the assistant's turn."""
        self._turn().setdefault("tool_calls", []).append(call)

    def _turn(self, starts_message: str = "") -> dict[str, Any]:
        turn = self._open_turn
        if turn is None or (starts_message and starts_message in turn):
            turn = {"role": "assistant", "content": None}
            self._open_turn = turn
            self.messages.append(turn)
        return turn


def function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Build a function call of a chat's message."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def function_tool(
    name: str, description: str | None, parameters: object, *, strict: bool | None = None
) -> dict[str, Any]:
    """Build a function of a chat's tools."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


def json_schema_format(
    schema: object, *, name: str = "response", strict: bool | None = None
) -> dict[str, Any]:
    """Build a chat's `response_format` for a JSON schema."""
    described: dict[str, Any] = {"name": name, "schema": schema}
    if strict is not None:
        described["strict"] = strict
    return {"type": "json_schema", "json_schema": described}


def image_part(url: str, detail: str | None = None) -> dict[str, Any]:
    """Build an image part of a chat's message."""
    image = {"url": url} if detail is None else {"url": url, "detail": detail}
    return {"type": "image_url", "image_url": image}


def decode_text_file(data: str, param: str, name: str = "") -> str:
    """Return the text of a file that a request contains.

    Any caller may send it. It has at most the bytes of the request's body.

    Args:
        data: Data URL, or base64 of a file whose `name` says that it is a text.
        param: Path of the file in the request.
        name: Name of the file.

    Raises:
        ApiError: 400 if the file is no text in UTF-8.
    """
    media_type, encoded = guess_type(name)[0] or "", data
    if match := _DATA_URL.match(data):
        media_type, encoded = match[1].lower(), data[match.end() :]
    if _TEXT_MEDIA_TYPE.fullmatch(media_type):
        with contextlib.suppress(ValueError):
            return b64decode(encoded, validate=True).decode("utf-8-sig")
    message = f"'{param}' is no text file. Send a text in UTF-8 as data:text/plain;base64,..."
    raise invalid_request(message, param, "unsupported_parameter")


def drop_unset(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}
