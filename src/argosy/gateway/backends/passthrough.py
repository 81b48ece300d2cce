"""The stream of a server that cannot be carried on elsewhere: whole events pass as they came, and are counted."""

from __future__ import annotations

from codecs import BOM_UTF8
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from argosy.gateway.backends.backend_adapter import Dialect
from argosy.gateway.backends.native_stream_parser import Delivered
from argosy.gateway.backends.stream_events import (
    DONE,
    END,
    UNREADABLE,
    cut,
    data_of,
    error_of,
    status_of,
)
from argosy.gateway.backends.stream_parser import StreamReader
from argosy.gateway.request_fields import BYTES_PER_TOKEN, MOST_CHOICES, Ask
from argosy.protocol import SSE_DONE, Unended

MOST_TOKENS = 2**31 - 1
Tokens = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
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


class Usages:
    """Those of an answer's choices, where a server tells one for each."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._told = self._prompt = self._output = self._cached = 0

    def add(self, usage: Usage) -> Usage | None:
        """One more; what they are together, once all have been told."""
        self._told += 1
        self._prompt += usage.prompt_tokens or 0
        self._output += usage.completion_tokens or 0
        self._cached += usage.cached_tokens
        return self.together() if self._told == self._ask.choices else None

    def together(self) -> Usage | None:
        """Those that were told; None: there was none. All choices of a prompt have told its tokens."""
        if not self._told:
            return None
        prompt, cached = (
            min(MOST_TOKENS, tokens * self._ask.prompts // self._told)
            for tokens in (self._prompt, self._cached)
        )
        return Usage(prompt or None, min(MOST_TOKENS, self._output) or None, Cached(cached))


class _Whole(msgspec.Struct):
    usage: Usage | None = None


def usage_of(content: bytes, ask: Ask, dialect: Dialect) -> Usage | None:
    """The usage of a whole answer; None when it tells none, or is no such answer.

    About so much where it tells that of its first choice only.
    """
    try:
        usage = msgspec.json.decode(content, type=_Whole).usage
        if usage is None or ask.choices == 1 or not dialect.usage_of_each:
            return usage
    except (msgspec.DecodeError, RecursionError):
        return None
    others = sum(_said(content)[1:])
    output = None if usage.completion_tokens is None else usage.completion_tokens + others
    prompt = usage.prompt_tokens if ask.prompts == 1 else None
    return Usage(prompt, output, usage.prompt_tokens_details)


def tokens_within(content: bytes) -> int:
    """How many tokens a whole answer brought, about, where its server does not tell: those of what its choices say."""
    return sum(_said(content)) or len(content) // BYTES_PER_TOKEN


def _said(content: bytes) -> list[int]:
    """The same of each choice; empty where there are none to be read."""
    try:
        choices = msgspec.json.decode(content, type=_Choices).choices
    except (msgspec.DecodeError, RecursionError):
        return []
    return [choice.size // BYTES_PER_TOKEN or 1 for choice in choices]


class _Ending(msgspec.Struct):
    finish_reason: str | None = None


class _Endings(msgspec.Struct):
    choices: list[_Ending] | None = None
    error: Any = None


def is_object(content: bytes) -> bool:
    """Whether it looks like a whole one of JSON: pages, texts, halves and what is compressed do not."""
    text = content.removeprefix(BOM_UTF8).strip()
    return text.startswith(b"{") and text.endswith(b"}")


def status_within(content: bytes, broken_off: frozenset[str]) -> int:
    """The status that a whole answer with 200 means: a server may fail or refuse after its head.

    500 where it was `broken_off`, as a finish reason says, or has more choices than anybody may ask for.
    """
    try:
        told = msgspec.json.decode(content, type=_Endings)
    except UNREADABLE:
        return 200
    if not told.choices and told.error is not None:
        return status_of({"error": told.error}) or 500
    if len(told.choices or ()) > MOST_CHOICES:
        return 500
    ends = {choice.finish_reason for choice in told.choices or ()}
    return 200 if ends.isdisjoint(broken_off) else 500


def endings_of(content: bytes) -> dict[int, str]:
    """Why each choice of a whole answer ended, by its place there, as far as it says."""
    try:
        choices = msgspec.json.decode(content, type=_Endings).choices or ()
    except UNREADABLE:
        return {}
    reasons = enumerate(choice.finish_reason for choice in choices)
    return {place: reason for place, reason in reasons if reason}


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
        return tokens_of(*self.texts)

    @property
    def texts(self) -> list[object]:
        """All that it says, as far as it is text."""
        calls = self.tool_calls if isinstance(self.tool_calls, list) else []
        said = self.content, self.reasoning, self.reasoning_content, self.refusal
        return [*said, *_arguments(calls)]


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


class _Said(msgspec.Struct):
    text: str | None = None
    message: _Delta | None = None

    @property
    def size(self) -> int:
        """Bytes of what a whole answer's choice says: of texts, and of parts, calls and sounds as they came."""
        message = self.message
        said: list[object] = [self.text]
        if message is not None:
            said = [*message.texts, message.function_call, message.audio]
        return sum(
            len(one.encode() if isinstance(one, str) else msgspec.json.encode(one))
            for one in said
            if one
        )


class _Choices(msgspec.Struct):
    choices: list[_Said] = []


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
        usages: Usages | None,
    ) -> None:
        """`echoes`: each choice begins with its prompt. `broken_off`: finish reasons of answers that are none.

        `usages`: there is one for each choice.
        """
        self._delivered = delivered
        self._broken_off = broken_off
        self._shows_usage = shows_usage
        self._echoes = echoes
        self._usages = usages
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
            self._take(None if self._usages is None else self._usages.together())
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
        if len(chunk.choices or ()) > MOST_CHOICES:
            self.failure = "an event of its stream has more choices than anybody may ask for"
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
        self._take(usage if usage is None or self._usages is None else self._usages.add(usage))

    def _take(self, usage: Usage | None) -> None:
        """Believe it, unless it says that nothing was made where something came: some have not counted yet."""
        if usage is not None and not (usage.completion_tokens == 0 < self._delivered.output_tokens):
            usage.into(self._delivered)
