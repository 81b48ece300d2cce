"""What came back for one request: stamps of tokens, counts, and how it ended."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from argosy.bench.lengths import LONGEST
from argosy.protocol import EventParser

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises for JSON that is none, that is no UTF-8, or that is nested without end."""
_MOST_ERROR_CHARS = 300
_Count = Annotated[int, msgspec.Meta(ge=0, le=LONGEST)]


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_CHUNK = msgspec.json.Decoder(_Chunk)


class Reply:
    """A streamed answer while it comes. Times are those of the client's clock."""

    def __init__(self, *, keep_text: bool = False) -> None:
        self.now = 0.0
        """When the bytes at hand came."""
        self.sent_at: float | None = None
        self.status = 0
        self.has_length = False
        self.chunks: list[float] = []
        """When each chunk with text came."""
        self.counted: list[int] = []
        """Tokens by the server's running count when each of these chunks came; empty without one."""
        self.last_at: float | None = None
        """When the last chunk of a choice came: text, or the reason of the end."""
        self.input_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.output_tokens: int | None = None
        self.finish: str | None = None
        self.error = ""
        self.detail = ""
        self.resent = False
        """Sent twice: the first connection had been kept, and was closed without a byte."""
        self.done = False
        """`[DONE]` came."""
        self._events = EventParser()
        self._keep_text = keep_text
        self._text: list[str] = []
        self._body: list[bytes] = []

    @property
    def text(self) -> str:
        """The answer, where it was to be kept."""
        return "".join(self._text)

    @property
    def body(self) -> bytes:
        """An answer that is no stream."""
        return b"".join(self._body)

    @property
    def untouched(self) -> bool:
        """Cut before a byte of it came."""
        return self.error == "cut" and not self.status

    @property
    def whole_at_eof(self) -> bool:
        """The end of the connection is the end of the body."""
        return self.status >= 200 and not self.has_length

    def sent(self, now: float) -> None:
        """Somebody began to send the request."""
        if self.sent_at is None:
            self.sent_at = now

    def start_over(self) -> None:
        """It goes out again, on another connection; the first try counts as waiting."""
        self.error = self.detail = ""
        self.resent = True

    def fail(self, error: str, detail: str) -> None:
        """It went wrong; the first thing that did is kept."""
        if not self.error:
            self.error = error
            # A server's words, which are shown: no escape sequence goes to a terminal.
            shown = detail[:_MOST_ERROR_CHARS]
            self.detail = "".join(each if each.isprintable() else " " for each in shown)

    def end(self) -> None:
        """Nothing more will come."""
        if self.status not in {0, 200}:
            self.fail(f"http {self.status}", _message(self.body))

    def feed(self, body: bytes) -> None:
        """A piece of the body."""
        if self.status != 200:
            self._body.append(body)
            return
        for data in self._events.feed(body):
            if data == b"[DONE]":
                self.done = True
                continue
            try:
                self._take(_CHUNK.decode(data))
            except UnicodeDecodeError as error:
                self.fail("malformed", f"A chunk is no UTF-8: {error}")
            except UNREADABLE as error:
                self.fail("malformed", f"A chunk is not what OpenAI sends: {error}")

    def _take(self, chunk: _Chunk) -> None:
        if chunk.error is not None:
            self.fail("stream", str(chunk.error))
        usage = chunk.usage
        if usage is not None:
            if usage.prompt_tokens is not None:
                self.input_tokens = usage.prompt_tokens
            if usage.completion_tokens is not None:
                self.output_tokens = usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                self.cached_tokens = usage.prompt_tokens_details.cached_tokens
        for choice in chunk.choices:
            self.last_at = self.now
            if choice.finish_reason is not None:
                self.finish = choice.finish_reason
            text = _text(choice)
            if text is None:
                continue
            self.chunks.append(self.now)
            if usage is not None and usage.completion_tokens is not None:
                self.counted.append(usage.completion_tokens)
            if self._keep_text:
                self._text.append(text)


def _text(choice: _Choice) -> str | None:
    """What a reader sees of the chunk; None when it is nothing."""
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


def _message(body: bytes) -> str:
    """What an error body says, in whichever of the usual shapes."""
    try:
        decoded = msgspec.json.decode(body)
    except UNREADABLE:
        return body[:_MOST_ERROR_CHARS].decode(errors="replace")
    inner = decoded.get("error", decoded) if isinstance(decoded, dict) else decoded
    if isinstance(inner, dict):
        return str(inner.get("message") or inner.get("detail") or inner)
    return str(inner)


class Plain(Reply):
    """An answer that is one JSON body, whatever its status."""

    def feed(self, body: bytes) -> None:
        """Keep it."""
        self._body.append(body)
