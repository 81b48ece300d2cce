"""One request on its connection: what came of its body, what is sent of its answer, and the same as ASGI."""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Iterable, MutableMapping
from typing import Any, Protocol, cast

from argosy.http_server.http_exchange import App, DisconnectedError, Scope, Watcher
from argosy.protocol import ApiError

UNREAD_BYTES = 64 * 1024
"""Most of a body that is taken in before somebody reads it."""
HELD_BYTES = 16 * 1024
"""Of what is sent in one turn of the loop, what waits for its end."""

_LINES = {int(s): f"HTTP/1.1 {s} {s.phrase}\r\n".encode() for s in http.HTTPStatus}
_BODILESS = frozenset({204, 304})
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
OPENING = b"HTTP/1.1 "
"""What all answers begin with."""

log = logging.getLogger("argosy.http_server")


class Owner(Protocol):
    """The connection that a request came by."""

    transport: asyncio.Transport
    full: bool
    """The client is behind with what was sent to it."""

    @property
    def fixed_headers(self) -> Iterable[tuple[bytes, bytes]]:
        """Headers of every answer."""

    def keep(self, count: int) -> bool:
        """So many more bytes of bodies are kept, or fewer; whether there is room for what all connections keep."""

    def hold(self) -> None:
        """Read nothing more for now."""

    def read_on(self) -> None:
        """Read on."""

    def answered(self, wire: RequestWire) -> None:
        """The answer is whole."""

    def drop(self) -> None:
        """Close at once, whatever waits to be sent."""


class RequestWire:
    """The `Wire` of one request. What it is sent after the client has gone is lost without an error."""

    __slots__ = (
        "_body",
        "_changed",
        "_chunked",
        "_connection",
        "_crowded",
        "_expects",
        "_handed",
        "_held",
        "_loop",
        "_most",
        "_opened",
        "_silent",
        "_size",
        "_transport",
        "_version",
        "_watcher",
        "ended",
        "gone",
        "keep_alive",
        "started",
        "whole",
    )

    def __init__(
        self, connection: Owner, scope: Scope, *, keep_alive: bool, expects_continue: bool
    ) -> None:
        self.keep_alive = keep_alive
        self.whole = False
        """All of the body came."""
        self.started = self.ended = False
        """Something of the answer was sent; all of it."""
        self.gone = False
        """The connection is closed."""
        self._connection = connection
        self._transport = connection.transport
        self._silent = scope["method"] == "HEAD"
        self._version: str = scope["http_version"]
        self._chunked = False
        self._opened = 0
        """Bytes of the opening that were sent ahead of the answer."""
        self._expects = expects_continue and self._version != "1.0"
        self._body = bytearray()
        self._size = 0
        self._crowded = False
        """There was no room for what came, and it is more than what is taken in of any."""
        self._most = UNREAD_BYTES
        self._handed = False
        """The end of the body was given to an ASGI application."""
        self._watcher: Watcher | None = None
        self._changed: asyncio.Event | None = None
        self._loop = asyncio.get_running_loop()
        self._held = b""
        """What is sent in this turn of the loop."""

    # --- for `Exchange` --------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """See `Wire`."""
        return self._connection.full

    @property
    def unsent(self) -> int:
        """See `Wire`."""
        return len(self._held) + self._transport.get_write_buffer_size()

    async def body(self, limit: int) -> bytes:
        """See `Wire`."""
        self._most = limit
        while not self.whole and self._size <= limit:
            if self.gone:
                raise DisconnectedError
            if self._crowded:
                message = "Too much is being sent at a time. Try again shortly."
                raise ApiError(503, "overloaded", message, retry_after_s=1.0)
            await self._news()
        return self._take()

    async def room(self) -> None:
        """See `Wire`."""
        while self._connection.full and not self.gone:
            await self._news()

    def answer(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """See `Wire`."""
        self._held += self._head(status, headers) + (b"" if self._silent else body)
        self._end()

    def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """See `Wire`."""
        self._chunked = self._version != "1.0"
        if self._chunked:
            headers = [*headers, (b"transfer-encoding", b"chunked")]
        self._write(self._head(status, headers))

    def begin_sized(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """See `Wire`."""
        self._write(self._head(status, headers))

    def push(self, data: bytes) -> None:
        """See `Wire`."""
        if data and not self._silent:
            self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def lend(self) -> int | None:
        """See `Wire`."""
        transport = self._transport
        if self._silent or self._held or not self._chunked or transport.is_closing():
            return None
        if transport.get_write_buffer_size() or transport.get_extra_info("ssl_object") is not None:
            return None
        return cast("int", transport.get_extra_info("socket").fileno())

    def pass_on(self, chunks: bytes) -> None:
        """See `Wire`."""
        self._write(chunks)

    def end(self) -> None:
        """See `Wire`."""
        if self._chunked and not self._silent:
            self._held += b"0\r\n\r\n"
        self._end()

    def cut(self) -> None:
        """See `Wire`."""
        self._connection.drop()

    def watch(self, watcher: Watcher | None) -> None:
        """See `Wire`."""
        self._watcher = watcher
        if watcher is not None and self.gone:
            asyncio.get_running_loop().call_soon(watcher.on_gone)

    # --- for its connection ----------------------------------------------------------------------

    def came(self, body: bytes) -> None:
        """A piece of the body."""
        if self.ended:  # nobody wants it any more
            return
        self._body += body
        self._size += len(body)
        there_is_room = self._connection.keep(len(body))
        self._crowded = not there_is_room and self._size > UNREAD_BYTES
        if self._size > self._most:
            self._connection.hold()
        self._wake()

    def all_came(self) -> None:
        """That was all of it: what comes now may be that the client leaves."""
        self.whole = True
        self._connection.read_on()
        self._wake()

    def forget(self) -> None:
        """Nobody wants what came."""
        self._take()

    def client_full(self) -> None:
        """What was sent piles up."""
        if self._watcher is not None:
            self._watcher.on_full()

    def client_has_room(self) -> None:
        """It no longer does."""
        self._wake()
        if self._watcher is not None:
            self._watcher.on_room()

    def client_quiet(self) -> None:
        """The client will send no more: what it is sent comes back if it has gone."""
        if self.started:
            if self._watcher is not None:
                self._watcher.on_quiet()
        elif self._version != "1.0":
            self._write(CONTINUE)
        elif self._opened < len(OPENING):  # it knows no interim answers: it gets its own by bytes
            self._write(OPENING[self._opened : self._opened + 1])
            self._opened += 1

    def client_gone(self) -> None:
        """The connection was lost."""
        self.gone = True
        self._wake()
        if self._watcher is not None and not self.ended:
            self._watcher.on_gone()

    async def run(self, app: App, scope: Scope) -> None:
        """Let `app` answer; what it leaves open is closed."""
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            log.exception("the application failed")
        finally:
            self.forget()
            if not (self.ended or self.gone):
                if self.started:
                    self._connection.drop()
                else:
                    self.answer(500, [(b"content-length", b"0")], b"")

    # --- ASGI ------------------------------------------------------------------------------------

    async def receive(self) -> MutableMapping[str, Any]:
        """A part of the body; after its end, that the client has gone or the answer is whole."""
        while not (self.ended or self.gone or (not self._handed and (self.whole or self._body))):
            await self._news()
        if self.ended or self.gone:
            return {"type": "http.disconnect"}
        body = self._take()
        self._size = 0
        self._handed = self.whole
        return {"type": "http.request", "body": body, "more_body": not self.whole}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """A part of the answer, once the client has taken what was sent before."""
        await self.room()
        if self.gone:
            return
        if message["type"] == "http.response.start":
            self._begin_as_told(message["status"], list(message.get("headers", ())))
            return
        self.push(message.get("body", b""))
        if not message.get("more_body", False):
            self.end()

    def _begin_as_told(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        names = {name.lower(): value for name, value in headers}
        if b"close" in names.get(b"connection", b"").lower():
            self.keep_alive = False
        if b"content-length" in names or status in _BODILESS:
            self.begin_sized(status, headers)
        else:
            self.begin(status, headers)

    # --- within ----------------------------------------------------------------------------------

    def _head(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        self.started = True
        if self._expects and not self.whole:  # its body was not called for, and may never come
            self.keep_alive = False
        every = [*self._connection.fixed_headers, *headers]
        if not self.keep_alive:
            every.append((b"connection", b"close"))
        lines = b"\r\n".join(map(b": ".join, every))
        if lines.count(b"\n") >= len(every) or lines.count(b"\r") >= len(every):
            raise ValueError("a header holds a line break")
        line = _LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        return line[self._opened :] + lines + b"\r\n\r\n"

    def _write(self, data: bytes) -> None:
        """Send it with what else is sent in this turn: each write is a system call, and wakes the client."""
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held += data
        if len(self._held) > HELD_BYTES:
            self._flush()

    def _flush(self) -> None:
        held, self._held = self._held, b""
        if held and not self._transport.is_closing():
            self._transport.write(held)

    def _end(self) -> None:
        self._flush()
        self.ended = True
        self._wake()
        self._connection.answered(self)

    def _take(self) -> bytes:
        body = bytes(self._body)
        self._body.clear()
        self._connection.keep(-len(body))
        return body

    async def _news(self) -> None:
        """Wait for anything to change, reading on meanwhile."""
        if self._expects and not self.started:
            self._expects = False
            self._write(CONTINUE)
        self._connection.read_on()
        if self._changed is None:
            self._changed = asyncio.Event()
        self._changed.clear()
        await self._changed.wait()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
