"""An HTTP/1.1 connection of a client: parsed with httptools, answered in order, bounded in size and time."""

from __future__ import annotations

import asyncio
import math
import random
import socket
import struct
from collections import deque
from collections.abc import Iterable
from typing import Any

import httptools
import structlog
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl

from argosy.http_server.deadlines import Deadlines
from argosy.http_server.error_responses import bad_protocol, render_bad_request
from argosy.http_server.http1_transport import Http1Transport
from argosy.http_server.http_exchange import TRANSPORT_KEY, AsgiApp, Scope
from argosy.http_server.request_head import (
    MAX_HEAD_BYTES,
    HeadTemplate,
    RequestHead,
    build_head_template,
)
from argosy.http_server.server_state import HttpServerState
from argosy.http_server.socket_state import has_unread_data, is_peer_closed
from argosy.protocol import ApiError

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.http_server")

MAX_TEMPLATE_MISSES = 8
"""Of a client whose heads differ so often in a row no more are compared."""
MAX_PIPELINED_REQUESTS = 100
"""Requests of a client that wait for answers to those before; the last of so many is the connection's last,"""
MAX_PIPELINED_HEADERS = 4096
"""or the one with which they have so many headers."""
MAX_UNREAD_BODY_BYTES = 1 << 30
"""Of all connections together; bodies that go on coming beyond that are refused."""


class HttpConnection(asyncio.Protocol):
    """A client's connection, as its listener counts and ends it.

    Each request runs `app` in a task of its own, one at a time; the scope's `state` has its `RequestWire`.
    `heads` and `idle` end connections whose headers take too long, and those that nobody uses; `quiet` looks
    after those whose clients have said all.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        header_deadlines: Deadlines[HttpConnection],
        idle_deadlines: Deadlines[HttpConnection],
        half_close_checks: Deadlines[HttpConnection],
        app: AsgiApp,
        server_state: HttpServerState,
    ) -> None:
        self._app = app
        self._loop = asyncio.get_running_loop()
        self._server_state = server_state
        self._header_deadlines, self._idle_deadlines, self._half_close_checks = (
            header_deadlines,
            idle_deadlines,
            half_close_checks,
        )
        self._half_close_check_count, self._next_probe_count = 0, 1
        """How often a client that sends no more was looked after, and when it is asked next."""
        self._last_unsent_bytes = math.inf
        """Bytes that waited to be sent when it was last looked whether they do."""
        self._head = RequestHead()
        self.on_url, self.on_header = self._head.add_url, self._head.add_header
        self._head_incomplete = False
        """A head has begun and is not whole."""
        self._between_requests = False
        """A request was whole, and nothing of another has come."""
        self._template_source: bytes | None = None
        """What is being parsed, where it begins with a head that others may be the same as."""
        self._head_template: HeadTemplate | None = None
        self._template_misses = 0
        """Heads since one was the same as the one before."""
        self._parser: httptools.HttpRequestParser
        """From when it is made until it is lost."""
        self.is_backpressured = False
        self._reading_paused = False
        """Reading is paused."""
        self._input_ignored = False
        """What comes now is not read: the last request has come, or something that is none."""
        self._pending_error: ApiError | None = None
        """What came after the request that is being answered is no HTTP; its refusal."""
        self._has_excess_input = False
        """The client goes on sending after its last request."""
        self._receiving: Http1Transport | None = None
        self._current: Http1Transport | None = None
        self._pipelined: deque[tuple[Http1Transport, Scope]] = deque()
        self._max_age_at = math.inf
        self._unbounded_bytes = 0
        """Bytes since the last piece of a body or the last whole request: the parser keeps a header until its end."""
        self._connection_scope: dict[str, Any] = {}

    # --- asyncio's -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        self.transport = transport
        self._parser = httptools.HttpRequestParser(self)
        peer = transport.get_extra_info("socket")
        if peer is not None and peer.family != socket.AF_UNIX:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # not every loop does
        self._server_state.add_connection(self)
        self._connection_scope = {
            "server": get_local_addr(transport),
            "client": get_remote_addr(transport),
            "scheme": "https" if is_ssl(transport) else "http",
        }
        # Not all at once: those that came together would come together again.
        jitter = random.uniform(0.9, 1.1)  # noqa: S311 - spreads connections, guards nothing
        self._max_age_at = self._loop.time() + self._server_state.max_connection_age_s * jitter
        self._header_deadlines.add(self)
        self._start_drain_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        del exc, self._parser  # which has methods of ours: the two would keep each other
        self._server_state.remove_connection(self)
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
        if current is not None:
            current.on_disconnect()

    def data_received(self, data: bytes) -> None:
        """Bytes of requests."""
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
            except httptools.HttpParserError:
                self._on_bad_protocol(data)
                return
        if self._unbounded_bytes > MAX_HEAD_BYTES:
            self._on_bad_protocol(b"")
        elif self._head_incomplete:  # most are whole at once, and need not be timed
            self._head_incomplete = False
            self._header_deadlines.add(self)

    def eof_received(self) -> bool:
        """The client will send no more: it has left, unless it waits for the answers that are due."""
        last = self._pipelined[-1][0] if self._pipelined else self._current
        if last is None or self._receiving is not None or not self.transport.can_write_eof():
            return False
        self._input_ignored = True
        last.keep_alive = False
        self._half_close_checks.add(self)
        return not is_peer_closed(self.transport)

    def pause_writing(self) -> None:
        """What was sent piles up."""
        self.is_backpressured = True
        if self._current is not None:
            self._current.on_backpressure()

    def resume_writing(self) -> None:
        """It no longer does."""
        self.is_backpressured = False
        if self._current is not None:
            self._current.on_writable()

    # --- the parser's ----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        if self._input_ignored:
            return
        self._head_incomplete, self._between_requests = True, False
        self._idle_deadlines.remove(self)
        self._head.reset()

    def on_headers_complete(self) -> None:
        """All headers came: the request can be answered, or waits until those before it are."""
        if self._input_ignored or self._parser.should_upgrade():
            return
        self._head_incomplete = False
        self._header_deadlines.remove(self)
        head, parser = self._head, self._parser
        scope, expects = head.build_scope(parser, self._connection_scope), head.expects_continue
        head.reset()  # what may come behind the body is not of it, and nobody is told
        keep_alive = scope["http_version"] != "1.0" and parser.should_keep_alive()
        read, self._template_source = self._template_source, None
        if read is not None and keep_alive:
            self._head_template = build_head_template(read, scope)
        wire = self._receiving = self._create_transport(
            scope, keep_alive=keep_alive, expects_continue=expects
        )
        if self._current is None:
            self._start_request(wire, scope)
        else:
            self._pipelined.append((wire, scope))
            headers = sum(len(each["headers"]) for _, each in self._pipelined)
            if len(self._pipelined) >= MAX_PIPELINED_REQUESTS or headers >= MAX_PIPELINED_HEADERS:
                self._has_excess_input, wire.keep_alive = True, False
            self.pause_reading()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._unbounded_bytes = 0
        if self._receiving is not None:
            self._receiving.on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._unbounded_bytes = 0
        self._between_requests = True
        wire, self._receiving = self._receiving, None
        if wire is not None:
            self._on_body_complete(wire)

    # --- the listener's ----------------------------------------------------------------------------

    def close_gracefully(self) -> None:
        """End with the last answer that is due, if its head can still say so: after another the client may ask more."""
        last = self._pipelined[-1][0] if self._pipelined else self._current
        if last is None:
            self._start_drain_deadline()
        elif not last.response_started:
            last.keep_alive = False

    def shutdown(self) -> None:
        """Close, once what is being answered is."""
        if self._current is None:
            self.transport.close()
        else:
            self._current.keep_alive = False

    # --- the request's ---------------------------------------------------------------------------

    @property
    def default_headers(self) -> Iterable[tuple[bytes, bytes]]:
        """See `Owner`."""
        return self._server_state.default_headers

    def add_unread_bytes(self, byte_count: int) -> bool:
        """See `Owner`."""
        self._server_state.unread_body_bytes += byte_count
        return self._server_state.unread_body_bytes <= MAX_UNREAD_BODY_BYTES

    def pause_reading(self) -> None:
        """See `Owner`."""
        if not self._reading_paused and not self.transport.is_closing():
            self._reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """See `Owner`."""
        if self._reading_paused and not self._pipelined and not self.transport.is_closing():
            self._reading_paused = False
            self.transport.resume_reading()

    def on_response_complete(self, transport: Http1Transport) -> None:
        """See `Owner`."""
        self._server_state.total_requests += 1
        self._current = None
        if self.transport.is_closing():
            return
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

    def abort(self) -> None:
        """Close with a reset, so that the kernel keeps nothing for it either.

        `transport.close()` would first wait for a client that reads nothing.
        """
        peer = self.transport.get_extra_info("socket")
        if peer is not None and not self.transport.is_closing():
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def on_header_timeout(self) -> None:
        """The next request's headers take too long."""
        if self._current is None:
            self.transport.abort()
        else:
            self._header_deadlines.add(self)

    def on_idle_timeout(self) -> None:
        """Nobody uses it, unless the client is still taking the last answer, or has sent what is not read yet."""
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
        """Its client has said all: is it there? It is asked ever more rarely."""
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

    # --- within ----------------------------------------------------------------------------------

    def _feed_parser(self, data: bytes) -> bytes:
        """Parse; what is still to be parsed. Raises HttpParserError."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            if self._input_ignored:
                return b""
            # The parser leaves the body to what was asked for instead of HTTP: it gets a head without that.
            head, self._parser = (
                self._head.render_without_upgrade(self._parser),
                httptools.HttpRequestParser(self),
            )
            return head + data[error.args[0] :]
        return b""

    def _start_templated_request(self, scope: Scope, body: bytes) -> None:
        """A request came as a whole, whose head need not be parsed."""
        wire = self._create_transport(scope, keep_alive=True, expects_continue=False)
        self._start_request(wire, scope)
        wire.on_body(body)
        self._on_body_complete(wire)

    def _create_transport(
        self, scope: Scope, *, keep_alive: bool, expects_continue: bool
    ) -> Http1Transport:
        leaves = (
            self._server_state.drain_deadlines is not None or self._loop.time() >= self._max_age_at
        )
        wire = Http1Transport(
            self, scope, keep_alive=keep_alive and not leaves, expects_continue=expects_continue
        )
        scope["state"] = {TRANSPORT_KEY: wire}
        return wire

    def _on_body_complete(self, wire: Http1Transport) -> None:
        wire.on_body_complete()
        self._input_ignored = self._input_ignored or not wire.keep_alive

    def _start_request(self, wire: Http1Transport, scope: Scope) -> None:
        self._idle_deadlines.remove(
            self
        )  # also where it began to come before the last answer was whole
        if self._server_state.drain_deadlines is not None:
            self._server_state.drain_deadlines.remove(self)
        self._current, self._last_unsent_bytes = wire, math.inf
        task = self._loop.create_task(wire.run(self._app, scope))
        self._server_state.tasks.add(task)
        task.add_done_callback(self._server_state.tasks.discard)

    def _close_after_response(self, wire: Http1Transport) -> None:
        """Close, once the client has what it was sent: to close while it sends would take that from it."""
        transport = self.transport
        taken = wire.is_body_complete and not (
            self._has_excess_input or transport.get_write_buffer_size()
        )
        if taken or not transport.can_write_eof():
            transport.close()
            return
        self._input_ignored = True
        transport.write_eof()
        self._idle_deadlines.add(self)
        self._start_drain_deadline()

    def _start_drain_deadline(self) -> None:
        """Nothing is being answered: where the server leaves, it ends unless a request comes."""
        if self._server_state.drain_deadlines is not None:
            self._server_state.drain_deadlines.add(self)

    def _on_bad_protocol(self, data: bytes) -> None:
        """What came is no HTTP: say so, after the answers that are due."""
        self._header_deadlines.remove(self)
        if self._input_ignored:
            return
        self._input_ignored = True
        error = bad_protocol(data)
        address, _ = self._connection_scope["client"] or (None, None)
        log.info("bad_protocol", address=address, why=error.message)
        current = self._current
        if current is None or (current is self._receiving and not current.response_started):
            self._send_error_and_close(error)
        else:
            self._pending_error = error

    def _send_error_and_close(self, error: ApiError) -> None:
        self.transport.write(render_bad_request(error))
        self.transport.close()
