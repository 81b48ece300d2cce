"""One request on its connection: what came of its body, what is sent of its answer, and the same as ASGI."""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Iterable, MutableMapping
from typing import Any, Protocol, cast

from argosy.http_server.http_exchange import AsgiApp, ClientListener, DisconnectedError, Scope
from argosy.protocol import ApiError

MAX_PREFETCHED_BODY_BYTES = 64 * 1024
"""Most of a body that is taken in before somebody reads it."""
MAX_COALESCED_BYTES = 16 * 1024
"""Of what is sent in one turn of the loop, what waits for its end."""

_STATUS_LINES = {int(s): f"HTTP/1.1 {s} {s.phrase}\r\n".encode() for s in http.HTTPStatus}
_BODILESS_STATUSES = frozenset({204, 304})
CONTINUE_RESPONSE = b"HTTP/1.1 100 Continue\r\n\r\n"
STATUS_LINE_PREFIX = b"HTTP/1.1 "
"""What all answers begin with."""

log = logging.getLogger("argosy.http_server")


class ConnectionHandle(Protocol):
    """The connection that a request came by."""

    transport: asyncio.Transport
    is_backpressured: bool
    """The client is behind with what was sent to it."""

    @property
    def default_headers(self) -> Iterable[tuple[bytes, bytes]]:
        """Headers of every answer."""

    def add_unread_bytes(self, byte_count: int) -> bool:
        """So many more bytes of bodies are kept, or fewer; whether there is room for what all connections keep."""

    def pause_reading(self) -> None:
        """Read nothing more for now."""

    def resume_reading(self) -> None:
        """Read on."""

    def on_response_complete(self, transport: Http1Transport) -> None:
        """The answer is whole."""

    def abort(self) -> None:
        """Close at once, whatever waits to be sent."""


class Http1Transport:
    """The `Wire` of one request. What it is sent after the client has gone is lost without an error."""

    __slots__ = (
        "_body_buffer",
        "_body_bytes",
        "_body_end_delivered",
        "_chunked",
        "_connection",
        "_expects_continue",
        "_http_version",
        "_is_head_request",
        "_is_overloaded",
        "_listener",
        "_loop",
        "_max_buffered_bytes",
        "_prefix_bytes_sent",
        "_transport",
        "_wakeup",
        "_write_buffer",
        "is_body_complete",
        "is_disconnected",
        "keep_alive",
        "response_complete",
        "response_started",
    )

    def __init__(
        self,
        connection: ConnectionHandle,
        scope: Scope,
        *,
        keep_alive: bool,
        expects_continue: bool,
    ) -> None:
        self.keep_alive = keep_alive
        self.is_body_complete = False
        """All of the body came."""
        self.response_started = self.response_complete = False
        """Something of the answer was sent; all of it."""
        self.is_disconnected = False
        """The connection is closed."""
        self._connection = connection
        self._transport = connection.transport
        self._is_head_request = scope["method"] == "HEAD"
        self._http_version: str = scope["http_version"]
        self._chunked = False
        self._prefix_bytes_sent = 0
        """Bytes of the opening that were sent ahead of the answer."""
        self._expects_continue = expects_continue and self._http_version != "1.0"
        self._body_buffer = bytearray()
        self._body_bytes = 0
        self._is_overloaded = False
        """There was no room for what came, and it is more than what is taken in of any."""
        self._max_buffered_bytes = MAX_PREFETCHED_BODY_BYTES
        self._body_end_delivered = False
        """The end of the body was given to an ASGI application."""
        self._listener: ClientListener | None = None
        self._wakeup: asyncio.Event | None = None
        self._loop = asyncio.get_running_loop()
        self._write_buffer = b""
        """What is sent in this turn of the loop."""

    # --- for `Exchange` --------------------------------------------------------------------------

    @property
    def is_backpressured(self) -> bool:
        """See `Wire`."""
        return self._connection.is_backpressured

    @property
    def unsent_bytes(self) -> int:
        """See `Wire`."""
        return len(self._write_buffer) + self._transport.get_write_buffer_size()

    async def read_body(self, max_bytes: int) -> bytes:
        """See `Wire`."""
        self._max_buffered_bytes = max_bytes
        while not self.is_body_complete and self._body_bytes <= max_bytes:
            if self.is_disconnected:
                raise DisconnectedError
            if self._is_overloaded:
                message = "Too much is being sent at a time. Try again shortly."
                raise ApiError(503, "overloaded", message, retry_after_s=1.0)
            await self._wait_for_change()
        return self._take_body()

    async def wait_writable(self) -> None:
        """See `Wire`."""
        while self._connection.is_backpressured and not self.is_disconnected:
            await self._wait_for_change()

    def send_response(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """See `Wire`."""
        self._write_buffer += self._render_head(status, headers) + (
            b"" if self._is_head_request else body
        )
        self._complete_response()

    def start_response(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """See `Wire`."""
        self._chunked = self._http_version != "1.0"
        if self._chunked:
            headers = [*headers, (b"transfer-encoding", b"chunked")]
        self._buffer_write(self._render_head(status, headers))

    def start_sized_response(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """See `Wire`."""
        self._buffer_write(self._render_head(status, headers))

    def write_nowait(self, data: bytes) -> None:
        """See `Wire`."""
        if data and not self._is_head_request:
            self._buffer_write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def lend_socket(self) -> int | None:
        """See `Wire`."""
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
        """See `Wire`."""
        self._buffer_write(chunks)

    def end_response(self) -> None:
        """See `Wire`."""
        if self._chunked and not self._is_head_request:
            self._write_buffer += b"0\r\n\r\n"
        self._complete_response()

    def abort(self) -> None:
        """See `Wire`."""
        self._connection.abort()

    def set_listener(self, listener: ClientListener | None) -> None:
        """See `Wire`."""
        self._listener = listener
        if listener is not None and self.is_disconnected:
            asyncio.get_running_loop().call_soon(listener.on_disconnect)

    # --- for its connection ----------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if self.response_complete:  # nobody wants it any more
            return
        self._body_buffer += body
        self._body_bytes += len(body)
        there_is_room = self._connection.add_unread_bytes(len(body))
        self._is_overloaded = not there_is_room and self._body_bytes > MAX_PREFETCHED_BODY_BYTES
        if self._body_bytes > self._max_buffered_bytes:
            self._connection.pause_reading()
        self._wake()

    def on_body_complete(self) -> None:
        """That was all of it: what comes now may be that the client leaves."""
        self.is_body_complete = True
        self._connection.resume_reading()
        self._wake()

    def discard_body(self) -> None:
        """Nobody wants what came."""
        self._take_body()

    def on_backpressure(self) -> None:
        """What was sent piles up."""
        if self._listener is not None:
            self._listener.on_backpressure()

    def on_writable(self) -> None:
        """It no longer does."""
        self._wake()
        if self._listener is not None:
            self._listener.on_writable()

    def on_half_close(self) -> None:
        """The client will send no more: what it is sent comes back if it has gone."""
        if self.response_started:
            if self._listener is not None:
                self._listener.on_half_close()
        elif self._http_version != "1.0":
            self._buffer_write(CONTINUE_RESPONSE)
        elif self._prefix_bytes_sent < len(
            STATUS_LINE_PREFIX
        ):  # it knows no interim answers: it gets its own by bytes
            self._buffer_write(
                STATUS_LINE_PREFIX[self._prefix_bytes_sent : self._prefix_bytes_sent + 1]
            )
            self._prefix_bytes_sent += 1

    def on_disconnect(self) -> None:
        """The connection was lost."""
        self.is_disconnected = True
        self._wake()
        if self._listener is not None and not self.response_complete:
            self._listener.on_disconnect()

    async def run(self, app: AsgiApp, scope: Scope) -> None:
        """Let `app` answer; what it leaves open is closed."""
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            log.exception("the application failed")
        finally:
            self.discard_body()
            if not (self.response_complete or self.is_disconnected):
                if self.response_started:
                    self._connection.abort()
                else:
                    self.send_response(500, [(b"content-length", b"0")], b"")

    # --- ASGI ------------------------------------------------------------------------------------

    async def receive(self) -> MutableMapping[str, Any]:
        """A part of the body; after its end, that the client has gone or the answer is whole."""
        while not (
            self.response_complete
            or self.is_disconnected
            or (not self._body_end_delivered and (self.is_body_complete or self._body_buffer))
        ):
            await self._wait_for_change()
        if self.response_complete or self.is_disconnected:
            return {"type": "http.disconnect"}
        body = self._take_body()
        self._body_bytes = 0
        self._body_end_delivered = self.is_body_complete
        return {"type": "http.request", "body": body, "more_body": not self.is_body_complete}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """A part of the answer, once the client has taken what was sent before."""
        await self.wait_writable()
        if self.is_disconnected:
            return
        if message["type"] == "http.response.start":
            self._start_asgi_response(message["status"], list(message.get("headers", ())))
            return
        self.write_nowait(message.get("body", b""))
        if not message.get("more_body", False):
            self.end_response()

    def _start_asgi_response(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        names = {name.lower(): value for name, value in headers}
        if b"close" in names.get(b"connection", b"").lower():
            self.keep_alive = False
        if b"content-length" in names or status in _BODILESS_STATUSES:
            self.start_sized_response(status, headers)
        else:
            self.start_response(status, headers)

    # --- within ----------------------------------------------------------------------------------

    def _render_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        self.response_started = True
        if (
            self._expects_continue and not self.is_body_complete
        ):  # its body was not called for, and may never come
            self.keep_alive = False
        every = [*self._connection.default_headers, *headers]
        if not self.keep_alive:
            every.append((b"connection", b"close"))
        lines = b"\r\n".join(map(b": ".join, every))
        if lines.count(b"\n") >= len(every) or lines.count(b"\r") >= len(every):
            raise ValueError("a header holds a line break")
        line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        return line[self._prefix_bytes_sent :] + lines + b"\r\n\r\n"

    def _buffer_write(self, data: bytes) -> None:
        """Send it with what else is sent in this turn: each write is a system call, and wakes the client."""
        if not self._write_buffer:
            self._loop.call_soon(self._flush)
        self._write_buffer += data
        if len(self._write_buffer) > MAX_COALESCED_BYTES:
            self._flush()

    def _flush(self) -> None:
        held, self._write_buffer = self._write_buffer, b""
        if held and not self._transport.is_closing():
            self._transport.write(held)

    def _complete_response(self) -> None:
        self._flush()
        self.response_complete = True
        self._wake()
        self._connection.on_response_complete(self)

    def _take_body(self) -> bytes:
        body = bytes(self._body_buffer)
        self._body_buffer.clear()
        self._connection.add_unread_bytes(-len(body))
        return body

    async def _wait_for_change(self) -> None:
        """Wait for anything to change, reading on meanwhile."""
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
