"""Body and response of one HTTP/1 request on a client's connection."""

from __future__ import annotations

import asyncio
import http
from collections.abc import Callable
from typing import cast

import structlog

from argosy.http_server.client_connection import ClientConnection
from argosy.http_server.http_request import HttpRequest, RequestHandler
from argosy.http_server.response_transport import (
    ClientListener,
    DisconnectedError,
    ResponseTransport,
)
from argosy.protocol import ApiError

MAX_PREFETCHED_BODY_BYTES = 64 * 1024
"""Request body bytes that are buffered before the handler starts to read, or between two parts that it reads."""
MAX_COALESCED_BYTES = 16 * 1024
"""Written bytes that are held back until the end of the event loop turn."""

_STATUS_LINES = {int(s): f"HTTP/1.1 {s} {s.phrase}\r\n".encode() for s in http.HTTPStatus}
CONTINUE_RESPONSE = b"HTTP/1.1 100 Continue\r\n\r\n"
STATUS_LINE_PREFIX = b"HTTP/1.1 "
"""First bytes of every response."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.http_server")


class Http1Transport(ResponseTransport):
    """Transport of one request on a connection.

    Args:
        connection: The client's connection.
        on_complete: Called when the response is complete.
        is_head_request: Whether the response has no body.
        is_http_1_0: Whether the client knows neither chunks nor interim responses.
        keep_alive: Whether the connection stays open after the response.
        expects_continue: Whether the client waits for a 100 response before it sends the body.
    """

    __slots__ = (
        "_body_buffer",
        "_body_bytes",
        "_chunked",
        "_connection",
        "_expects_continue",
        "_is_head_request",
        "_is_http_1_0",
        "_is_overloaded",
        "_listener",
        "_loop",
        "_max_buffered_bytes",
        "_on_complete",
        "_prefix_bytes_sent",
        "_tenant",
        "_transport",
        "_wakeup",
        "_write_buffer",
        "is_body_complete",
        "is_disconnected",
        "keep_alive",
        "response_complete",
        "response_started",
    )

    is_body_complete: bool
    is_disconnected: bool

    def __init__(
        self,
        connection: ClientConnection,
        on_complete: Callable[[Http1Transport], None],
        *,
        is_head_request: bool = False,
        is_http_1_0: bool = False,
        keep_alive: bool,
        expects_continue: bool,
    ) -> None:
        self.keep_alive = keep_alive
        self.is_body_complete = False
        """Whether the whole request body has arrived."""
        self.response_started = self.response_complete = False
        """Whether a part of the response has been sent, and whether all of it has been sent."""
        self.is_disconnected = False
        """Whether the connection is closed."""
        self._connection = connection
        self._transport = connection.transport
        self._on_complete = on_complete
        self._is_head_request = is_head_request
        self._is_http_1_0 = is_http_1_0
        self._chunked = False
        self._prefix_bytes_sent = 0
        """Bytes of the status line sent as a probe before the response."""
        self._expects_continue = expects_continue and not is_http_1_0
        self._body_buffer = bytearray()
        self._body_bytes = 0
        self._tenant: str | None = None
        """Tenant whose large body it is, once its handler reads it."""
        self._is_overloaded = False
        """Whether body bytes arrived beyond the limit for all connections and this body is not a small one."""
        self._max_buffered_bytes = MAX_PREFETCHED_BODY_BYTES
        self._listener: ClientListener | None = None
        self._wakeup: asyncio.Event | None = None
        self._loop = asyncio.get_running_loop()
        self._write_buffer = b""
        """Data written in this event loop turn."""

    # --- ResponseTransport, for HttpExchange -----------------------------------------------------

    @property
    def is_backpressured(self) -> bool:
        return self._connection.is_backpressured

    @property
    def unsent_bytes(self) -> int:
        return len(self._write_buffer) + self._transport.get_write_buffer_size()

    async def read_body(self, max_bytes: int, tenant: str | None = None) -> bytes:
        self._max_buffered_bytes = max_bytes
        if not self.is_body_complete and tenant is not None:
            self.count_body_bytes(-len(self._body_buffer))
            self._tenant = tenant
            self.count_body_bytes(len(self._body_buffer))
        while not self.is_body_complete and self._body_bytes <= max_bytes:
            if self.is_disconnected:
                raise DisconnectedError
            if self._is_overloaded:
                message = "The server is receiving too many request bodies. Try again shortly."
                raise ApiError(503, "overloaded", message, retry_after_s=1.0)
            await self._wait_for_change()
        return self._take_body()

    async def read_part(self) -> bytes:
        while not self._body_buffer and not self.is_body_complete:
            if self.is_disconnected:
                raise DisconnectedError
            await self._wait_for_change()
        return self._take_body()

    def count_body_bytes(self, byte_count: int) -> None:
        self._connection.server_state.add_unread_bytes(byte_count, self._tenant)

    async def wait_writable(self) -> None:
        while self._connection.is_backpressured and not self.is_disconnected:
            await self._wait_for_change()

    def send_response(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self._write_buffer += self._render_head(status, headers) + (
            b"" if self._is_head_request else body
        )
        self._complete_response()

    def start_response(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._chunked = not self._is_http_1_0
        if self._chunked:
            headers = [*headers, (b"transfer-encoding", b"chunked")]
        self._buffer_write(self._render_head(status, headers))

    def start_sized_response(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._buffer_write(self._render_head(status, headers))

    def write_nowait(self, data: bytes) -> None:
        if data and not self._is_head_request:
            self._buffer_write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def lend_socket(self) -> int | None:
        transport = self._transport
        if (
            self._is_head_request
            or self._write_buffer
            or not self._chunked
            or transport.is_closing()
        ):
            return None
        if transport.get_write_buffer_size() or transport.get_extra_info("ssl_object") is not None:
            return None
        return cast("int", transport.get_extra_info("socket").fileno())

    def write_raw_chunks(self, chunks: bytes) -> None:
        self._buffer_write(chunks)

    def end_response(self) -> None:
        if self._chunked and not self._is_head_request:
            self._write_buffer += b"0\r\n\r\n"
        self._complete_response()

    def abort(self) -> None:
        self._connection.abort()

    def set_listener(self, listener: ClientListener | None) -> None:
        self._listener = listener
        if listener is not None and self.is_disconnected:
            asyncio.get_running_loop().call_soon(listener.on_disconnect)

    # --- For the connection ----------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        """Buffer a part of the request body and pause reading above the limit."""
        if self.response_complete:  # the handler needs no more of the body
            return
        self._body_buffer += body
        self._body_bytes += len(body)
        within_limit = self._connection.server_state.add_unread_bytes(len(body), self._tenant)
        self._is_overloaded = not within_limit and self._body_bytes > MAX_PREFETCHED_BODY_BYTES
        if len(self._body_buffer) > self._max_buffered_bytes:
            self._connection.pause_reading()
        self._wake()

    def on_whole_body(self, body: bytes) -> None:
        """Buffer a body that arrived with the head of its request, before the handler runs."""
        self.is_body_complete = True
        self._body_buffer += body
        self._body_bytes = len(body)
        within_limit = self._connection.server_state.add_unread_bytes(len(body))
        self._is_overloaded = not within_limit and len(body) > MAX_PREFETCHED_BODY_BYTES

    def on_body_complete(self) -> None:
        """Mark the body as complete and resume reading, so that a disconnect is noticed."""
        self.is_body_complete = True
        self._connection.resume_reading()
        self._wake()

    def discard_body(self) -> None:
        """Drop the buffered request body."""
        self._take_body()

    def on_backpressure(self) -> None:
        """Report to the listener that the write buffer is full."""
        if self._listener is not None:
            self._listener.on_backpressure()

    def on_writable(self) -> None:
        """Report to the listener that the write buffer has drained."""
        self._wake()
        if self._listener is not None:
            self._listener.on_writable()

    def on_half_close(self) -> None:
        """Send a probe to a client that has closed its sending side.

        If the client has disconnected, its kernel answers the probe with a reset.
        """
        if self.response_started:
            if self._listener is not None:
                self._listener.on_half_close()
        elif not self._is_http_1_0:
            self._buffer_write(CONTINUE_RESPONSE)
        # HTTP/1.0 has no interim responses. Send the status line ahead, one byte per probe.
        elif self._prefix_bytes_sent < len(STATUS_LINE_PREFIX):
            self._buffer_write(
                STATUS_LINE_PREFIX[self._prefix_bytes_sent : self._prefix_bytes_sent + 1]
            )
            self._prefix_bytes_sent += 1

    def on_disconnect(self) -> None:
        """Mark the client as disconnected and report the disconnect to the listener."""
        self.is_disconnected = True
        self._wake()
        if self._listener is not None and not self.response_complete:
            self._listener.on_disconnect()

    async def run(self, handle: RequestHandler, request: HttpRequest) -> None:
        """Call the handler, and complete or abort the response if it has left it open."""
        try:
            await handle(request)
        except Exception:
            log.exception("request_handler_failed")
        finally:
            if self._body_buffer:
                self.discard_body()
            if not (self.response_complete or self.is_disconnected):
                if self.response_started:
                    self._connection.abort()
                else:
                    self.send_response(500, [(b"content-length", b"0")], b"")

    # --- Internal --------------------------------------------------------------------------------

    def _render_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        self.response_started = True
        # No 100 response was sent, so the body may never arrive and the connection cannot be reused.
        if self._expects_continue and not self.is_body_complete:
            self.keep_alive = False
        all_headers = [*self._connection.server_state.default_headers, *headers]
        if not self.keep_alive:
            all_headers.append((b"connection", b"close"))
        lines = b"\r\n".join(map(b": ".join, all_headers))
        if lines.count(b"\n") >= len(all_headers) or lines.count(b"\r") >= len(all_headers):
            raise ValueError("a response header contains a line break")
        status_line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        return status_line[self._prefix_bytes_sent :] + lines + b"\r\n\r\n"

    def _buffer_write(self, data: bytes) -> None:
        """Write the data at the end of the event loop turn, since each write is a system call and wakes the client."""
        if not self._write_buffer:
            self._loop.call_soon(self._flush)
        self._write_buffer += data
        if len(self._write_buffer) > MAX_COALESCED_BYTES:
            self._flush()

    def _flush(self) -> None:
        pending_data, self._write_buffer = self._write_buffer, b""
        if pending_data and not self._transport.is_closing():
            self._transport.write(pending_data)

    def _complete_response(self) -> None:
        self._flush()
        self.response_complete = True
        self._wake()
        self._on_complete(self)

    def _take_body(self) -> bytes:
        body = bytes(self._body_buffer)
        self._body_buffer.clear()
        self._connection.server_state.add_unread_bytes(-len(body), self._tenant)
        return body

    async def _wait_for_change(self) -> None:
        """Wait for any change of the request's state, and read from the client meanwhile."""
        if self._expects_continue and not self.response_started:
            self._expects_continue = False
            self._buffer_write(CONTINUE_RESPONSE)
        self._connection.resume_reading()
        if self._wakeup is None:
            self._wakeup = asyncio.Event()
        self._wakeup.clear()
        await self._wakeup.wait()

    def _wake(self) -> None:
        if self._wakeup is not None:
            self._wakeup.set()
