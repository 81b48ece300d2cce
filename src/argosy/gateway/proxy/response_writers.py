"""How an answer reaches the client: streamed as it comes, or gathered from the stream of a replica and sent whole.

An answer that is gathered survives its replica as a stream does, and can be ended by a limit like one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Protocol

import msgspec

from argosy.gateway.backends import MALFORMED_EVENT_ERRORS, DeliveredOutput, check_container_count
from argosy.gateway.request_context import CHAT, RequestContext
from argosy.http_server import HttpExchange
from argosy.protocol import ApiError, EventParser, PromptTokenUsageInfo, Usage, format_comment

KEEPALIVE_COMMENT = format_comment(b"keep-alive")
MAX_AGGREGATED_BYTES = 64 * 1024 * 1024
"""Of an answer's events, which take several times as much memory until all are there."""
_DONE = b"[DONE]"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def build_usage(delivered: DeliveredOutput) -> Usage:
    """What was delivered, as an answer tells it."""
    return Usage(
        prompt_tokens=delivered.prompt_tokens,
        completion_tokens=delivered.output_tokens,
        total_tokens=delivered.prompt_tokens + delivered.output_tokens,
        prompt_tokens_details=PromptTokenUsageInfo(cached_tokens=delivered.cached_tokens),
    )


class ResponseWriter(Protocol):
    """Takes the events of an answer."""

    async def start(self) -> None:
        """They begin, or go on."""

    def write_events(self, events: bytes) -> None:
        """Whole events."""

    @property
    def is_full(self) -> bool:
        """Whether the answer is to end here, as it has more than can be kept."""

    def send_keepalive(self) -> None:
        """Show the client that somebody is there, if that can be shown."""

    def discard(self) -> bool:
        """Forget them, so that the answer can start over. False: the client has them already."""

    async def finish(self) -> None:
        """That was all."""


class StreamingWriter:
    """An `Out` that passes them on."""

    def __init__(self, exchange: HttpExchange) -> None:
        self._exchange = exchange
        self._has_output = False

    async def start(self) -> None:
        """See `Out`."""
        if self._exchange.status is None:
            await self._exchange.start_stream()

    def write_events(self, events: bytes) -> None:
        """See `Out`."""
        self._has_output = True
        self._exchange.write_nowait(events)

    @property
    def is_full(self) -> bool:
        """See `Out`: the client has it."""
        return False

    def send_keepalive(self) -> None:
        """See `Out`."""
        if self._exchange.status is not None:
            self._exchange.write_nowait(KEEPALIVE_COMMENT)

    def discard(self) -> bool:
        """See `Out`."""
        return not self._has_output

    async def finish(self) -> None:
        """See `Out`."""
        await self._exchange.end_stream()

    def lend_socket(self) -> int | None:
        """The client's socket, for who passes events on past this: see `Wire.lend`."""
        self._has_output = True  # as far as anybody here knows
        return self._exchange.lend_socket()

    def send_chunks(self, chunks: bytes) -> None:
        """What that could not send: see `Wire.pass_on`."""
        self._exchange.write_raw_chunks(chunks)


class _AggregatedChoice(msgspec.Struct):
    """One choice, as far as its chunks have told it."""

    text_parts: list[str] = []
    logprobs: dict[str, Any] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add_chunk(self, chunk: dict[str, Any]) -> None:
        """Take what a chunk says of it."""
        self.text_parts.append(chunk.get("delta", chunk).get("content") or chunk.get("text") or "")
        if chunk.get("logprobs") is not None:
            self._add_logprobs(chunk["logprobs"])
        if "token_ids" in chunk:
            self.token_ids = self.token_ids or []
            self.token_ids += chunk["token_ids"]
        self.prompt_token_ids = chunk.get("prompt_token_ids", self.prompt_token_ids)
        if chunk["finish_reason"] is not None:
            self.finish_reason, self.stop_reason = chunk["finish_reason"], chunk["stop_reason"]

    def _add_logprobs(self, told: dict[str, Any]) -> None:
        known = self.logprobs = self.logprobs or {}
        for name, values in told.items():
            if isinstance(values, list):
                known.setdefault(name, []).extend(values)
            else:
                known[name] = values


class AggregatingWriter:
    """An `Out` that puts them together, as our replicas' own whole answers are."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._event_parser = EventParser()
        self._choices: defaultdict[int, _AggregatedChoice] = defaultdict(_AggregatedChoice)
        self._envelope: dict[str, Any] = {}
        self._prompt_token_ids: list[int] | None = None
        """A chat's, which has one prompt."""
        self._buffered_bytes = 0

    async def start(self) -> None:
        """See `Out`."""

    def write_events(self, events: bytes) -> None:
        """See `Out`. Raises ValueError when they are no chunks of an answer."""
        self._buffered_bytes += len(events)
        check_container_count(events)
        for told in self._event_parser.feed(events):
            if told == _DONE:
                continue
            try:
                self._add_chunk(_decode(told))
            except MALFORMED_EVENT_ERRORS as error:
                raise ValueError(f"an event of it cannot be read ({error})") from error

    @property
    def is_full(self) -> bool:
        """See `Out`."""
        return self._buffered_bytes > MAX_AGGREGATED_BYTES

    def send_keepalive(self) -> None:
        """See `Out`: an answer that is sent whole has not begun."""

    def discard(self) -> bool:
        """See `Out`."""
        self._choices.clear()
        self._buffered_bytes = 0
        return True

    async def finish(self) -> None:
        """See `Out`. Raises ApiError 502 when they are no answer."""
        try:
            whole = _encode(self._build_response())
        except MALFORMED_EVENT_ERRORS as error:
            message = "The replica's answer cannot be read. Try again shortly."
            raise ApiError(502, "upstream_failed", message) from error
        await self._context.exchange.send_response(200, whole)

    def _add_chunk(self, chunk: dict[str, Any]) -> None:
        self._envelope = chunk
        self._prompt_token_ids = chunk.get("prompt_token_ids", self._prompt_token_ids)
        for choice in chunk["choices"]:
            self._choices[choice["index"]].add_chunk(choice)

    def _build_response(self) -> dict[str, Any]:
        chat = self._context.api is CHAT
        write = _build_chat_choice if chat else _build_completion_choice
        identity = self._envelope
        whole = {
            "id": identity["id"],
            "object": self._context.api.object_type,
            "created": identity["created"],
            "model": identity["model"],
            "choices": [write(index, self._choices[index]) for index in sorted(self._choices)],
            "usage": build_usage(self._context.delivered),
        }
        if self._prompt_token_ids is not None:
            whole["prompt_token_ids"] = self._prompt_token_ids
        return whole


def _build_chat_choice(index: int, choice: _AggregatedChoice) -> dict[str, Any]:
    message = {"role": "assistant", "content": "".join(choice.text_parts), "refusal": None}
    return {"index": index, "message": message, **_choice_tail(choice)}


def _build_completion_choice(index: int, choice: _AggregatedChoice) -> dict[str, Any]:
    written = {"index": index, "text": "".join(choice.text_parts), **_choice_tail(choice)}
    if choice.token_ids is not None:
        written["prompt_token_ids"] = choice.prompt_token_ids
    return written


def _choice_tail(choice: _AggregatedChoice) -> dict[str, Any]:
    ending = {
        "logprobs": choice.logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    return ending if choice.token_ids is None else {**ending, "token_ids": choice.token_ids}
