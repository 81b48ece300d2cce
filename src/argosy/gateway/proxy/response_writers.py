"""How an answer reaches the client: streamed as it comes, or gathered from the stream of a replica and sent whole.

An answer that is gathered survives its replica as a stream does, and can be ended by a limit like one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Protocol

import msgspec

from argosy.gateway.backends import UNREADABLE, Delivered, check_objects
from argosy.gateway.request_context import CHAT, Journey
from argosy.http_server import Exchange
from argosy.protocol import ApiError, CachedTokens, EventParser, Usage, comment

KEEP_ALIVE = comment(b"keep-alive")
MOST_GATHERED_BYTES = 64 * 1024 * 1024
"""Of an answer's events, which take several times as much memory until all are there."""
_DONE = b"[DONE]"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def usage(delivered: Delivered) -> Usage:
    """What was delivered, as an answer tells it."""
    return Usage(
        prompt_tokens=delivered.prompt_tokens,
        completion_tokens=delivered.output_tokens,
        total_tokens=delivered.prompt_tokens + delivered.output_tokens,
        prompt_tokens_details=CachedTokens(cached_tokens=delivered.cached_tokens),
    )


class Out(Protocol):
    """Takes the events of an answer."""

    async def begin(self) -> None:
        """They begin, or go on."""

    def push(self, data: bytes) -> None:
        """Whole events."""

    @property
    def full(self) -> bool:
        """Whether the answer is to end here, as it has more than can be kept."""

    def keep_alive(self) -> None:
        """Show the client that somebody is there, if that can be shown."""

    def retract(self) -> bool:
        """Forget them, so that the answer can start over. False: the client has them already."""

    async def end(self) -> None:
        """That was all."""


class Streamed:
    """An `Out` that passes them on."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._told = False

    async def begin(self) -> None:
        """See `Out`."""
        if self._exchange.status is None:
            await self._exchange.start_stream()

    def push(self, data: bytes) -> None:
        """See `Out`."""
        self._told = True
        self._exchange.push(data)

    @property
    def full(self) -> bool:
        """See `Out`: the client has it."""
        return False

    def keep_alive(self) -> None:
        """See `Out`."""
        if self._exchange.status is not None:
            self._exchange.push(KEEP_ALIVE)

    def retract(self) -> bool:
        """See `Out`."""
        return not self._told

    async def end(self) -> None:
        """See `Out`."""
        await self._exchange.end_stream()

    def lend(self) -> int | None:
        """The client's socket, for who passes events on past this: see `Wire.lend`."""
        self._told = True  # as far as anybody here knows
        return self._exchange.lend()

    def pass_on(self, chunks: bytes) -> None:
        """What that could not send: see `Wire.pass_on`."""
        self._exchange.pass_on(chunks)


class _Choice(msgspec.Struct):
    """One choice, as far as its chunks have told it."""

    text: list[str] = []
    logprobs: dict[str, Any] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish: str | None = None
    stop: int | str | None = None

    def add(self, chunk: dict[str, Any]) -> None:
        """Take what a chunk says of it."""
        self.text.append(chunk.get("delta", chunk).get("content") or chunk.get("text") or "")
        if chunk.get("logprobs") is not None:
            self._add_logprobs(chunk["logprobs"])
        if "token_ids" in chunk:
            self.token_ids = self.token_ids or []
            self.token_ids += chunk["token_ids"]
        self.prompt_token_ids = chunk.get("prompt_token_ids", self.prompt_token_ids)
        if chunk["finish_reason"] is not None:
            self.finish, self.stop = chunk["finish_reason"], chunk["stop_reason"]

    def _add_logprobs(self, told: dict[str, Any]) -> None:
        known = self.logprobs = self.logprobs or {}
        for name, values in told.items():
            if isinstance(values, list):
                known.setdefault(name, []).extend(values)
            else:
                known[name] = values


class Gathered:
    """An `Out` that puts them together, as our replicas' own whole answers are."""

    def __init__(self, journey: Journey) -> None:
        self._journey = journey
        self._events = EventParser()
        self._choices: defaultdict[int, _Choice] = defaultdict(_Choice)
        self._identity: dict[str, Any] = {}
        self._prompt_ids: list[int] | None = None
        """A chat's, which has one prompt."""
        self._size = 0

    async def begin(self) -> None:
        """See `Out`."""

    def push(self, data: bytes) -> None:
        """See `Out`. Raises ValueError when they are no chunks of an answer."""
        self._size += len(data)
        check_objects(data)
        for told in self._events.feed(data):
            if told == _DONE:
                continue
            try:
                self._add(_decode(told))
            except UNREADABLE as error:
                raise ValueError(f"an event of it cannot be read ({error})") from error

    @property
    def full(self) -> bool:
        """See `Out`."""
        return self._size > MOST_GATHERED_BYTES

    def keep_alive(self) -> None:
        """See `Out`: an answer that is sent whole has not begun."""

    def retract(self) -> bool:
        """See `Out`."""
        self._choices.clear()
        self._size = 0
        return True

    async def end(self) -> None:
        """See `Out`. Raises ApiError 502 when they are no answer."""
        try:
            whole = _encode(self._whole())
        except UNREADABLE as error:
            message = "The replica's answer cannot be read. Try again shortly."
            raise ApiError(502, "upstream_failed", message) from error
        await self._journey.exchange.answer(200, whole)

    def _add(self, chunk: dict[str, Any]) -> None:
        self._identity = chunk
        self._prompt_ids = chunk.get("prompt_token_ids", self._prompt_ids)
        for choice in chunk["choices"]:
            self._choices[choice["index"]].add(choice)

    def _whole(self) -> dict[str, Any]:
        chat = self._journey.api is CHAT
        write = _chat_choice if chat else _completion_choice
        identity = self._identity
        whole = {
            "id": identity["id"],
            "object": self._journey.api.whole,
            "created": identity["created"],
            "model": identity["model"],
            "choices": [write(index, self._choices[index]) for index in sorted(self._choices)],
            "usage": usage(self._journey.delivered),
        }
        if self._prompt_ids is not None:
            whole["prompt_token_ids"] = self._prompt_ids
        return whole


def _chat_choice(index: int, choice: _Choice) -> dict[str, Any]:
    message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
    return {"index": index, "message": message, **_ending(choice)}


def _completion_choice(index: int, choice: _Choice) -> dict[str, Any]:
    written = {"index": index, "text": "".join(choice.text), **_ending(choice)}
    if choice.token_ids is not None:
        written["prompt_token_ids"] = choice.prompt_token_ids
    return written


def _ending(choice: _Choice) -> dict[str, Any]:
    ending = {
        "logprobs": choice.logprobs,
        "finish_reason": choice.finish,
        "stop_reason": choice.stop,
    }
    return ending if choice.token_ids is None else {**ending, "token_ids": choice.token_ids}
