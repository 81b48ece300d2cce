"""Client connection that parses HTTP/1.1 requests with httptools and answers them in order, within limits.

The input of a connection is in one of five states:

    IDLE ──first byte──▶ HEAD ──head complete──▶ BODY ──body complete──▶ IDLE
      │                                                └─last request──▶ ENDED
      └──handler accepts a WebSocket──▶ UPGRADED

* HEAD and BODY: a request arrives. One without a body passes through BODY too.
* ENDED: further input is dropped. Invalid input and the client's half-close lead there from every other state.
* UPGRADED: frames go to the WebSocket.

The output follows from the requests that are not answered:

* None: `idle_deadlines` run once the input is IDLE too.
* One (`_current`): when its response is complete, the connection becomes idle, sends a pending error, or closes.
* More (`_pipelined`): the next one starts then. Reading pauses meanwhile, so at most one packet of them waits.

A request with `keep_alive` False is the last one. The client may ask for that or half-close, the server may drain,
and the connection may be too old. After its response the server half-closes and waits in ENDED until the client has
read it.

`header_deadlines` run from the connection's start, or the first part of a head, until a head is complete.
`half_close_checks` run from the client's half-close on.
"""

from __future__ import annotations

import asyncio
import enum
import math
import random
from collections import deque
from collections.abc import Callable
from functools import partial

import httptools
import structlog

from argosy.http_server.client_connection import (
    ClientConnection,
    HttpServerState,
    get_peer_address,
    has_unread_data,
    is_peer_closed,
)
from argosy.http_server.connection_limiter import ConnectionSlot
from argosy.http_server.deadlines import Deadlines
from argosy.http_server.error_responses import bad_protocol_error, render_error_response
from argosy.http_server.http1_transport import Http1Transport
from argosy.http_server.http_request import (
    MAX_HEAD_BYTES,
    HeadCache,
    HttpRequest,
    InvalidHeadError,
    KnownHead,
    RequestHandler,
    RequestHead,
)
from argosy.http_server.response_transport import Headers
from argosy.http_server.websocket import WebSocket
from argosy.protocol import ApiError

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.http_server")

HEADER_TIMEOUT_S = 30
"""Time in seconds within which a request's head must be complete, or the connection is dropped."""
HALF_CLOSE_CHECK_INTERVAL_S = 0.05
"""Interval between checks whether a client that has closed its sending side is still connected."""
MAX_PIPELINED_REQUESTS = 100
"""Requests that may wait for earlier responses. The request that reaches this limit is the last one read."""
MAX_PIPELINED_HEADERS = 4096
"""Headers that all waiting requests may have together. The request that reaches this limit is the last one read."""

WEBSOCKET_SLICE_BYTES = 2048
"""Bytes of a WebSocket that are parsed at once. Its frames may have six bytes each."""


class HttpConnections:
    """Open connections of one server, and the deadlines at which they close.

    Args:
        handle_request: Answers each request.
        idle_timeout_s: Time without a request after which a connection closes.
        max_age_s: Approximate age after which a connection closes with its next response.
    """

    def __init__(
        self, handle_request: RequestHandler, idle_timeout_s: float, max_age_s: float
    ) -> None:
        self.handle_request = handle_request
        self.max_age_s = max_age_s
        self.state = HttpServerState()
        self.header_deadlines = Deadlines(HEADER_TIMEOUT_S, HttpConnection.on_header_timeout)
        self.idle_deadlines = Deadlines(idle_timeout_s, HttpConnection.on_idle_timeout)
        self.half_close_checks = Deadlines(
            HALF_CLOSE_CHECK_INTERVAL_S, HttpConnection.probe_half_closed
        )
        self.drain_deadlines: Deadlines[HttpConnection] | None = None
        """Set while the server drains. Each connection then closes with its next response or at its deadline here."""
        self.open: set[HttpConnection] = set()
        self.all_closed = asyncio.Event()
        """Set while no connection is open."""
        self.all_closed.set()

    def add(self, connection: HttpConnection) -> None:
        """Register a connection, whose first head must arrive in time."""
        self.open.add(connection)
        self.all_closed.clear()
        self.header_deadlines.add(connection)
        self.start_drain_deadline(connection)

    def remove(self, connection: HttpConnection) -> None:
        """Remove a closed connection and its deadlines."""
        self.open.discard(connection)
        self.header_deadlines.remove(connection)
        self.half_close_checks.remove(connection)
        self.end_idle(connection)
        if not self.open:
            self.all_closed.set()

    def start_drain_deadline(self, connection: HttpConnection) -> None:
        """Start the drain deadline of an idle connection, if the server drains."""
        if self.drain_deadlines is not None:
            self.drain_deadlines.add(connection)

    def start_idle(self, connection: HttpConnection) -> None:
        """Start the deadlines of a connection without a request."""
        self.idle_deadlines.add(connection)
        self.start_drain_deadline(connection)

    def end_idle(self, connection: HttpConnection) -> None:
        """Cancel the deadlines of a connection without a request."""
        self.idle_deadlines.remove(connection)
        if self.drain_deadlines is not None:
            self.drain_deadlines.remove(connection)


class _Input(enum.Enum):
    """State of a connection's input."""

    IDLE = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    ENDED = enum.auto()
    UPGRADED = enum.auto()


class HttpConnection(ClientConnection):
    """Connection of one client. Requests run one at a time, each in a task that calls the server's handler."""

    def __init__(self, connections: HttpConnections, slot: ConnectionSlot) -> None:
        super().__init__(connections.state, slot)
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._head = RequestHead()
        self.on_url, self.on_header = self._head.add_url, self._head.add_header
        self._head_cache = HeadCache()
        self._parser: httptools.HttpRequestParser
        """Set from `connection_made` to `connection_lost`."""
        self._input = _Input.IDLE
        self._unbounded_bytes = 0
        """Bytes since the last body part or complete request. The parser buffers a header until its end."""
        self._receiving: Http1Transport | None = None
        """Request whose body arrives. None for one that the connection ignores."""
        self._current: Http1Transport | None = None
        """Request in progress."""
        self._pipelined: deque[tuple[Http1Transport, HttpRequest]] = deque()
        """Requests that wait for the one in progress."""
        self._pending_error: ApiError | None = None
        """Error to send for invalid input that follows the request in progress."""
        self._has_excess_input = False
        """Whether the client keeps sending after its last request."""
        self._websocket: WebSocket | None = None
        """Receives all input in the state UPGRADED."""
        self._peer_address = ""
        self._max_age_at = math.inf
        self._half_close_check_count = 0
        """Number of checks since the client closed its sending side."""
        self._next_probe_count = 1
        """Number of the check at which the next probe is sent."""
        self._last_unsent_bytes = math.inf
        """Bytes that were waiting to be sent at the last idle timeout."""

    # --- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection, and start the header deadline."""
        self.transport = transport
        self.slot.close_connection = self.abort
        self._parser = httptools.HttpRequestParser(self)
        self._peer_address = get_peer_address(transport)
        # Jitter, or clients that connected at the same time would also reconnect at the same time.
        jitter = random.uniform(0.9, 1.1)  # noqa: S311 - spreads connections, guards nothing
        self._max_age_at = self._loop.time() + self._connections.max_age_s * jitter
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadlines, drop waiting requests, and report the disconnect to the request in progress."""
        del exc, self._parser  # breaks the reference cycle of the connection and its parser
        self.take_unparsed()
        self._connections.remove(self)
        self.slot.release()
        self._input = _Input.ENDED
        for waiting, _ in self._pipelined:
            waiting.discard_body()
        self._pipelined.clear()
        current, self._current, self._receiving = self._current, None, None
        if self._websocket is not None:
            self._websocket.on_connection_lost()
        if current is not None:
            current.on_disconnect()

    def data_received(self, data: bytes) -> None:
        """Parse a part of the request stream, unless it is a request with the head of the last one."""
        if len(data) > self.max_unpaced_bytes:
            self.pace_input(data)
            return
        if self._websocket is not None:
            self._websocket.on_data(data)
            return
        if self._input is _Input.ENDED:
            return
        if self._input is _Input.IDLE and self._current is None:
            known = self._head_cache.match(data)
            if known is not None:
                self._start_known_request(*known)
                return
        self._unbounded_bytes += len(data)
        while data:
            try:
                data = self._feed_parser(data)
            except httptools.HttpParserError as error:
                # The parser keeps an exception of a callback as the context of its own.
                cause = error.__context__
                reason = str(cause) if isinstance(cause, InvalidHeadError) else ""
                self._on_bad_protocol(data, reason)
                return
        if self._unbounded_bytes > MAX_HEAD_BYTES:
            self._on_bad_protocol(b"")
        # Most heads arrive at once and need no deadline. It must not start anew with each part.
        elif self._input is _Input.HEAD and self not in self._connections.header_deadlines:
            self._connections.header_deadlines.add(self)

    def eof_received(self) -> bool:
        """Keep the connection open for pending responses after the client has closed its sending side.

        Returns:
            True if the transport must stay open for writing.
        """
        last = self._last_request()
        if last is None or self._receiving is not None or self._websocket is not None:
            return False
        if not self.transport.can_write_eof():
            return False
        self._input = _Input.ENDED
        last.keep_alive = False
        self._connections.half_close_checks.add(self)
        return not is_peer_closed(self.transport)

    def pause_writing(self) -> None:
        """Report to the request in progress that the write buffer is full."""
        self.is_backpressured = True
        if self._current is not None:
            self._current.on_backpressure()

    def resume_writing(self) -> None:
        """Report to the request in progress that the write buffer has drained."""
        self.is_backpressured = False
        if self._websocket is not None:
            self._websocket.on_writable()
        if self._current is not None:
            self._current.on_writable()

    # --- httptools callbacks ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Start a request's head."""
        if self._input is _Input.IDLE:
            self._input = _Input.HEAD
            self._connections.idle_deadlines.remove(self)
            self._head.reset()

    def on_headers_complete(self) -> None:
        """Start the request, or queue it until the requests before it are answered."""
        head, parser = self._head, self._parser
        is_handshake = parser.should_upgrade() and head.is_websocket_handshake(parser)
        if self._input is not _Input.HEAD or (parser.should_upgrade() and not is_handshake):
            return  # `_feed_parser` repeats the head of an upgrade to another protocol, without the upgrade
        self._input = _Input.BODY
        self._connections.header_deadlines.remove(self)
        transport, request = self._build_request(head, parser)
        head.reset()  # trailers after the body are not part of the head and are ignored
        self._receiving = transport
        if is_handshake:
            request.open_websocket = partial(self._open_websocket, transport)
        if self._current is None:
            self._start_request(transport, request)
        else:
            self._queue_request(transport, request)

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body to its request."""
        self._unbounded_bytes = 0
        if self._receiving is not None:
            self._receiving.on_body(body)

    def on_message_complete(self) -> None:
        """Complete the request's body."""
        self._unbounded_bytes = 0
        transport, self._receiving = self._receiving, None
        if transport is not None:
            transport.on_body_complete()
            if self._input is _Input.BODY:
                self._input = _Input.IDLE if transport.keep_alive else _Input.ENDED

    # --- for the server --------------------------------------------------------------------------

    def close_gracefully(self) -> None:
        """Close with the last pending response whose head can still announce it.

        A client that gets no announcement may send another request.
        """
        last = self._last_request()
        if self._websocket is not None:
            self._websocket.close_when_idle()
        elif last is None:
            self._connections.start_drain_deadline(self)
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

    def on_header_timeout(self) -> None:
        """Abort the connection if the next request's headers take too long and no request is in progress."""
        if self._current is None:
            self.transport.abort()
        else:
            self._connections.header_deadlines.add(self)

    def on_idle_timeout(self) -> None:
        """Close the connection unless unread input is waiting or the client still reads the last response."""
        unsent = self.transport.get_write_buffer_size()
        if self._input is not _Input.ENDED and has_unread_data(self.transport):
            self._connections.idle_deadlines.add(self)
        elif not unsent:
            self.transport.close()
        elif unsent < self._last_unsent_bytes:
            self._last_unsent_bytes = unsent
            self._connections.idle_deadlines.add(self)
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
        self._connections.half_close_checks.add(self)

    # --- input -----------------------------------------------------------------------------------

    def _feed_parser(self, data: bytes) -> bytes:
        """Parse the data and return the part that is still to be parsed.

        Raises:
            HttpParserError: The data is not valid HTTP/1.
        """
        parser = self._parser
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            if self._input is _Input.ENDED:
                return b""
            # After an upgrade request the parser ignores the rest, so a new one goes on.
            self._parser = httptools.HttpRequestParser(self)
            rest = data[error.args[0] :]
            if self._input is not _Input.HEAD:  # the handshake of a WebSocket is complete
                return rest
            self._input = _Input.IDLE
            return self._head.render_without_upgrade(parser) + rest
        return b""

    def _build_request(
        self, head: RequestHead, parser: httptools.HttpRequestParser
    ) -> tuple[Http1Transport, HttpRequest]:
        """Return the request of a complete head, with its transport.

        Raises:
            InvalidHeadError: The head is invalid.
        """
        version = parser.get_http_version()
        head.check_complete(version)
        path, query = head.parse_url()
        method = parser.get_method().decode("ascii")
        is_http_1_0 = version == "1.0"
        keep_alive = parser.should_keep_alive() and not is_http_1_0
        if keep_alive:
            self._head_cache.learn(method, path, query, head.headers)
        transport = Http1Transport(
            self,
            self._on_response_complete,
            is_head_request=method == "HEAD",
            is_http_1_0=is_http_1_0,
            keep_alive=keep_alive and self._may_stay_open(),
            expects_continue=head.expects_continue,
        )
        return transport, HttpRequest(
            method, path, query, head.headers, self._peer_address, transport
        )

    def _may_stay_open(self) -> bool:
        """Return whether the connection may stay open after a request that arrives now."""
        return self._connections.drain_deadlines is None and self._loop.time() < self._max_age_at

    def _start_known_request(self, known: KnownHead, headers: Headers, body: bytes) -> None:
        """Start a complete request with the head of an earlier one."""
        keep_alive = self._may_stay_open()
        transport = Http1Transport(
            self,
            self._on_response_complete,
            is_head_request=known.method == "HEAD",
            keep_alive=keep_alive,
            expects_continue=False,
        )
        request = HttpRequest(
            known.method, known.path, known.query, headers, self._peer_address, transport
        )
        self._start_request(transport, request)
        transport.on_whole_body(body)
        if not keep_alive:
            self._input = _Input.ENDED

    def _on_bad_protocol(self, data: bytes, reason: str = "") -> None:
        """Reject input that is not HTTP/1, after the pending responses."""
        self._connections.header_deadlines.remove(self)
        if self._input is _Input.ENDED:
            return
        self._input = _Input.ENDED
        error = bad_protocol_error(data, reason)
        log.info("bad_protocol", address=self._peer_address, reason=error.message)
        if self._pipelined and self._pipelined[-1][0] is self._receiving:
            self._pipelined.pop()[0].discard_body()  # the rest of the body never arrives
        current = self._current
        if current is None or (current is self._receiving and not current.response_started):
            self._send_error_and_close(error)
        else:
            self._pending_error = error

    def _open_websocket(
        self,
        transport: Http1Transport,
        build_headers: Callable[[], Headers],
        max_message_bytes: int,
        message_timeout_s: float,
        tenant: str | None,
    ) -> WebSocket:
        """Switch to the WebSocket protocol with the response to the current request (see `WebSocketOpener`)."""
        if self._connections.drain_deadlines is not None:
            message = "The server is shutting down. Open the WebSocket on a new connection."
            raise ApiError(503, "draining", message, retry_after_s=1.0)
        if self._pipelined or self._input is not _Input.IDLE:
            message = "A WebSocket's client may send nothing before the handshake is answered."
            raise ApiError(400, "bad_http", message)
        transport.keep_alive = True  # however old the connection is
        transport.start_sized_response(101, build_headers())
        self._input = _Input.UPGRADED
        self.slice_bytes = WEBSOCKET_SLICE_BYTES
        self._websocket = WebSocket(
            self,
            transport,
            max_message_bytes=max_message_bytes,
            message_timeout_s=message_timeout_s,
            tenant=tenant,
        )
        return self._websocket

    # --- output ----------------------------------------------------------------------------------

    def _last_request(self) -> Http1Transport | None:
        """Return the request that is answered last."""
        return self._pipelined[-1][0] if self._pipelined else self._current

    def _start_request(self, transport: Http1Transport, request: HttpRequest) -> None:
        # Needed here too, since the request may have begun before the last response was complete.
        self._connections.end_idle(self)
        self._current, self._last_unsent_bytes = transport, math.inf
        self.slot.mark_busy()
        task = self._loop.create_task(transport.run(self._connections.handle_request, request))
        self.server_state.tasks.add(task)
        task.add_done_callback(self.server_state.tasks.discard)

    def _queue_request(self, transport: Http1Transport, request: HttpRequest) -> None:
        """Let the request wait for the one in progress, and read nothing more meanwhile."""
        self._pipelined.append((transport, request))
        header_count = sum(len(waiting.headers) for _, waiting in self._pipelined)
        if len(self._pipelined) >= MAX_PIPELINED_REQUESTS or header_count >= MAX_PIPELINED_HEADERS:
            self._has_excess_input = True
            transport.keep_alive = False
        self._holds_input = True
        self.pause_reading()

    def _on_response_complete(self, transport: Http1Transport) -> None:
        self._current = None
        if self.transport.is_closing():
            return
        if not self._pipelined:
            self.slot.mark_idle()
        if not transport.keep_alive:
            self._close_after_response(transport)
        elif self._pipelined:
            self._start_request(*self._pipelined.popleft())
            self._holds_input = bool(self._pipelined)
        elif self._pending_error is not None:
            self._send_error_and_close(self._pending_error)
        else:
            self._connections.start_idle(self)
        self.resume_reading()

    def _close_after_response(self, transport: Http1Transport) -> None:
        """Close after the client has read the response, since closing while it sends would discard the response."""
        is_delivered = transport.is_body_complete and not (
            self._has_excess_input or self.transport.get_write_buffer_size()
        )
        if is_delivered or not self.transport.can_write_eof():
            self.transport.close()
            return
        self._input = _Input.ENDED
        self.transport.write_eof()
        self._connections.start_idle(self)

    def _send_error_and_close(self, error: ApiError) -> None:
        self.transport.write(render_error_response(error))
        self.transport.close()
