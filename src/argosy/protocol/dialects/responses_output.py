"""Responses and events of OpenAI's Responses API, built from a chat's output.

The order of events is the one that the stream helpers of the SDK and Codex require.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from argosy.protocol.dialects.dialect_output import (
    RESPONSES_FIELDS,
    CallKind,
    DialectOutput,
    OutputIdentity,
)
from argosy.protocol.dialects.responses_tools import TranslatedTools
from argosy.protocol.errors import ApiError
from argosy.protocol.openai_responses import NO_TOKENS, TokenUsage

RESPONSE_ID_PREFIX = "resp_"
_INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt", 413: "invalid_prompt"}
_encode = msgspec.json.Encoder().encode
_LOGPROB_FIELDS = ("token", "bytes", "logprob")
_TEXT_FIELDS = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}


class _PartKind(NamedTuple):
    """How the parts of an item are named, in the item and in its events."""

    type: str
    field: str
    """Field of the item that lists the parts."""
    part_event: str
    text_event: str
    position_field: str


_TEXT = _PartKind(
    "output_text", "content", "response.content_part", "response.output_text", "content_index"
)
_REASONING = _PartKind(
    "reasoning_text", "content", "response.content_part", "response.reasoning_text", "content_index"
)
_SUMMARY = _PartKind(
    "summary_text",
    "summary",
    "response.reasoning_summary_part",
    "response.reasoning_summary_text",
    "summary_index",
)
_PART_KINDS = {kind.type: kind for kind in (_TEXT, _REASONING, _SUMMARY)}


def encode_responses_error(error: ApiError, request_id: str) -> bytes:
    """Encode the body of an error response."""
    return RESPONSES_FIELDS.rename(error).encode_body(request_id)


class ResponsesOutput(DialectOutput):
    """Response of the Responses API, streamed or whole.

    Args:
        description: Fields of the response that repeat the request.
        tools: The request's tools.
        encrypt: Encrypts reasoning for the client; None if the client did not ask for it.
        has_summary: Whether the client asked for a summary of the reasoning. It receives the reasoning as one.
    """

    starts_with_heartbeat = True

    def __init__(
        self,
        description: dict[str, Any],
        tools: TranslatedTools,
        encrypt: Callable[[str], str] | None = None,
        *,
        has_summary: bool = False,
    ) -> None:
        super().__init__()
        self._tools = tools
        self._reasoning_kind = _SUMMARY if has_summary else _REASONING
        self._encrypt = encrypt
        self._description = description
        self._response: dict[str, Any] = {}
        """The response so far. Its output is complete after the end."""
        self._digits = ""
        self._sequence_number = 0
        self._items: list[dict[str, Any]] = []
        self._texts: list[str] = []
        """Text of the open item so far."""
        self._logprobs: list[dict[str, Any]] = []
        self._is_open = False
        """Whether the last item is open."""

    def describe_start(self, identity: OutputIdentity) -> dict[str, Any]:
        """Return the response as it is before its first output."""
        return {
            "id": RESPONSE_ID_PREFIX + identity.id,
            "object": "response",
            "created_at": identity.created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **self._description,
            "model": identity.model,
        }

    def describe_empty(self, identity: OutputIdentity) -> dict[str, Any]:
        """Return the response as it is if no output is generated."""
        usage = render_usage(NO_TOKENS)
        return {**self.describe_start(identity), "status": "completed", "usage": usage}

    def start(self, identity: OutputIdentity, tokens: TokenUsage) -> None:  # noqa: ARG002 - only at the end
        self._digits = identity.id
        self._response = self.describe_start(identity)
        self._send("response.created", response=self._response)
        self._send("response.in_progress", response=self._response)

    def add_reasoning(self, text: str) -> None:
        if not self._is_open_item("reasoning"):
            item = {"type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
            self._start_item("rs", item)
            self._start_part(self._reasoning_kind)
        self._texts.append(text)
        self._send_part_event(self._reasoning_kind, "delta", delta=text)

    def add_text(self, text: str, logprobs: Sequence[dict[str, Any]]) -> None:
        if not self._is_open_item("message"):
            self._start_message()
        self._texts.append(text)
        converted = list(_convert_logprobs(logprobs))
        self._logprobs += converted
        self._send_part_event(_TEXT, "delta", delta=text, logprobs=converted)

    def start_call(self, call_id: str, name: str, kind: CallKind) -> None:
        self._close("completed")
        tool = self._tools.get_tool(name)
        call: dict[str, Any] = {"call_id": call_id, "name": tool.name}
        if tool.namespace is not None:
            call["namespace"] = tool.namespace
        if kind == "custom":
            self._start_item("ctc", {"type": "custom_tool_call", **call, "input": ""})
        else:
            item = {"type": "function_call", **call, "arguments": "", "status": "in_progress"}
            self._start_item("fc", item)

    def add_call_text(self, text: str) -> None:
        self._texts.append(text)
        self._send_item_event(f"{_TEXT_FIELDS[self._items[-1]['type']][1]}.delta", delta=text)

    def finish(self, finish_reason: str, stop_reason: int | str | None, tokens: TokenUsage) -> None:
        reason = _INCOMPLETE_REASONS.get(finish_reason)
        status = "completed" if reason is None else "incomplete"
        if not self._items:
            self._start_message()
        self._close(status)
        if reason is not None:
            details = {"reason": reason}
            if isinstance(stop_reason, str):  # a limit or the deadline of this server
                details["stop_reason"] = stop_reason
            self._response["incomplete_details"] = details
        self._response["usage"] = render_usage(tokens)
        self._end(status)

    def fail(self, error: ApiError) -> None:
        self._close("incomplete")
        default_code = "server_error" if error.status >= 500 else "invalid_prompt"
        code = _ERROR_CODES.get(error.status, default_code)
        self._response["error"] = {"code": code, "message": error.message}
        self._end("failed")

    def heartbeat(self, event: bytes) -> bytes:  # noqa: ARG002 - not in this API
        """Repeat that the response is in progress. Clients require that it was created before."""
        self._send("response.in_progress", response=self._response)
        return self.drain()

    def build_response(self) -> dict[str, Any]:
        return self._response

    def _end(self, status: str) -> None:
        self._response["status"] = status
        self._response["output"] = self._items
        self._send(f"response.{status}", response=self._response)

    # --- items -----------------------------------------------------------------------------------

    def _is_open_item(self, kind: str) -> bool:
        if self._is_open and self._items[-1]["type"] == kind:
            return True
        self._close("completed")
        return False

    def _start_message(self) -> None:
        item = {"type": "message", "role": "assistant", "status": "in_progress", "content": []}
        self._start_item("msg", item)
        self._start_part(_TEXT, annotations=[], logprobs=[])

    def _start_item(self, prefix: str, item: dict[str, Any]) -> None:
        position = len(self._items)
        self._items.append({"id": f"{prefix}_{self._digits}{position:02x}", **item})
        self._is_open = True
        self._send("response.output_item.added", output_index=position, item=self._items[-1])

    def _close(self, status: str) -> None:
        """End the open item, and give it its whole content."""
        if not self._is_open:
            return
        item, text = self._items[-1], "".join(self._texts)
        match item["type"]:
            case "message":
                self._send_part_event(_TEXT, "done", text=text, logprobs=self._logprobs)
                self._end_part(_TEXT, text, annotations=[], logprobs=self._logprobs)
            case "reasoning":
                self._send_part_event(self._reasoning_kind, "done", text=text)
                self._end_part(self._reasoning_kind, text)
                if self._encrypt is not None:
                    item["encrypted_content"] = self._encrypt(text)
            case kind:
                field, event = _TEXT_FIELDS[kind]
                is_function = kind == "function_call"
                if is_function and not text:  # clients parse it, and an empty text is no JSON
                    text = "{}"
                    self._send_item_event(f"{event}.delta", delta=text)
                item[field] = text
                name = {"name": item["name"]} if is_function else {}
                self._send_item_event(f"{event}.done", **{field: text}, **name)
        if "status" in item:
            item["status"] = status
        self._send("response.output_item.done", output_index=len(self._items) - 1, item=item)
        self._texts, self._logprobs, self._is_open = [], [], False

    # --- events ----------------------------------------------------------------------------------

    def _start_part(self, kind: _PartKind, **fields: Any) -> None:  # noqa: ANN401 - any JSON
        part = {"type": kind.type, "text": "", **fields}
        self._send_item_event(f"{kind.part_event}.added", **{kind.position_field: 0}, part=part)

    def _end_part(self, kind: _PartKind, text: str, **fields: Any) -> None:  # noqa: ANN401 - any JSON
        part = {"type": kind.type, "text": text, **fields}
        self._items[-1][kind.field] = [part]
        self._send_item_event(f"{kind.part_event}.done", **{kind.position_field: 0}, part=part)

    def _send_part_event(self, kind: _PartKind, name: str, **fields: Any) -> None:  # noqa: ANN401 - any JSON
        self._send_item_event(f"{kind.text_event}.{name}", **{kind.position_field: 0}, **fields)

    def _send_item_event(self, kind: str, **fields: Any) -> None:  # noqa: ANN401 - any JSON
        position = len(self._items) - 1
        self._send(kind, output_index=position, item_id=self._items[-1]["id"], **fields)

    def _send(self, kind: str, **fields: Any) -> None:  # noqa: ANN401 - any JSON
        self._unsent.append(format_response_event(self._sequence_number, kind, fields))
        self._sequence_number += 1


def _convert_logprobs(logprobs: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    for entry in logprobs:
        one, *top = [
            {name: each.get(name) for name in _LOGPROB_FIELDS}
            for each in (entry, *(entry.get("top_logprobs") or ()))
        ]
        yield one | {"top_logprobs": top}


def render_usage(tokens: TokenUsage) -> dict[str, Any]:
    """Return the counts in the shape of the Responses API."""
    return {
        "input_tokens": tokens.prompt_tokens,
        "input_tokens_details": {"cached_tokens": tokens.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": tokens.output_tokens,
        "output_tokens_details": {"reasoning_tokens": tokens.reasoning_tokens or 0},
        "total_tokens": tokens.prompt_tokens + tokens.output_tokens,
    }


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
        for field in ("summary", "content"):
            for index, part in enumerate(item.get(field) or ()):
                yield from _list_part_events(part, place, index)
        yield "response.output_item.done", {"output_index": position, "item": item}
    yield _end_event(response)


def _end_event(response: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return f"response.{response['status']}", {"response": response}


def _list_part_events(
    part: dict[str, Any], place: dict[str, Any], index: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    kind = _PART_KINDS[part["type"]]
    where = {**place, kind.position_field: index}
    logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    yield f"{kind.part_event}.added", {**where, "part": part | {"text": ""}}
    yield f"{kind.text_event}.delta", {**where, "delta": part["text"], **logprobs}
    yield f"{kind.text_event}.done", {**where, "text": part["text"], **logprobs}
    yield f"{kind.part_event}.done", {**where, "part": part}


def _empty_item(item: dict[str, Any]) -> dict[str, Any]:
    empty = dict(item)
    if item["type"] in _TEXT_FIELDS:
        empty[_TEXT_FIELDS[item["type"]][0]] = ""
    else:
        empty |= {name: [] for name in ("summary", "content") if name in item}
    if "status" in item:
        empty["status"] = "in_progress"
    return empty
