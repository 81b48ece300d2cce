"""Response to one request: timestamps of its chunks, token counts, and how it ended."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from argosy.bench.distributions import MAX_LENGTH_TOKENS
from argosy.protocol import EventParser

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of the decoder for invalid JSON, invalid UTF-8, and unlimited nesting."""
_MAX_ERROR_CHARS = 300
_TokenCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_LENGTH_TOKENS)]


class _StreamDelta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _StreamChoice(msgspec.Struct):
    text: str | None = None
    delta: _StreamDelta | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: _TokenCount | None = None


class _StreamUsage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None
    prompt_tokens: _TokenCount | None = None
    completion_tokens: _TokenCount | None = None


class _StreamChunk(msgspec.Struct):
    choices: list[_StreamChoice] = []
    usage: _StreamUsage | None = None
    error: Any = None


_CHUNK_DECODER = msgspec.json.Decoder(_StreamChunk)


class BenchResponse:
    """Streamed response while it is received. Times are those of the client's clock."""

    def __init__(self, *, keep_text: bool = False) -> None:
        self.received_at = 0.0
        """Time at which the current bytes were received."""
        self.sent_at: float | None = None
        self.status = 0
        self.has_body_length = False
        self.chunk_times: list[float] = []
        """Time of each chunk with text."""
        self.running_token_counts: list[int] = []
        """The server's running token count at each of these chunks. Empty if it reports none."""
        self.last_chunk_at: float | None = None
        """Time of the last chunk with a choice, which has text or the finish reason."""
        self.input_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.output_tokens: int | None = None
        self.finish_reason: str | None = None
        self.error = ""
        self.error_detail = ""
        self.resent = False
        """Whether the request was sent twice, because the server had closed the reused connection."""
        self.saw_done = False
        """Whether `[DONE]` was received."""
        self._events = EventParser()
        self._keep_text = keep_text
        self._text: list[str] = []
        self._body: list[bytes] = []

    @property
    def text(self) -> str:
        """Text of the response, if `keep_text` is set."""
        return "".join(self._text)

    @property
    def body(self) -> bytes:
        """Body of a response that is not a stream."""
        return b"".join(self._body)

    def on_resend(self) -> None:
        """Prepare for sending the request again on a new connection. The first attempt counts as waiting time."""
        self.error = self.error_detail = ""
        self.resent = True

    def record_error(self, error: str, detail: str) -> None:
        """Record an error, unless an earlier one is recorded."""
        if not self.error:
            self.error = error
            # The text is from the server. No escape sequence may reach the terminal.
            excerpt = detail[:_MAX_ERROR_CHARS]
            self.error_detail = "".join(char if char.isprintable() else " " for char in excerpt)

    def on_end(self) -> None:
        """Record an HTTP error status at the end of the response."""
        if self.status not in {0, 200}:
            self.record_error(f"http {self.status}", _error_message(self.body))

    def on_body(self, body: bytes) -> None:
        """Parse the next bytes of the body."""
        if self.status != 200:
            self._body.append(body)
            return
        for data in self._events.feed(body):
            if data == b"[DONE]":
                self.saw_done = True
                continue
            try:
                self._apply_chunk(_CHUNK_DECODER.decode(data))
            except UnicodeDecodeError as error:
                self.record_error("malformed", f"A chunk is not UTF-8: {error}")
            except DECODE_ERRORS as error:
                self.record_error("malformed", f"A chunk is not an OpenAI chunk: {error}")

    def _apply_chunk(self, chunk: _StreamChunk) -> None:
        if chunk.error is not None:
            self.record_error("stream", str(chunk.error))
        usage = chunk.usage
        if usage is not None:
            if usage.prompt_tokens is not None:
                self.input_tokens = usage.prompt_tokens
            if usage.completion_tokens is not None:
                self.output_tokens = usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                self.cached_tokens = usage.prompt_tokens_details.cached_tokens
        for choice in chunk.choices:
            self.last_chunk_at = self.received_at
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
            text = _visible_text(choice)
            if text is None:
                continue
            self.chunk_times.append(self.received_at)
            if usage is not None and usage.completion_tokens is not None:
                self.running_token_counts.append(usage.completion_tokens)
            if self._keep_text:
                self._text.append(text)


def _visible_text(choice: _StreamChoice) -> str | None:
    """Return the chunk's text as a reader sees it, or None if the chunk shows nothing.

    Reasoning and tool calls are visible, but are not part of the text.
    """
    if choice.text:
        return choice.text
    delta = choice.delta
    if delta is None:
        return None
    if delta.content:
        return delta.content
    if delta.reasoning or delta.reasoning_content or delta.tool_calls:
        return ""
    return None


def _error_message(body: bytes) -> str:
    """Return the message of an error body, in any of the common formats."""
    try:
        decoded = msgspec.json.decode(body)
    except DECODE_ERRORS:
        return body[:_MAX_ERROR_CHARS].decode(errors="replace")
    inner = decoded.get("error", decoded) if isinstance(decoded, dict) else decoded
    if isinstance(inner, dict):
        return str(inner.get("message") or inner.get("detail") or inner)
    return str(inner)


class JsonResponse(BenchResponse):
    """Response with a single JSON body, also for errors."""

    def on_body(self, body: bytes) -> None:
        """Keep the bytes."""
        self._body.append(body)
