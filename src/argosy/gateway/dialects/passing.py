"""The stream of a server that cannot be carried on elsewhere: whole events pass as they came, and are counted."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from argosy.gateway.ask import BYTES_PER_TOKEN
from argosy.gateway.dialects.events import (
    DONE,
    END,
    UNREADABLE,
    cut,
    data_of,
    error_of,
    status_of,
)
from argosy.gateway.dialects.journal import Delivered
from argosy.gateway.dialects.reader import StreamReader
from argosy.protocol import SSE_DONE, Unended

Tokens = Annotated[int, Meta(ge=0, lt=2**31)]
"""A count that can be: whatever else a server says is not billed. A ledger could not sum up a few larger ones."""


ONE_TOKEN_BYTES = 32
"""Longer text of one event is of several tokens: many servers send those that came together as one."""


def tokens_of(*said: object) -> int:
    """How many tokens an event has brought that says this, about, where its server does not tell: mostly one.

    Of several texts the longest counts: some say the same twice, by an old name and a new one.
    """
    texts = [text for one in said for text in (_arguments(one) if isinstance(one, list) else [one])]
    size = max(len(text.encode()) for text in ("", *texts) if isinstance(text, str))
    return size // BYTES_PER_TOKEN if size > ONE_TOKEN_BYTES else 1


def _arguments(calls: list[object]) -> list[object]:
    """Those of tool calls, as far as they are some."""
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    return [one.get("arguments") for one in functions if isinstance(one, dict)]


class Cached(msgspec.Struct):
    """`prompt_tokens_details`, as far as it counts."""

    cached_tokens: Tokens | None = None


class Usage(msgspec.Struct):
    """The tokens that a server says it used; None where it does not say."""

    prompt_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None
    prompt_tokens_details: Cached | None = None

    def into(self, delivered: Delivered) -> None:
        """Take it for what was delivered, as far as it says."""
        if self.prompt_tokens is not None:
            delivered.prompt_tokens = self.prompt_tokens
        if self.completion_tokens is not None:
            delivered.output_tokens = self.completion_tokens
        delivered.cached_tokens = min(self.cached_tokens, delivered.prompt_tokens)

    @property
    def cached_tokens(self) -> int:
        """0 where it does not say."""
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0


class Identity(msgspec.Struct):
    """What all events of a stream say of the answer."""

    id: str = ""
    created: int = 0
    model: str = ""


class _Whole(msgspec.Struct):
    usage: Usage | None = None


def usage_of(content: bytes) -> Usage | None:
    """The usage of a whole answer; None when it tells none, or is no such answer."""
    try:
        return msgspec.json.decode(content, type=_Whole).usage
    except (msgspec.DecodeError, RecursionError):
        return None


class _Ending(msgspec.Struct):
    finish_reason: str | None = None


class _Endings(msgspec.Struct):
    choices: list[_Ending] | None = None
    error: Any = None


def is_object(content: bytes) -> bool:
    """Whether it looks like a whole one of JSON: pages, texts, halves and what is compressed do not."""
    return content[:64].lstrip().startswith(b"{") and content[-64:].rstrip().endswith(b"}")


def status_within(content: bytes, broken_off: frozenset[str]) -> int:
    """The status that a whole answer with 200 means: a server may fail or refuse after its head.

    500 where it was `broken_off`, as a finish reason says.
    """
    try:
        told = msgspec.json.decode(content, type=_Endings)
    except UNREADABLE:
        return 200
    if not told.choices and told.error is not None:
        return status_of({"error": told.error}) or 500
    ends = {choice.finish_reason for choice in told.choices or ()}
    return 200 if ends.isdisjoint(broken_off) else 500


class _Delta(msgspec.Struct):
    """Text mostly; some send parts."""

    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    refusal: Any = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None

    @property
    def says(self) -> bool:
        more = self.reasoning or self.reasoning_content or self.refusal or self.tool_calls
        return bool(self.content or more or self.function_call or self.audio)

    @property
    def tokens(self) -> int:
        texts = self.content, self.reasoning, self.reasoning_content, self.refusal
        return tokens_of(*texts, self.tool_calls)


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def says(self) -> bool:
        return bool(self.text) or (self.delta is not None and self.delta.says)

    @property
    def tokens(self) -> int:
        return tokens_of(self.text) if self.delta is None else self.delta.tokens


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    object: str | None = None


class PassReader(StreamReader):
    """One attempt's stream. What a choice says counts by its length (`tokens_of`), until the usage tells."""

    def __init__(
        self,
        delivered: Delivered,
        broken_off: frozenset[str],
        *,
        shows_usage: bool,
        echoes: bool,
    ) -> None:
        """`echoes`: each choice begins with its prompt. `broken_off`: finish reasons of answers that are none."""
        self._delivered = delivered
        self._broken_off = broken_off
        self._shows_usage = shows_usage
        self._echoes = echoes
        self._begun: set[int] = set()
        """Choices that have said something."""
        self._decode = msgspec.json.Decoder(_Chunk).decode
        self._rest = Unended()
        self._first = b""
        self.passed = False
        """More than comments was passed on: nobody else can give this answer any more."""
        self.usage_told = False
        """The last event had it."""

    @property
    def identity(self) -> Identity | None:
        """What its events say of the answer."""
        try:
            return msgspec.json.decode(self._first, type=Identity)
        except UNREADABLE:
            return None

    def feed(self, body: bytes) -> bytes:
        """See `StreamReader`."""
        if self.done or self.failure:
            return b""
        whole = cut(self._rest, body)
        events = whole.split(END)[:-1]
        kept = [event for event in events if self._passes(event)]
        self.passed = self.passed or any(data_of(event) is not None for event in kept)
        return whole if len(kept) == len(events) else b"".join(event + END for event in kept)

    def take_held(self) -> bytes:
        """See `StreamReader`."""
        return SSE_DONE

    def _passes(self, event: bytes) -> bool:
        """Count an event; whether the client gets it."""
        if self.done or self.failure:
            return False
        data = data_of(event)
        if data == DONE:
            self.done = True
            return False
        if data is None:
            return True
        try:
            chunk = self._decode(data)
        except (msgspec.DecodeError, RecursionError):
            return True  # no chunk, but perhaps its reader knows what it is
        if chunk.error is not None or chunk.object == "error":
            error = msgspec.json.decode(data)
            self.failure, self.status = error_of(error), status_of(error)
            return False
        if any(choice.finish_reason in self._broken_off for choice in chunk.choices or ()):
            self.failure = "it broke the answer off"
            return False
        self._first = self._first or data
        self._count(chunk)
        return bool(chunk.choices) or chunk.usage is None or self._shows_usage

    def _count(self, chunk: _Chunk) -> None:
        delivered, usage = self._delivered, chunk.usage
        for choice in chunk.choices or ():
            if choice.says:
                prompt = self._echoes and choice.index not in self._begun
                delivered.output_tokens += 1 if prompt else choice.tokens
                self._begun.add(choice.index)
            if choice.finish_reason:
                delivered.finished[choice.index] = choice.finish_reason
        self.usage_told = usage is not None
        if usage is not None:
            usage.into(delivered)
