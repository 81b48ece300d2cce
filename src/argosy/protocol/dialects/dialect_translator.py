"""Translation of one response to the dialect of its request, as the HTTP exchange applies it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from argosy.protocol.dialects.chat_output_reader import ChatOutputReader, parse_error_body
from argosy.protocol.dialects.dialect_output import DialectOutput, OutputIdentity
from argosy.protocol.errors import ApiError
from argosy.protocol.sse import SSE_CONTENT_TYPE

ErrorEncoder = Callable[[ApiError, str], bytes]
"""Encodes an error and the request id as the body of an error response."""
MIN_THREADED_BYTES = 64 * 1024
"""Bodies of at least this size are translated in a thread, because they would delay streams."""
EndListener = Callable[[dict[str, Any]], Awaitable[None]]
"""Called with a response that has ended, before its end is sent to the client."""


class DialectTranslator:
    """Translator of one response of a chat or completion.

    Args:
        output: Builder of the response.
        identity: Identity of the response.
        encode_error: Encodes errors; None to keep them as they are.
        on_end: Called when the response has ended. The client receives its end only afterwards.
    """

    def __init__(
        self,
        output: DialectOutput,
        identity: OutputIdentity,
        encode_error: ErrorEncoder | None = None,
        on_end: EndListener | None = None,
    ) -> None:
        self._output = output
        self._reader = ChatOutputReader(output, identity)
        self._encode_error = encode_error
        self._on_end = on_end

    @property
    def stream_content_type(self) -> bytes:
        """Content type of the stream."""
        return self._output.stream_content_type

    async def translate_response(self, status: int, body: bytes, request_id: str) -> bytes:
        """Translate a whole response.

        Raises:
            ApiError: 502 if the body is no response of a chat or completion.
        """
        if status != 200:
            return _translate_error(self._encode_error, status, body, request_id)
        try:
            self._reader.read_response(body)
        except ValueError as error:
            raise _malformed_response() from error
        response = self._output.build_response()
        if self._on_end is not None:
            await self._on_end(response)
        return msgspec.json.encode(response)

    def translate_events(self, events: bytes) -> bytes:
        """Translate a part of a stream. The events that end it are withheld until `finish_stream`.

        Raises:
            ValueError: An event is malformed.
        """
        self._reader.read_events(events)
        return b"" if self._reader.has_ended else self._output.drain()

    def translate_comment(self, comment: bytes) -> bytes:
        """Translate a comment that keeps an idle stream alive."""
        return self._output.keepalive(comment)

    def translate_heartbeat(self, event: bytes) -> bytes:
        """Translate an event without content that keeps an idle stream alive."""
        if self._output.starts_with_heartbeat:
            self._reader.start()
        return self._output.drain() or self._output.heartbeat(event)

    async def finish_stream(self) -> bytes:
        """Return the events that end the stream."""
        if self._on_end is not None and self._reader.has_ended:
            await self._on_end(self._output.build_response())
        return self._output.drain()


class BodyTranslator:
    """Translator of a response that is one JSON value and never a stream. A large one is translated in a thread.

    Args:
        render: Returns the client's body for the one of the internal API.
        encode_error: Encodes errors; None to keep them as they are.
    """

    stream_content_type = SSE_CONTENT_TYPE

    def __init__(
        self,
        render: Callable[[bytes], bytes],
        encode_error: ErrorEncoder | None = None,
    ) -> None:
        self._render = render
        self._encode_error = encode_error

    async def translate_response(self, status: int, body: bytes, request_id: str) -> bytes:
        """Translate the response.

        Raises:
            ApiError: 502 if the body is not the expected object.
        """
        if status != 200:
            return _translate_error(self._encode_error, status, body, request_id)
        try:
            if len(body) < MIN_THREADED_BYTES:
                return self._render(body)
            return await asyncio.to_thread(self._render, body)
        except (ValueError, LookupError) as error:
            raise _malformed_response() from error

    def translate_events(self, events: bytes) -> bytes:
        """Return the events unchanged."""
        return events

    def translate_comment(self, comment: bytes) -> bytes:
        """Return the comment unchanged."""
        return comment

    def translate_heartbeat(self, event: bytes) -> bytes:
        """Return the event unchanged."""
        return event

    async def finish_stream(self) -> bytes:
        """Return no events."""
        return b""


class ObjectTranslator(BodyTranslator):
    """Translator of a response that is one small JSON object. `render` returns the client's for the internal one."""

    def __init__(
        self,
        render: Callable[[dict[str, Any]], dict[str, Any]],
        encode_error: ErrorEncoder | None = None,
    ) -> None:
        super().__init__(
            lambda body: msgspec.json.encode(
                render(msgspec.json.decode(body, type=dict[str, Any]))
            ),
            encode_error,
        )


def _translate_error(
    encode_error: ErrorEncoder | None, status: int, body: bytes, request_id: str
) -> bytes:
    if encode_error is None:
        return body
    return encode_error(parse_error_body(status, body), request_id)


def _malformed_response() -> ApiError:
    message = "The replica's response is malformed. Try again shortly."
    return ApiError(502, "upstream_failed", message)
