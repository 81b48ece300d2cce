"""Client connection that parses HTTP/1.1 requests with httptools and answers them in order, within limits."""

from __future__ import annotations

import asyncio
import math
import random
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import httptools
import structlog

from argosy.http_server.connection_limiter import ConnectionSlot
from argosy.http_server.deadlines import Deadlines
from argosy.http_server.error_responses import bad_protocol_error, render_error_response
from argosy.http_server.http1_transport import Http1Transport
from argosy.http_server.request_head import (
    MAX_HEAD_BYTES,
    HeadTemplate,
    InvalidHeadError,
    RequestHead,
    build_head_template,
)
from argosy.http_server.response_transport import TRANSPORT_KEY, AsgiApp, Scope
from argosy.http_server.server_state import HttpServerState
from argosy.http_server.socket_state import (
    get_local_address,
    get_peer_address,
    has_unread_data,
    is_peer_closed,
)
from argosy.http_server.websocket import WEBSOCKET_KEY, WebSocket
from argosy.protocol import ApiError

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.http_server")

MAX_TEMPLATE_MISSES = 8
"""Consecutive requests with differing heads after which the connection stops comparing heads with a template."""
MAX_PIPELINED_REQUESTS = 100
"""Requests that may wait for earlier responses. The request that reaches this limit is the last one read."""
MAX_PIPELINED_HEADERS = 4096
"""Headers that all waiting requests may have together. The request that reaches this limit is the last one read."""
MAX_UNREAD_BODY_BYTES = 1 << 30
"""Limit on the buffered request bodies of all connections together. Bodies beyond it are rejected."""


class HttpConnection(asyncio.Protocol):
    """Connection of one client. Requests run one at a time, each in a task that calls `app`.

    The scope's `state` contains the request's `Http1Transport` under `TRANSPORT_KEY`. For the handshake of a WebSocket
    it also contains the function that opens it, under `WEBSOCKET_KEY`.

    `header_deadlines` end connections whose request headers take too long. `idle_deadlines` end connections without a
    request. `half_close_checks` check periodically whether clients that closed their sending side are still connected.
    The server may close the connection for a new one while `slot` is not marked as busy.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        header_deadlines: Deadlines[HttpConnection],
        idle_deadlines: Deadlines[HttpConnection],
        half_close_checks: Deadlines[HttpConnection],
        app: AsgiApp,
        server_state: HttpServerState,
        slot: ConnectionSlot,
    ) -> None:
        self._app = app
        self._slot = slot
        self._loop = asyncio.get_running_loop()
        self._server_state = server_state
        self._header_deadlines, self._idle_deadlines, self._half_close_checks = (
            header_deadlines,
            idle_deadlines,
            half_close_checks,
        )
        self._half_close_check_count, self._next_probe_count = 0, 1
        """Number of checks since the client closed its sending side, and the number at which the next probe is sent."""
        self._last_unsent_bytes = math.inf
        """Bytes that were waiting to be sent at the last idle timeout."""
        self._head = RequestHead()
        self.on_url, self.on_header = self._head.add_url, self._head.add_header
        self._head_incomplete = False
        """Whether a request's head has begun and is not complete."""
        self._between_requests = False
        """Whether the last request is complete and nothing of the next one has arrived."""
        self._template_source: bytes | None = None
        """Data being parsed that starts with a head, as the source of a head template."""
        self._head_template: HeadTemplate | None = None
        self._template_misses = 0
        """Consecutive requests that did not match the head template."""
        self._is_websocket_handshake = False
        """Whether the parser stopped after a request for a WebSocket."""
        self._websocket: WebSocket | None = None
        """Set once the client's last request was upgraded. It receives all further input."""
        self._parser: httptools.HttpRequestParser
        """Set from `connection_made` to `connection_lost`."""
        self.is_backpressured = False
        self._reading_paused = False
        self._input_ignored = False
        """Whether further input is dropped, because the last request or invalid input has arrived."""
        self._pending_error: ApiError | None = None
        """Error to send for invalid input that follows the request in progress."""
        self._has_excess_input = False
        """Whether the client keeps sending after its last request."""
        self._receiving: Http1Transport | None = None
        self._current: Http1Transport | None = None
        self._pipelined: deque[tuple[Http1Transport, Scope]] = deque()
        self._max_age_at = math.inf
        self._unbounded_bytes = 0
        """Bytes since the last body part or complete request. The parser buffers a header until its end."""
        self._connection_scope: dict[str, Any] = {}

    # --- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Configure the socket, register the connection, and start the header deadline."""
        self.transport = transport
        self._slot.close_connection = self.abort
        self._parser = httptools.HttpRequestParser(self)
        peer = transport.get_extra_info("socket")
        if peer is not None and peer.family != socket.AF_UNIX:
            # uvloop sets this option itself; other event loops may not.
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._server_state.add_connection(self)
        self._connection_scope = {
            "server": get_local_address(transport),
            "client": get_peer_address(transport),
            "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
        }
        # Jitter, or clients that connected at the same time would also reconnect at the same time.
        jitter = random.uniform(0.9, 1.1)  # noqa: S311 - spreads connections, guards nothing
        self._max_age_at = self._loop.time() + self._server_state.max_connection_age_s * jitter
        self._header_deadlines.add(self)
        self._start_drain_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadlines, drop waiting requests, and report the disconnect to the request in progress."""
        del exc, self._parser  # breaks the reference cycle of the connection and its parser
        self._server_state.remove_connection(self)
        self._slot.release()
        self._header_deadlines.remove(self)
        self._idle_deadlines.remove(self)
        self._half_close_checks.remove(self)
        if self._server_state.drain_deadlines is not None:
            self._server_state.drain_deadlines.remove(self)
        self._input_ignored = True
        for wire, _ in self._pipelined:
            wire.discard_body()
        self._pipelined.clear()
        current, self._current, self._receiving = self._current, None, None
        if self._websocket is not None:
            self._websocket.on_connection_lost()
        if current is not None:
            current.on_disconnect()

    def data_received(self, data: bytes) -> None:
        """Parse a part of the request stream, or match it with the head template."""
        if self._websocket is not None:
            self._websocket.on_data(data)
            return
        if self._input_ignored:
            return
        if self._between_requests and self._current is None:
            known = None if self._head_template is None else self._head_template.match_request(data)
            if known is not None:
                self._template_misses = 0
                self._start_templated_request(*known)
                return
            if self._template_misses < MAX_TEMPLATE_MISSES:
                self._template_misses += 1
                self._template_source = data
        self._unbounded_bytes += len(data)
        while data:
            try:
                data = self._feed_parser(data)
            except httptools.HttpParserError as error:
                # The parser keeps an exception of a callback as the context of its own.
                cause = error.__context__
                self._on_bad_protocol(
                    data, str(cause) if isinstance(cause, InvalidHeadError) else ""
                )
                return
        if self._unbounded_bytes > MAX_HEAD_BYTES:
            self._on_bad_protocol(b"")
        elif self._head_incomplete:  # most heads arrive at once and need no deadline
            self._head_incomplete = False
            self._header_deadlines.add(self)

    def eof_received(self) -> bool:
        """Keep the connection open for pending responses after the client has closed its sending side.

        Returns:
            True if the transport must stay open for writing.
        """
        last = self._pipelined[-1][0] if self._pipelined else self._current
        if last is None or self._receiving is not None or self._websocket is not None:
            return False
        if not self.transport.can_write_eof():
            return False
        self._input_ignored = True
        last.keep_alive = False
        self._half_close_checks.add(self)
        return not is_peer_closed(self.transport)

    def pause_writing(self) -> None:
        """Report to the request in progress that the write buffer is full."""
        self.is_backpressured = True
        if self._current is not None:
            self._current.on_backpressure()

    def resume_writing(self) -> None:
        """Report to the request in progress that the write buffer has drained."""
        self.is_backpressured = False
        if self._current is not None:
            self._current.on_writable()

    # --- httptools callbacks ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Start a request's head."""
        if self._input_ignored:
            return
        self._head_incomplete, self._between_requests = True, False
        self._idle_deadlines.remove(self)
        self._head.reset()

    def on_headers_complete(self) -> None:
        """Start the request, or queue it until the requests before it are answered."""
        head, parser = self._head, self._parser
        self._is_websocket_handshake = parser.should_upgrade() and head.is_websocket_handshake(
            parser
        )
        if self._input_ignored or (parser.should_upgrade() and not self._is_websocket_handshake):
            return
        self._head_incomplete = False
        self._header_deadlines.remove(self)
        scope, expects_continue = (
            head.build_scope(parser, self._connection_scope),
            head.expects_continue,
        )
        head.reset()  # trailers after the body are not part of the head and are ignored
        keep_alive = scope["http_version"] != "1.0" and parser.should_keep_alive()
        template_source, self._template_source = self._template_source, None
        if template_source is not None and keep_alive:
            self._head_template = build_head_template(template_source, scope)
        http_transport = self._receiving = self._create_transport(
            scope, keep_alive=keep_alive, expects_continue=expects_continue
        )
        if self._is_websocket_handshake:
            scope["state"][WEBSOCKET_KEY] = partial(self._open_websocket, http_transport)
        if self._current is None:
            self._start_request(http_transport, scope)
        else:
            self._pipelined.append((http_transport, scope))
            header_count = sum(
                len(waiting_scope["headers"]) for _, waiting_scope in self._pipelined
            )
            if (
                len(self._pipelined) >= MAX_PIPELINED_REQUESTS
                or header_count >= MAX_PIPELINED_HEADERS
            ):
                self._has_excess_input, http_transport.keep_alive = True, False
            self.pause_reading()

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body to its request."""
        self._unbounded_bytes = 0
        if self._receiving is not None:
            self._receiving.on_body(body)

    def on_message_complete(self) -> None:
        """Complete the request's body."""
        self._unbounded_bytes = 0
        self._between_requests = True
        http_transport, self._receiving = self._receiving, None
        if http_transport is not None:
            self._on_body_complete(http_transport)

    # --- For the server --------------------------------------------------------------------------

    def close_gracefully(self) -> None:
        """Close with the last pending response whose head can still announce it.

        A client that gets no announcement may send another request.
        """
        last = self._pipelined[-1][0] if self._pipelined else self._current
        if self._websocket is not None:
            self._websocket.close_when_idle()
        elif last is None:
            self._start_drain_deadline()
        elif not last.response_started:
            last.keep_alive = False

    def shutdown(self) -> None:
        """Close after the response in progress."""
        if self._websocket is not None:
            self._websocket.close_when_idle()
        elif self._current is None:
            self.transport.close()
        else:
            self._current.keep_alive = False

    # --- ConnectionHandle, for the request -------------------------------------------------------

    @property
    def default_headers(self) -> Iterable[tuple[bytes, bytes]]:
        return self._server_state.default_headers

    def add_unread_bytes(self, byte_count: int) -> bool:
        self._server_state.unread_body_bytes += byte_count
        return self._server_state.unread_body_bytes <= MAX_UNREAD_BODY_BYTES

    def pause_reading(self) -> None:
        if not self._reading_paused and not self.transport.is_closing():
            self._reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._reading_paused and not self._pipelined and not self.transport.is_closing():
            self._reading_paused = False
            self.transport.resume_reading()

    def on_response_complete(self, transport: Http1Transport) -> None:
        self._current = None
        if self.transport.is_closing():
            return
        if not self._pipelined:
            self._slot.mark_idle()
        if not transport.keep_alive:
            self._close_after_response(transport)
        elif self._pipelined:
            self._start_request(*self._pipelined.popleft())
        elif self._pending_error is not None:
            self._send_error_and_close(self._pending_error)
        else:
            self._idle_deadlines.add(self)
            self._start_drain_deadline()
        self.resume_reading()

    def set_idle(self, *, is_idle: bool) -> None:
        (self._slot.mark_idle if is_idle else self._slot.mark_busy)()

    def close(self) -> None:
        self.transport.close()

    def abort(self) -> None:
        """Close the connection with a reset, so that the kernel drops its buffers too.

        `transport.close()` would wait for a client that reads nothing.
        """
        peer = self.transport.get_extra_info("socket")
        if peer is not None and not self.transport.is_closing():
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def on_header_timeout(self) -> None:
        """Abort the connection if the next request's headers take too long and no request is in progress."""
        if self._current is None:
            self.transport.abort()
        else:
            self._header_deadlines.add(self)

    def on_idle_timeout(self) -> None:
        """Close the connection unless unread input is waiting or the client still reads the last response."""
        unsent = self.transport.get_write_buffer_size()
        if not self._input_ignored and has_unread_data(self.transport):
            self._idle_deadlines.add(self)
        elif not unsent:
            self.transport.close()
        elif unsent < self._last_unsent_bytes:
            self._last_unsent_bytes = unsent
            self._idle_deadlines.add(self)
        else:
            self.abort()

    def probe_half_closed(self) -> None:
        """Check whether a client that has closed its sending side is still connected, and probe it ever more rarely."""
        if self._current is None:
            return
        if is_peer_closed(self.transport):
            self.transport.abort()
            return
        self._half_close_check_count += 1
        if self._half_close_check_count == self._next_probe_count:
            self._next_probe_count *= 4
            self._current.on_half_close()
        self._half_close_checks.add(self)

    # --- Internal --------------------------------------------------------------------------------

    def _feed_parser(self, data: bytes) -> bytes:
        """Parse the data and return the part that is still to be parsed.

        Raises:
            HttpParserError: The data is not valid HTTP/1.
        """
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            if self._input_ignored:
                return b""
            if self._is_websocket_handshake:
                self._is_websocket_handshake = False
                self._parser = httptools.HttpRequestParser(self)
                return data[error.args[0] :]
            # After an upgrade request the parser ignores the body. A new parser gets the head without the upgrade.
            head, self._parser = (
                self._head.render_without_upgrade(self._parser),
                httptools.HttpRequestParser(self),
            )
            return head + data[error.args[0] :]
        return b""

    def _open_websocket(
        self,
        http_transport: Http1Transport,
        build_headers: Callable[[], list[tuple[bytes, bytes]]],
        *,
        max_message_bytes: int,
        message_timeout_s: float,
    ) -> WebSocket:
        """Switch to the WebSocket protocol with the response to the current request.

        Raises:
            ApiError: 400 if the client has sent more than the handshake, 503 if the server shuts down.
        """
        if self._server_state.drain_deadlines is not None:
            message = "The server is shutting down. Open the WebSocket on a new connection."
            raise ApiError(503, "draining", message, retry_after_s=1.0)
        if self._pipelined or self._head_incomplete or self._input_ignored:
            message = "A WebSocket's client may send nothing before the handshake is answered."
            raise ApiError(400, "bad_http", message)
        http_transport.keep_alive = True  # however old the connection is
        http_transport.start_sized_response(101, build_headers())
        self._websocket = WebSocket(
            self,
            http_transport,
            max_message_bytes=max_message_bytes,
            message_timeout_s=message_timeout_s,
        )
        return self._websocket

    def _start_templated_request(self, scope: Scope, body: bytes) -> None:
        """Start a complete request whose head matches the template and needs no parsing."""
        http_transport = self._create_transport(scope, keep_alive=True, expects_continue=False)
        self._start_request(http_transport, scope)
        http_transport.on_body(body)
        self._on_body_complete(http_transport)

    def _create_transport(
        self, scope: Scope, *, keep_alive: bool, expects_continue: bool
    ) -> Http1Transport:
        closes_after_response = (
            self._server_state.drain_deadlines is not None or self._loop.time() >= self._max_age_at
        )
        http_transport = Http1Transport(
            self,
            scope,
            keep_alive=keep_alive and not closes_after_response,
            expects_continue=expects_continue,
        )
        scope["state"] = {TRANSPORT_KEY: http_transport}
        return http_transport

    def _on_body_complete(self, http_transport: Http1Transport) -> None:
        http_transport.on_body_complete()
        self._input_ignored = self._input_ignored or not http_transport.keep_alive

    def _start_request(self, http_transport: Http1Transport, scope: Scope) -> None:
        # Needed here too, since the request may have begun before the last response was complete.
        self._idle_deadlines.remove(self)
        if self._server_state.drain_deadlines is not None:
            self._server_state.drain_deadlines.remove(self)
        self._current, self._last_unsent_bytes = http_transport, math.inf
        self._slot.mark_busy()
        task = self._loop.create_task(http_transport.run(self._app, scope))
        self._server_state.tasks.add(task)
        task.add_done_callback(self._server_state.tasks.discard)

    def _close_after_response(self, http_transport: Http1Transport) -> None:
        """Close after the client has read the response, since closing while it sends would discard the response."""
        transport = self.transport
        is_delivered = http_transport.is_body_complete and not (
            self._has_excess_input or transport.get_write_buffer_size()
        )
        if is_delivered or not transport.can_write_eof():
            transport.close()
            return
        self._input_ignored = True
        transport.write_eof()
        self._idle_deadlines.add(self)
        self._start_drain_deadline()

    def _start_drain_deadline(self) -> None:
        """Start the drain deadline of an idle connection, if the server drains."""
        if self._server_state.drain_deadlines is not None:
            self._server_state.drain_deadlines.add(self)

    def _on_bad_protocol(self, data: bytes, reason: str = "") -> None:
        """Reject input that is not HTTP/1, after the pending responses."""
        self._header_deadlines.remove(self)
        if self._input_ignored:
            return
        self._input_ignored = True
        error = bad_protocol_error(data, reason)
        address, _ = self._connection_scope["client"] or (None, None)
        log.info("bad_protocol", address=address, reason=error.message)
        current = self._current
        if current is None or (current is self._receiving and not current.response_started):
            self._send_error_and_close(error)
        else:
            self._pending_error = error

    def _send_error_and_close(self, error: ApiError) -> None:
        self.transport.write(render_error_response(error))
        self.transport.close()
