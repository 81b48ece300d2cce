"""Writers of a response to the client: streamed as events arrive, or aggregated from a stream and sent in one piece.

An aggregated response can be resumed on another replica and ended by a limit in the same way as a stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec

from argosy.gateway.backends import MALFORMED_EVENT_ERRORS, check_container_count
from argosy.gateway.proxy.aggregated_choice import AggregatedChoice
from argosy.gateway.request_context import CHAT, RequestContext
from argosy.http_server import HttpExchange
from argosy.policy import MemoryEntry, TenantMemory
from argosy.protocol import (
    EVENT_END,
    SSE_DONE,
    ApiError,
    event_data,
    format_comment,
)

KEEPALIVE_COMMENT = format_comment(b"keep-alive")
MAX_AGGREGATED_BYTES = 64 * 1024 * 1024
"""Maximum bytes of a response's events. While they are aggregated they take several times as much memory."""
COUNTED_BYTES = 1024 * 1024
"""Bytes that are counted as memory of the tenant at a time."""
_DONE = b"[DONE]"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class ResponseWriter:
    """Receives the events of a response. This one discards them, for a copy, whose response has no receiver."""

    has_output = False
    """Whether the client may have received events."""
    is_full = False
    """Whether the response must end, because it exceeds the size limit or by its content."""
    is_holding = False
    """Whether output is held back, so that the client has received none although there is some."""
    needs_close = True
    """Whether `close` has something to do."""
    finish_reason = "length"
    """Finish reason of the choices of a response that ends because the writer is full."""

    async def start(self) -> None:
        """Start the response. Called again for each attempt."""

    def start_early(self) -> None:
        """Start a stream before a replica has answered, so that the client and its proxies see that it is alive."""

    def write_events(self, events: bytes) -> None:
        """Write complete SSE events."""

    def flush(self) -> None:
        """Send events that are held back, because an error ends the stream."""

    def send_keepalive(self) -> None:
        """Send the client a comment, if the response is a stream that has started."""

    def send_progress(self, comment: bytes, event: bytes | None) -> None:
        """Send a comment and an event without content, if the response is a stream that has started."""

    async def filter_body(self, body: bytes) -> bytes:
        """Return a response that a replica sent in one piece as the client receives it.

        Raises:
            ValueError: It has to be filtered, and is no response.
        """
        return body

    async def review_body(self, body: bytes) -> bytes:
        """Return a response in one piece as a moderation model lets it be sent. Called under a content rule only."""
        return body

    def discard(self) -> bool:
        """Discard the events so that the response can start over.

        Returns False if the client may have received some.
        """
        return not self.has_output

    def continue_without_client(self, abort: Callable[[], object]) -> bool:  # noqa: ARG002 - for subclasses
        """Take the rest of a response whose client has disconnected, for others that wait for it.

        Returns False if no other request does. Otherwise `abort` is called as soon as the last one has left.
        """
        return False

    def release(self) -> None:
        """Hold nothing back any more, because another model answers than the selected one."""

    async def replay(self) -> bool:
        """Answer without a replica. Returns False if the answer has to be computed. Raises ApiError."""
        return False

    async def finish(self) -> None:
        """End the response."""

    def close(self) -> None:
        """Release the memory of a response that has ended in any way."""


class StreamingWriter(ResponseWriter):
    """Response writer that forwards events as they arrive."""

    needs_close = False

    def __init__(self, exchange: HttpExchange) -> None:
        self._exchange = exchange

    async def start(self) -> None:
        if self._exchange.status is None:
            await self._exchange.start_stream()

    def start_early(self) -> None:
        if self._exchange.status is None:
            self._exchange.try_start_stream()
            self.send_keepalive()

    def write_events(self, events: bytes) -> None:
        self.has_output = True
        self._exchange.write_nowait(events)

    def write_padded(self, events: bytes, multiple: int) -> None:
        """Write events, of which there may be none, and a comment up to a multiple of bytes."""
        self.has_output = True
        self._exchange.write_padded(events, multiple)

    def send_keepalive(self) -> None:
        if self._exchange.status is not None:
            self._exchange.write_comment(KEEPALIVE_COMMENT)

    def send_progress(self, comment: bytes, event: bytes | None) -> None:
        if self._exchange.status is not None:
            self._exchange.write_comment(comment)
            if event is not None:
                self._exchange.write_heartbeat(event)

    async def finish(self) -> None:
        await self._exchange.end_stream()

    def lend_socket(self) -> int | None:
        """Lend the client's socket to the fast path.

        Returns its descriptor, or None (see `HttpExchange.lend_socket`).
        """
        self.has_output = True  # the fast path may write without notice
        return self._exchange.lend_socket()

    def send_chunks(self, chunks: bytes) -> None:
        """Write HTTP chunks that the fast path could not send."""
        self._exchange.write_raw_chunks(chunks)


class WrappingWriter(ResponseWriter):
    """Response writer that passes everything on to another one. Its subclasses change or keep what passes."""

    def __init__(self, writer: ResponseWriter) -> None:
        self._writer = writer

    @property
    def has_output(self) -> bool:  # type: ignore[override]
        return self._writer.has_output

    @property
    def is_full(self) -> bool:  # type: ignore[override]
        return self._writer.is_full

    @property
    def finish_reason(self) -> str:  # type: ignore[override]
        return self._writer.finish_reason

    async def start(self) -> None:
        await self._writer.start()

    def start_early(self) -> None:
        self._writer.start_early()

    def write_events(self, events: bytes) -> None:
        self._writer.write_events(events)

    def flush(self) -> None:
        self._writer.flush()

    def send_keepalive(self) -> None:
        self._writer.send_keepalive()

    def send_progress(self, comment: bytes, event: bytes | None) -> None:
        self._writer.send_progress(comment, event)

    async def filter_body(self, body: bytes) -> bytes:
        return await self._writer.filter_body(body)

    async def review_body(self, body: bytes) -> bytes:
        return await self._writer.review_body(body)

    def discard(self) -> bool:
        return self._writer.discard()

    async def replay(self) -> bool:
        return await self._writer.replay()

    def continue_without_client(self, abort: Callable[[], object]) -> bool:
        return self._writer.continue_without_client(abort)

    async def finish(self) -> None:
        await self._writer.finish()

    def close(self) -> None:
        self._writer.close()


class AggregatingWriter(ResponseWriter):
    """Response writer that aggregates events into a response like a native replica's buffered one.

    Beyond its own limit or that of its tenant's memory, the response ends with the output that it has.
    """

    def __init__(self, context: RequestContext, memory: TenantMemory) -> None:
        self._context = context
        self._memory = memory
        self._memory_entry: MemoryEntry | None = None
        self._uncounted_from = COUNTED_BYTES
        """Number of buffered bytes at which they are counted again."""
        self._choices: defaultdict[int, AggregatedChoice] = defaultdict(AggregatedChoice)
        self._warnings: list[dict[str, Any]] = []
        self._envelope: dict[str, Any] = {}
        self._prompt_token_ids: list[int] | None = None
        """Prompt tokens of a chat, which has a single prompt."""
        self._buffered_bytes = 0

    def write_events(self, events: bytes) -> None:
        """Add events.

        Raises:
            ValueError: An event is not a chunk of a response.
        """
        if events == SSE_DONE:
            return
        self._buffered_bytes += len(events)
        if self._buffered_bytes >= self._uncounted_from:
            self._uncounted_from = self._buffered_bytes + COUNTED_BYTES
            self.is_full = self._buffered_bytes > MAX_AGGREGATED_BYTES or not self._count_memory()
        check_container_count(events)
        for event in events.removesuffix(EVENT_END).split(EVENT_END):
            data = event_data(event)
            if data is None or data == _DONE:
                continue
            try:
                self._add_chunk(_decode(data))
            except MALFORMED_EVENT_ERRORS as error:
                raise ValueError(f"an event is malformed ({error})") from error

    def discard(self) -> bool:
        self._choices.clear()
        self._warnings.clear()
        self._buffered_bytes, self._uncounted_from, self.is_full = 0, COUNTED_BYTES, False
        self.close()
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
        exchange = self._context.exchange
        exchange.first_output_at = self._context.trace.first_token_at
        await exchange.send_response(200, body)

    def close(self) -> None:
        if self._memory_entry is not None:
            self._memory.remove(self._memory_entry)
            self._memory_entry = None

    def _count_memory(self) -> bool:
        """Count the buffered bytes. Returns False if the tenant has too many."""
        if self._memory_entry is not None:
            return self._memory.resize(self._memory_entry, self._buffered_bytes)
        self._memory_entry = MemoryEntry(
            self._context.principal.tenant, "", self._buffered_bytes, self._end
        )
        return self._memory.add(self._memory_entry)

    def _end(self, _: str) -> None:
        """Let the next event end the response."""
        self.is_full = True

    def _add_chunk(self, chunk: dict[str, Any]) -> None:
        self._envelope = chunk
        self._prompt_token_ids = chunk.get("prompt_token_ids", self._prompt_token_ids)
        if chunk.get("warnings"):  # a replica that resumes the stream may repeat them
            self._warnings += [each for each in chunk["warnings"] if each not in self._warnings]
        for choice in chunk["choices"]:
            self._choices[choice["index"]].add_chunk(choice)

    def _build_response(self) -> dict[str, Any]:
        is_chat = self._context.api is CHAT
        build_choice = (
            AggregatedChoice.build_chat_choice
            if is_chat
            else AggregatedChoice.build_completion_choice
        )
        envelope = self._envelope
        response = {
            "id": envelope["id"],
            "object": self._context.api.object_type,
            "created": envelope["created"],
            "model": envelope["model"],
            "choices": [
                build_choice(self._choices[index], index) for index in sorted(self._choices)
            ],
            "usage": self._context.delivered.usage.to_wire(),
            "system_fingerprint": envelope.get("system_fingerprint"),
        }
        if "service_tier" in envelope:
            response["service_tier"] = envelope["service_tier"]
        if self._warnings:
            response["warnings"] = self._warnings
        if is_chat:
            response |= {"prompt_token_ids": self._prompt_token_ids, "prompt_logprobs": None}
        return response
