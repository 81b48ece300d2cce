"""Keeps an answer as its client receives it, for what samples answers, and reads it."""

from __future__ import annotations

from typing import Any, Protocol

from argosy.gateway.proxy.aggregated_choice import AggregatedChoice
from argosy.gateway.proxy.caching_writer import normalize_chunk, parse_chunks, split_body
from argosy.gateway.proxy.response_writers import ResponseWriter, WrappingWriter
from argosy.gateway.request_context import RequestContext
from argosy.quality import Answer


class AnswerReceiver(Protocol):
    """Receives a complete answer: events of a stream, or a body."""

    def __call__(self, context: RequestContext, answer: bytes, *, is_stream: bool) -> None:
        """Receive it."""


class AnswerWriter(WrappingWriter):
    """Response writer that keeps the answer as its client receives it.

    Args:
        writer: Writes to the client.
        context: The request.
        max_bytes: Size of the longest answer that is kept. Of a response that is not generated the beginning is.
        receive: Receives the answer if it is complete and not too long.
    """

    def __init__(
        self,
        writer: ResponseWriter,
        context: RequestContext,
        max_bytes: int,
        receive: AnswerReceiver,
    ) -> None:
        super().__init__(writer)
        self._context = context
        self._max_bytes = max_bytes
        self._receive = receive
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._is_stream = True

    def write_events(self, events: bytes) -> None:
        self._writer.write_events(events)
        self._keep(events)

    async def filter_body(self, body: bytes) -> bytes:
        filtered = await self._writer.filter_body(body)
        self._is_stream = False
        self._keep(filtered if self._context.api.generates else filtered[: self._max_bytes])
        return filtered

    def discard(self) -> bool:
        is_discarded = self._writer.discard()
        if is_discarded:
            self._parts.clear()
            self._num_bytes = 0
        return is_discarded

    def close(self) -> None:
        if self._context.status == "completed" and 0 < self._num_bytes <= self._max_bytes:
            self._receive(self._context, b"".join(self._parts), is_stream=self._is_stream)
        self._parts.clear()
        self._writer.close()

    def _keep(self, part: bytes) -> None:
        self._num_bytes += len(part)
        if self._num_bytes <= self._max_bytes:
            self._parts.append(part)
        else:
            self._parts.clear()


def read_answer(answer: bytes, *, is_stream: bool, is_chat: bool) -> Answer:
    """Return text and tool calls of an answer with one choice. Raises MALFORMED_EVENT_ERRORS.

    Args:
        answer: Events of a stream, or a body.
        is_stream: Which of both it is.
        is_chat: Whether it is one of a chat.
    """
    choice = AggregatedChoice()
    for chunk in parse_chunks(answer) if is_stream else split_body(answer, is_chat=is_chat):
        for part in normalize_chunk(chunk, "")["choices"]:
            choice.add_chunk(part)
    message: dict[str, Any] = choice.build_chat_choice(0)["message"]
    return Answer(text=message["content"] or "", tool_calls=message.get("tool_calls", []))
