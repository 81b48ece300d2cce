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
from argosy.http_server.error_responses import no_http, whole_answer
from argosy.http_server.http1_transport import RequestWire
from argosy.http_server.http_exchange import WIRE, App, Scope
from argosy.http_server.request_head import LIMIT_BYTES, Head, HeadTemplate, template_of
from argosy.http_server.server_state import State
from argosy.http_server.socket_state import has_left, has_sent
from argosy.protocol import ApiError

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.http_server")

MOST_DIFFER = 8
"""Of a client whose heads differ so often in a row no more are compared."""
MOST_WAITING = 100
"""Requests of a client that wait for answers to those before; the last of so many is the connection's last,"""
MOST_WAITING_HEADERS = 4096
"""or the one with which they have so many headers."""
MOST_UNREAD_BYTES = 1 << 30
"""Of all connections together; bodies that go on coming beyond that are refused."""


class Connection(asyncio.Protocol):
    """A client's connection, as its listener counts and ends it.

    Each request runs `app` in a task of its own, one at a time; the scope's `state` has its `RequestWire`.
    `heads` and `idle` end connections whose headers take too long, and those that nobody uses; `quiet` looks
    after those whose clients have said all.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        heads: Deadlines[Connection],
        idle: Deadlines[Connection],
        quiet: Deadlines[Connection],
        app: App,
        server: State,
    ) -> None:
        self._app = app
        self._loop = asyncio.get_running_loop()
        self._server = server
        self._heads, self._idle, self._quiet = heads, idle, quiet
        self._looked, self._ask_at = 0, 1
        """How often a client that sends no more was looked after, and when it is asked next."""
        self._unsent = math.inf
        """Bytes that waited to be sent when it was last looked whether they do."""
        self._head = Head()
        self.on_url, self.on_header = self._head.add_url, self._head.add_header
        self._begun = False
        """A head has begun and is not whole."""
        self._between = False
        """A request was whole, and nothing of another has come."""
        self._read: bytes | None = None
        """What is being parsed, where it begins with a head that others may be the same as."""
        self._template: HeadTemplate | None = None
        self._differ = 0
        """Heads since one was the same as the one before."""
        self._parser: httptools.HttpRequestParser
        """From when it is made until it is lost."""
        self.full = False
        self._held = False
        """Reading is paused."""
        self._deaf = False
        """What comes now is not read: the last request has come, or something that is none."""
        self._bad: ApiError | None = None
        """What came after the request that is being answered is no HTTP; its refusal."""
        self._more = False
        """The client goes on sending after its last request."""
        self._incoming: RequestWire | None = None
        self._current: RequestWire | None = None
        self._waiting: deque[tuple[RequestWire, Scope]] = deque()
        self._kept_until = math.inf
        self._overhead = 0
        """Bytes since the last piece of a body or the last whole request: the parser keeps a header until its end."""
        self._place: dict[str, Any] = {}

    # --- asyncio's -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        self.transport = transport
        self._parser = httptools.HttpRequestParser(self)
        peer = transport.get_extra_info("socket")
        if peer is not None and peer.family != socket.AF_UNIX:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # not every loop does
        self._server.add(self)
        self._place = {
            "server": get_local_addr(transport),
            "client": get_remote_addr(transport),
            "scheme": "https" if is_ssl(transport) else "http",
        }
        # Not all at once: those that came together would come together again.
        self._kept_until = self._loop.time() + self._server.age_s * random.uniform(0.9, 1.1)  # noqa: S311
        self._heads.add(self)
        self._wait_to_leave()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        del exc, self._parser  # which has methods of ours: the two would keep each other
        self._server.remove(self)
        self._heads.remove(self)
        self._idle.remove(self)
        self._quiet.remove(self)
        if self._server.leaving is not None:
            self._server.leaving.remove(self)
        self._deaf = True
        for wire, _ in self._waiting:
            wire.forget()
        self._waiting.clear()
        current, self._current, self._incoming = self._current, None, None
        if current is not None:
            current.client_gone()

    def data_received(self, data: bytes) -> None:
        """Bytes of requests."""
        if self._deaf:
            return
        if self._between and self._current is None:
            known = None if self._template is None else self._template.read(data)
            if known is not None:
                self._differ = 0
                self._go_on(*known)
                return
            if self._differ < MOST_DIFFER:
                self._differ += 1
                self._read = data
        self._overhead += len(data)
        while data:
            try:
                data = self._feed(data)
            except httptools.HttpParserError:
                self._no_http(data)
                return
        if self._overhead > LIMIT_BYTES:
            self._no_http(b"")
        elif self._begun:  # most are whole at once, and need not be timed
            self._begun = False
            self._heads.add(self)

    def eof_received(self) -> bool:
        """The client will send no more: it has left, unless it waits for the answers that are due."""
        last = self._waiting[-1][0] if self._waiting else self._current
        if last is None or self._incoming is not None or not self.transport.can_write_eof():
            return False
        self._deaf = True
        last.keep_alive = False
        self._quiet.add(self)
        return not has_left(self.transport)

    def pause_writing(self) -> None:
        """What was sent piles up."""
        self.full = True
        if self._current is not None:
            self._current.client_full()

    def resume_writing(self) -> None:
        """It no longer does."""
        self.full = False
        if self._current is not None:
            self._current.client_has_room()

    # --- the parser's ----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        if self._deaf:
            return
        self._begun, self._between = True, False
        self._idle.remove(self)
        self._head.begin()

    def on_headers_complete(self) -> None:
        """All headers came: the request can be answered, or waits until those before it are."""
        if self._deaf or self._parser.should_upgrade():
            return
        self._begun = False
        self._heads.remove(self)
        head, parser = self._head, self._parser
        scope, expects = head.scope(parser, self._place), head.expects
        head.begin()  # what may come behind the body is not of it, and nobody is told
        keep_alive = scope["http_version"] != "1.0" and parser.should_keep_alive()
        read, self._read = self._read, None
        if read is not None and keep_alive:
            self._template = template_of(read, scope)
        wire = self._incoming = self._wire(scope, keep_alive=keep_alive, expects_continue=expects)
        if self._current is None:
            self._start(wire, scope)
        else:
            self._waiting.append((wire, scope))
            headers = sum(len(each["headers"]) for _, each in self._waiting)
            if len(self._waiting) >= MOST_WAITING or headers >= MOST_WAITING_HEADERS:
                self._more, wire.keep_alive = True, False
            self.hold()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._overhead = 0
        if self._incoming is not None:
            self._incoming.came(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._overhead = 0
        self._between = True
        wire, self._incoming = self._incoming, None
        if wire is not None:
            self._all_came(wire)

    # --- the listener's ----------------------------------------------------------------------------

    def retire(self) -> None:
        """End with the last answer that is due, if its head can still say so: after another the client may ask more."""
        last = self._waiting[-1][0] if self._waiting else self._current
        if last is None:
            self._wait_to_leave()
        elif not last.started:
            last.keep_alive = False

    def shutdown(self) -> None:
        """Close, once what is being answered is."""
        if self._current is None:
            self.transport.close()
        else:
            self._current.keep_alive = False

    # --- the request's ---------------------------------------------------------------------------

    @property
    def fixed_headers(self) -> Iterable[tuple[bytes, bytes]]:
        """See `Owner`."""
        return self._server.default_headers

    def keep(self, count: int) -> bool:
        """See `Owner`."""
        self._server.unread += count
        return self._server.unread <= MOST_UNREAD_BYTES

    def hold(self) -> None:
        """See `Owner`."""
        if not self._held and not self.transport.is_closing():
            self._held = True
            self.transport.pause_reading()

    def read_on(self) -> None:
        """See `Owner`."""
        if self._held and not self._waiting and not self.transport.is_closing():
            self._held = False
            self.transport.resume_reading()

    def answered(self, wire: RequestWire) -> None:
        """See `Owner`."""
        self._server.total_requests += 1
        self._current = None
        if self.transport.is_closing():
            return
        if not wire.keep_alive:
            self._part(wire)
        elif self._waiting:
            self._start(*self._waiting.popleft())
        elif self._bad is not None:
            self._refuse(self._bad)
        else:
            self._idle.add(self)
            self._wait_to_leave()
        self.read_on()

    def drop(self) -> None:
        """Close with a reset, so that the kernel keeps nothing for it either.

        `transport.close()` would first wait for a client that reads nothing.
        """
        peer = self.transport.get_extra_info("socket")
        if peer is not None and not self.transport.is_closing():
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def late(self) -> None:
        """The next request's headers take too long."""
        if self._current is None:
            self.transport.abort()
        else:
            self._heads.add(self)

    def leave(self) -> None:
        """Nobody uses it, unless the client is still taking the last answer, or has sent what is not read yet."""
        unsent = self.transport.get_write_buffer_size()
        if not self._deaf and has_sent(self.transport):
            self._idle.add(self)
        elif not unsent:
            self.transport.close()
        elif unsent < self._unsent:
            self._unsent = unsent
            self._idle.add(self)
        else:
            self.drop()

    def look_after(self) -> None:
        """Its client has said all: is it there? It is asked ever more rarely."""
        if self._current is None:
            return
        if has_left(self.transport):
            self.transport.abort()
            return
        self._looked += 1
        if self._looked == self._ask_at:
            self._ask_at *= 4
            self._current.client_quiet()
        self._quiet.add(self)

    # --- within ----------------------------------------------------------------------------------

    def _feed(self, data: bytes) -> bytes:
        """Parse; what is still to be parsed. Raises HttpParserError."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            if self._deaf:
                return b""
            # The parser leaves the body to what was asked for instead of HTTP: it gets a head without that.
            head, self._parser = self._head.plain(self._parser), httptools.HttpRequestParser(self)
            return head + data[error.args[0] :]
        return b""

    def _go_on(self, scope: Scope, body: bytes) -> None:
        """A request came as a whole, whose head need not be parsed."""
        wire = self._wire(scope, keep_alive=True, expects_continue=False)
        self._start(wire, scope)
        wire.came(body)
        self._all_came(wire)

    def _wire(self, scope: Scope, *, keep_alive: bool, expects_continue: bool) -> RequestWire:
        leaves = self._server.leaving is not None or self._loop.time() >= self._kept_until
        wire = RequestWire(
            self, scope, keep_alive=keep_alive and not leaves, expects_continue=expects_continue
        )
        scope["state"] = {WIRE: wire}
        return wire

    def _all_came(self, wire: RequestWire) -> None:
        wire.all_came()
        self._deaf = self._deaf or not wire.keep_alive

    def _start(self, wire: RequestWire, scope: Scope) -> None:
        self._idle.remove(self)  # also where it began to come before the last answer was whole
        if self._server.leaving is not None:
            self._server.leaving.remove(self)
        self._current, self._unsent = wire, math.inf
        task = self._loop.create_task(wire.run(self._app, scope))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    def _part(self, wire: RequestWire) -> None:
        """Close, once the client has what it was sent: to close while it sends would take that from it."""
        transport = self.transport
        taken = wire.whole and not (self._more or transport.get_write_buffer_size())
        if taken or not transport.can_write_eof():
            transport.close()
            return
        self._deaf = True
        transport.write_eof()
        self._idle.add(self)
        self._wait_to_leave()

    def _wait_to_leave(self) -> None:
        """Nothing is being answered: where the server leaves, it ends unless a request comes."""
        if self._server.leaving is not None:
            self._server.leaving.add(self)

    def _no_http(self, came: bytes) -> None:
        """What came is no HTTP: say so, after the answers that are due."""
        self._heads.remove(self)
        if self._deaf:
            return
        self._deaf = True
        error = no_http(came)
        address, _ = self._place["client"] or (None, None)
        log.info("no_http", address=address, why=error.message)
        current = self._current
        if current is None or (current is self._incoming and not current.started):
            self._refuse(error)
        else:
            self._bad = error

    def _refuse(self, error: ApiError) -> None:
        self.transport.write(whole_answer(error))
        self.transport.close()
