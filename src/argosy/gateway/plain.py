"""Reads the stream of a server that keeps no journal: whole events are passed on, what they bring is counted.

An event with text is taken for one token until the usage comes, which says how many there were.
"""

from __future__ import annotations

import msgspec

from argosy.gateway.ask import Ask
from argosy.gateway.journal import Delivered

_DATA = b"data:"
_DONE = b"[DONE]"


class Cached(msgspec.Struct):
    """`prompt_tokens_details`, as far as it counts."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The tokens that an answer says it used."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: Cached | None = None

    def into(self, delivered: Delivered) -> None:
        """Take it for what was delivered."""
        details = self.prompt_tokens_details
        delivered.prompt_tokens = self.prompt_tokens
        delivered.cached_tokens = (details.cached_tokens or 0) if details else 0
        delivered.output_tokens = self.completion_tokens or 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: msgspec.Raw | None = None

    @property
    def says(self) -> bool:
        return bool(
            self.content
            or self.reasoning
            or self.reasoning_content
            or self.refusal
            or self.tool_calls
        )


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw | None = None


class Identity(msgspec.Struct):
    """What all chunks of a stream say of the answer."""

    id: str = ""
    created: int = 0
    model: str = ""


class _Whole(msgspec.Struct):
    usage: Usage | None = None


def usage_of(content: bytes) -> Usage | None:
    """The usage of a whole answer; None when it tells none, or is no such answer."""
    try:
        return msgspec.json.decode(content, type=_Whole).usage
    except msgspec.DecodeError:
        return None


class PlainReader:
    """One attempt's stream. The counterpart of `JournalReader`."""

    def __init__(self, delivered: Delivered, ask: Ask) -> None:
        self._delivered = delivered
        self._ask = ask
        self._decoder = msgspec.json.Decoder(_Chunk)
        self._rest = b""
        self._first = b""
        self.done = False
        """`[DONE]` came."""

    @property
    def identity(self) -> Identity:
        """What its chunks say of the answer."""
        try:
            return msgspec.json.decode(self._first, type=Identity)
        except msgspec.DecodeError:
            return Identity(model=self._ask.model)

    def feed(self, body: bytes) -> bytes:
        """What may be passed on now: whole events, an error not among them."""
        data = self._rest + body
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        whole, mark, self._rest = data.rpartition(b"\n\n")
        if not mark:
            return b""
        passed = [block + mark for block in whole.split(b"\n\n") if self._passes(block)]
        return b"".join(passed)

    def take_held(self) -> bytes:
        """Nothing: what was whole has been passed on."""
        return b""

    def _passes(self, block: bytes) -> bool:
        """Count an event; whether the client is to have it."""
        if not block.startswith(_DATA):
            return not block.startswith(b":")
        data = block[len(_DATA) :].lstrip()
        if data == _DONE:
            self.done = True
            return True
        try:
            chunk = self._decoder.decode(data)
        except msgspec.DecodeError:
            return True
        if chunk.error is not None:
            return False
        self._first = self._first or data
        self._count(chunk)
        return bool(chunk.choices) or chunk.usage is None or self._ask.include_usage

    def _count(self, chunk: _Chunk) -> None:
        delivered = self._delivered
        if chunk.usage is not None:
            chunk.usage.into(delivered)
        elif not delivered.prompt_tokens:
            delivered.prompt_tokens = self._ask.prompt_tokens
        for choice in chunk.choices:
            says = choice.text or (choice.delta is not None and choice.delta.says)
            if says and chunk.usage is None:
                delivered.output_tokens += 1
            if choice.finish_reason is not None:
                delivered.finished[choice.index] = choice.finish_reason
