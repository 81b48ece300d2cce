"""uvicorn's HTTP/1.1 connection, hardened: it can be cut, and headers are bounded in size and time."""

from __future__ import annotations

import asyncio
import socket
import struct

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from argosy.web.exchange import WIRE, Watcher

HEADER_LIMIT_BYTES = 64 * 1024
"""Most bytes of request line and headers together."""
HEADER_TIMEOUT_S = 30.0
"""A connection whose request line and headers take longer is dropped."""


class RequestWire:
    """The `Wire` of one request: the next one may already wait on the same connection.

    `push` writes past uvicorn's request cycle, which costs a task's wake-up for each piece; head and end
    of a stream go through it as ever.
    """

    __slots__ = ("_connection", "_cycle")

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle

    def cut(self) -> None:
        """See `Wire`."""
        self._connection.drop()

    def push(self, data: bytes) -> None:
        """See `Wire`."""
        transport = self._connection.transport
        if transport.is_closing():
            return
        if self._cycle.chunked_encoding:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        transport.write(data)

    def unframe(self) -> None:
        """See `Wire`."""
        self._cycle.chunked_encoding = False

    def watch(self, watcher: Watcher | None) -> None:
        """See `Wire`."""
        self._connection.watcher = watcher
        if watcher is not None and self._connection.transport.is_closing():
            watcher.on_gone()


class Connection(HttpToolsProtocol):
    """A client's connection. The scope's `state` has its request's `RequestWire`."""

    watcher: Watcher | None = None
    _header_bytes = 0
    _alarm: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        super().connection_made(transport)
        peer = transport.get_extra_info("socket")
        if peer is not None and peer.family != socket.AF_UNIX:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # not every loop does
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._disarm()
        super().connection_lost(exc)
        if self.watcher is not None:
            self.watcher.on_gone()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._header_bytes = 0
        self._arm()

    def on_url(self, url: bytes) -> None:
        """A part of the request line came."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header came."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """All headers came."""
        self._disarm()
        super().on_headers_complete()
        self.scope["state"][WIRE] = RequestWire(self, self.cycle)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in the shape of every other refusal."""
        detail = {
            "message": msg,
            "type": "invalid_request_error",
            "param": None,
            "code": "bad_http",
        }
        body = msgspec.json.encode({"error": detail, "request_id": ""})
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def pause_writing(self) -> None:
        """What was sent piles up."""
        super().pause_writing()
        if self.watcher is not None:
            self.watcher.on_full()

    def resume_writing(self) -> None:
        """It no longer does."""
        super().resume_writing()
        if self.watcher is not None:
            self.watcher.on_room()

    def drop(self) -> None:
        """Close with a reset, so that the kernel keeps nothing for it either.

        `transport.close()` would first wait for a client that reads nothing.
        """
        peer = self.transport.get_extra_info("socket")
        if peer is not None and not self.transport.is_closing():
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > HEADER_LIMIT_BYTES:
            raise ValueError("the request's headers are too large")

    def _arm(self) -> None:
        self._disarm()
        self._alarm = self.loop.call_later(HEADER_TIMEOUT_S, self.transport.abort)

    def _disarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
