"""Writers of a response to the client: streamed as events arrive, or aggregated from a stream and sent in one piece.

An aggregated response can be resumed on another replica and ended by a limit in the same way as a stream.
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
"""Maximum bytes of a response's events. While they are aggregated they take several times as much memory."""
_DONE = b"[DONE]"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def build_usage(delivered: DeliveredOutput) -> Usage:
    """Build the `usage` object of the delivered output."""
    return Usage(
        prompt_tokens=delivered.prompt_tokens,
        completion_tokens=delivered.output_tokens,
        total_tokens=delivered.prompt_tokens + delivered.output_tokens,
        prompt_tokens_details=PromptTokenUsageInfo(cached_tokens=delivered.cached_tokens),
    )


class ResponseWriter(Protocol):
    """Receives the events of a response."""

    async def start(self) -> None:
        """Start the response. Called again for each attempt."""

    def write_events(self, events: bytes) -> None:
        """Write complete SSE events."""

    @property
    def is_full(self) -> bool:
        """Whether the response must end because it exceeds the size limit."""

    def send_keepalive(self) -> None:
        """Send the client a comment, if the response is a stream that has started."""

    def discard(self) -> bool:
        """Discard the events so that the response can start over.

        Returns False if the client may have received some.
        """

    async def finish(self) -> None:
        """End the response."""


class StreamingWriter:
    """Response writer that forwards events as they arrive."""

    def __init__(self, exchange: HttpExchange) -> None:
        self._exchange = exchange
        self._has_output = False

    async def start(self) -> None:
        if self._exchange.status is None:
            await self._exchange.start_stream()

    def write_events(self, events: bytes) -> None:
        self._has_output = True
        self._exchange.write_nowait(events)

    @property
    def is_full(self) -> bool:
        return False

    def send_keepalive(self) -> None:
        if self._exchange.status is not None:
            self._exchange.write_nowait(KEEPALIVE_COMMENT)

    def discard(self) -> bool:
        return not self._has_output

    async def finish(self) -> None:
        await self._exchange.end_stream()

    def lend_socket(self) -> int | None:
        """Lend the client's socket to the fast path.

        Returns its descriptor, or None (see `HttpExchange.lend_socket`).
        """
        self._has_output = True  # the fast path may write without notice
        return self._exchange.lend_socket()

    def send_chunks(self, chunks: bytes) -> None:
        """Write HTTP chunks that the fast path could not send."""
        self._exchange.write_raw_chunks(chunks)


class _AggregatedChoice(msgspec.Struct):
    """A choice, aggregated from the chunks so far."""

    text_parts: list[str] = []
    logprobs: dict[str, Any] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add_chunk(self, chunk: dict[str, Any]) -> None:
        """Add the choice's part of a chunk."""
        self.text_parts.append(chunk.get("delta", chunk).get("content") or chunk.get("text") or "")
        if chunk.get("logprobs") is not None:
            self._add_logprobs(chunk["logprobs"])
        if "token_ids" in chunk:
            self.token_ids = self.token_ids or []
            self.token_ids += chunk["token_ids"]
        self.prompt_token_ids = chunk.get("prompt_token_ids", self.prompt_token_ids)
        if chunk["finish_reason"] is not None:
            self.finish_reason, self.stop_reason = chunk["finish_reason"], chunk["stop_reason"]

    def _add_logprobs(self, logprobs: dict[str, Any]) -> None:
        aggregated = self.logprobs = self.logprobs or {}
        for name, values in logprobs.items():
            if isinstance(values, list):
                aggregated.setdefault(name, []).extend(values)
            else:
                aggregated[name] = values


class AggregatingWriter:
    """Response writer that aggregates events into a response like a native replica's buffered one."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._event_parser = EventParser()
        self._choices: defaultdict[int, _AggregatedChoice] = defaultdict(_AggregatedChoice)
        self._envelope: dict[str, Any] = {}
        self._prompt_token_ids: list[int] | None = None
        """Prompt tokens of a chat, which has a single prompt."""
        self._buffered_bytes = 0

    async def start(self) -> None:
        """Do nothing, because the response is sent in one piece."""

    def write_events(self, events: bytes) -> None:
        """Add events.

        Raises:
            ValueError: An event is not a chunk of a response.
        """
        self._buffered_bytes += len(events)
        check_container_count(events)
        for event in self._event_parser.feed(events):
            if event == _DONE:
                continue
            try:
                self._add_chunk(_decode(event))
            except MALFORMED_EVENT_ERRORS as error:
                raise ValueError(f"an event is malformed ({error})") from error

    @property
    def is_full(self) -> bool:
        return self._buffered_bytes > MAX_AGGREGATED_BYTES

    def send_keepalive(self) -> None:
        """Do nothing, because the response has not started."""

    def discard(self) -> bool:
        self._choices.clear()
        self._buffered_bytes = 0
        return True

    async def finish(self) -> None:
        """Send the aggregated response.

        Raises:
            ApiError: 502 if the events are not a complete response.
        """
        try:
            body = _encode(self._build_response())
        except MALFORMED_EVENT_ERRORS as error:
            message = "The replica's response is malformed. Try again shortly."
            raise ApiError(502, "upstream_failed", message) from error
        await self._context.exchange.send_response(200, body)

    def _add_chunk(self, chunk: dict[str, Any]) -> None:
        self._envelope = chunk
        self._prompt_token_ids = chunk.get("prompt_token_ids", self._prompt_token_ids)
        for choice in chunk["choices"]:
            self._choices[choice["index"]].add_chunk(choice)

    def _build_response(self) -> dict[str, Any]:
        is_chat = self._context.api is CHAT
        build_choice = _build_chat_choice if is_chat else _build_completion_choice
        envelope = self._envelope
        response = {
            "id": envelope["id"],
            "object": self._context.api.object_type,
            "created": envelope["created"],
            "model": envelope["model"],
            "choices": [
                build_choice(index, self._choices[index]) for index in sorted(self._choices)
            ],
            "usage": build_usage(self._context.delivered),
        }
        if self._prompt_token_ids is not None:
            response["prompt_token_ids"] = self._prompt_token_ids
        return response


def _build_chat_choice(index: int, choice: _AggregatedChoice) -> dict[str, Any]:
    message = {"role": "assistant", "content": "".join(choice.text_parts), "refusal": None}
    return {"index": index, "message": message, **_choice_tail(choice)}


def _build_completion_choice(index: int, choice: _AggregatedChoice) -> dict[str, Any]:
    result = {"index": index, "text": "".join(choice.text_parts), **_choice_tail(choice)}
    if choice.token_ids is not None:
        result["prompt_token_ids"] = choice.prompt_token_ids
    return result


def _choice_tail(choice: _AggregatedChoice) -> dict[str, Any]:
    tail = {
        "logprobs": choice.logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    return tail if choice.token_ids is None else {**tail, "token_ids": choice.token_ids}
