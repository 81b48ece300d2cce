"""Responses and errors of Ollama's API, built from a chat's or completion's output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from argosy.protocol.dialects.dialect_output import (
    OLLAMA_FIELDS,
    CallKind,
    DialectOutput,
    OutputIdentity,
    parse_call_arguments,
)
from argosy.protocol.dialects.ollama_context import encode_context
from argosy.protocol.errors import ApiError
from argosy.protocol.openai_responses import TokenUsage

NDJSON_CONTENT_TYPE = b"application/x-ndjson"
_NANOSECONDS = 1_000_000_000
_ESCAPED_CHARACTERS = {
    character.encode(): f"\\u{ord(character):04x}".encode() for character in "\x85\u2028\u2029"
}
"""Line breaks of Unicode, at which the client `ollama` splits a stream into lines as well."""
_encode = msgspec.json.Encoder().encode


def encode_ollama_error(error: ApiError, request_id: str) -> bytes:  # noqa: ARG001 - signature of all dialects
    """Encode the body of an error response, which is also the last line of a stream that fails."""
    return _encode_line({"error": OLLAMA_FIELDS.rename(error).message})


def _encode_line(content: dict[str, Any]) -> bytes:
    line: bytes = _encode(content)
    if not line.isascii():
        for character, escape in _ESCAPED_CHARACTERS.items():
            line = line.replace(character, escape)
    return line + b"\n"


def format_timestamp(seconds: float) -> str:
    """Format seconds since the epoch as Ollama does."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class OllamaOutput(DialectOutput):
    """Response of `/api/chat` or `/api/generate`, streamed as lines of JSON or whole.

    Args:
        model: Model as the request names it.
        endpoint: The endpoint, which decides where text stands in a line.
        clock: Returns seconds since the epoch.
        is_streamed: Whether the output arrives as it is generated. Without that, only `read_first_output_s` knows the
            time to the first token. If it is unknown, the whole duration counts as generation.
        keep_alive_s: Time for which the model shall stay in memory; None if the request says nothing of it. With 0, a
            request without a prompt unloads the model instead of loading it.
    """

    stream_content_type = NDJSON_CONTENT_TYPE
    conversation: list[dict[str, Any]] | None = None
    """Messages of a generate request, which the response returns as its `context` for the next one."""
    read_first_output_s: Callable[[], float | None] | None = None
    """Returns the seconds from the request to the first output of a response that arrives whole."""

    def __init__(
        self,
        model: str,
        endpoint: Literal["chat", "generate"],
        clock: Callable[[], float],
        *,
        is_streamed: bool = True,
        keep_alive_s: float | None = None,
    ) -> None:
        super().__init__()
        self._model = model
        self._is_chat = endpoint == "chat"
        self._clock = clock
        self.keep_alive_s = keep_alive_s
        self._requested_at = clock()
        self._is_streamed = is_streamed
        self._first_output_at: float | None = None if is_streamed else self._requested_at
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._calls: list[dict[str, Any]] = []
        self._open_call: tuple[str, str, list[str]] | None = None
        """Id, name and text of the call whose arguments are arriving."""
        self._response: dict[str, Any] = {}

    def start(self, identity: OutputIdentity, tokens: TokenUsage) -> None:
        """Do nothing, since the first line has text."""

    def add_reasoning(self, text: str) -> None:
        self._thinking.append(text)
        self._send(thinking=text)

    def add_text(self, text: str, logprobs: Sequence[dict[str, Any]]) -> None:
        self._close_call()
        self._text.append(text)
        self._logprobs += logprobs
        self._send(text, logprobs=logprobs)

    def start_call(self, call_id: str, name: str, kind: CallKind) -> None:  # noqa: ARG002 - all functions
        self._close_call()
        self._mark_first_output()
        self._open_call = call_id, name, []

    def add_call_text(self, text: str) -> None:
        if self._open_call is not None:
            self._open_call[2].append(text)

    def finish(self, finish_reason: str, stop_reason: int | str | None, tokens: TokenUsage) -> None:
        del stop_reason  # not in this API
        self._close_call()
        now = self._clock()
        if not self._is_streamed and self.read_first_output_s is not None:
            self._first_output_at = self._requested_at + (self.read_first_output_s() or 0.0)
        first_output_at = now if self._first_output_at is None else self._first_output_at
        prompt_duration = int((first_output_at - self._requested_at) * _NANOSECONDS)
        counts: dict[str, Any] = {
            "done_reason": "length" if finish_reason == "length" else "stop",
            "total_duration": int((now - self._requested_at) * _NANOSECONDS),
            "load_duration": 0,
            "prompt_eval_count": tokens.prompt_tokens,
            # Left out instead of 0, as in Ollama, because clients divide by it.
            **({"prompt_eval_duration": prompt_duration} if prompt_duration else {}),
            "eval_count": tokens.output_tokens,
            "eval_duration": max(0, int((now - first_output_at) * _NANOSECONDS)),
        }
        if self.conversation is not None:
            counts["context"] = encode_context(self.conversation, "".join(self._text))
        self._response = {
            **self._line(
                "".join(self._text), "".join(self._thinking), self._calls, self._logprobs, done=True
            ),
            **counts,
        }
        self._unsent.append(_encode_line({**self._line(done=True), **counts}))

    def finish_load(self) -> None:
        """End the response to a request without a prompt."""
        reason = "unload" if self.keep_alive_s == 0.0 else "load"
        self._response = {**self._line(done=True), "done_reason": reason}
        self._unsent.append(_encode_line(self._response))

    def fail(self, error: ApiError) -> None:
        self._unsent.append(encode_ollama_error(error, ""))

    def keepalive(self, comment: bytes) -> bytes:  # noqa: ARG002 - these streams have no comments
        """Return a line without text, because these streams have no comments."""
        return _encode_line(self._line())

    def build_response(self) -> dict[str, Any]:
        return self._response

    def _close_call(self) -> None:
        if self._open_call is None:
            return
        call_id, name, pieces = self._open_call
        function = {"name": name, "arguments": parse_call_arguments("".join(pieces))}
        call = {"id": call_id, "function": function}
        self._open_call = None
        self._calls.append(call)
        self._send(calls=[call])

    def _send(
        self,
        text: str = "",
        thinking: str = "",
        calls: Sequence[dict[str, Any]] = (),
        logprobs: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._mark_first_output()
        self._unsent.append(_encode_line(self._line(text, thinking, calls, logprobs)))

    def _mark_first_output(self) -> None:
        if self._first_output_at is None:
            self._first_output_at = self._clock()

    def _line(
        self,
        text: str = "",
        thinking: str = "",
        calls: Sequence[dict[str, Any]] = (),
        logprobs: Sequence[dict[str, Any]] = (),
        *,
        done: bool = False,
    ) -> dict[str, Any]:
        line = {"model": self._model, "created_at": format_timestamp(self._clock())}
        optional: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if self._is_chat:
            if calls:
                optional["tool_calls"] = calls
            content: dict[str, Any] = {
                "message": {"role": "assistant", "content": text, **optional}
            }
        else:
            content = {"response": text, **optional}
        if logprobs:
            content["logprobs"] = logprobs
        return {**line, **content, "done": done}
