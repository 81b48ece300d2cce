"""The measuring client: HTTP/1.1 on raw asyncio with httptools, a stamp for every read.

A connection carries one request at a time and is kept for the next; nothing limits their number, so
the client never queues what the plan wants sent. The stamp is taken when the bytes are handed over by the
event loop, before anything is parsed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import httptools

from argosy.bench.response import Reply
from argosy.protocol import Endpoint

Clock = Callable[[], float]


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._reply: Reply | None = None
        self._done: asyncio.Future[None] | None = None
        self.used = 0
        """Answers that came whole."""
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    async def ask(self, request: bytes, reply: Reply) -> None:
        """Send `request` and return when `reply` has ended, well or not. Cancelling closes the connection."""
        self._reply = reply
        self._done = asyncio.get_running_loop().create_future()
        if self._transport is not None:
            self._transport.write(request)
        try:
            await self._done
        except asyncio.CancelledError:
            self.abort()
            raise

    def abort(self) -> None:
        """Close at once."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Bytes came: stamp, then parse."""
        now = self._clock()
        if self._reply is None:  # nobody asked
            self.abort()
            return
        self._reply.now = now
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._reply is not None:  # else the answer is whole, and this came after it
                self._reply.fail("malformed", f"The answer is not HTTP: {error}")
            self.abort()
            self._end()

    def eof_received(self) -> None:
        """The server will send no more."""
        self.closed = True

    def connection_lost(self, exc: Exception | None) -> None:
        """An answer that has not ended was cut."""
        self.closed = True
        if self._reply is not None:
            self._reply.now = self._clock()
            if not (exc is None and self._reply.whole_at_eof):
                self._reply.fail("cut", "The server closed the connection before the end.")
            self._end()

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: ARG002 - the parser's face
        """Remember what says where a body ends."""
        if self._reply is not None and name.lower() in {b"content-length", b"transfer-encoding"}:
            self._reply.has_length = True

    def on_headers_complete(self) -> None:
        """The status is known."""
        if self._reply is not None:
            self._reply.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if self._reply is not None:
            self._reply.feed(body)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        if self._reply is not None and self._reply.status >= 200:
            self.used += 1
            if not self._parser.should_keep_alive():
                self.closed = True
            self._end()

    def _end(self) -> None:
        if self._reply is not None:
            self._reply.end()
        self._reply = None
        self._parser = httptools.HttpResponseParser(self)
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class Client:
    """All connections to one server."""

    def __init__(
        self, address: Endpoint, clock: Clock, headers: Mapping[str, str], timeout_s: float
    ) -> None:
        self._address = address
        self._clock = clock
        self._timeout_s = timeout_s
        self._headers = {"host": address.authority, "user-agent": "argosy-bench", **headers}
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if address.tls else None

    async def post(self, path: str, body: bytes, reply: Reply, request_id: str = "") -> Reply:
        """POST JSON. Whatever happens is in the reply; only a cancellation raises."""
        headers = {"x-request-id": request_id} if request_id else {}
        return await self._exchange("POST", path, body, reply, headers)

    async def get(self, path: str, reply: Reply) -> Reply:
        """GET. As `post`."""
        return await self._exchange("GET", path, b"", reply, {})

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _exchange(
        self, method: str, path: str, body: bytes, reply: Reply, headers: Mapping[str, str]
    ) -> Reply:
        request = self._head(method, path, len(body), headers) + body
        reply.sent(self._clock())  # to connect is the server's part, too
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(request, reply)
        except TimeoutError:
            reply.now = self._clock()
            reply.fail("timeout", f"No whole answer within {self._timeout_s:g} s.")
            reply.end()
        except (OSError, UnicodeError) as error:  # the latter for names that no resolver takes
            reply.now = self._clock()
            reply.fail("connect", f"Cannot connect to {self._address.name}: {error}")
            reply.end()
        return reply

    async def _send(self, request: bytes, reply: Reply) -> None:
        connection = self._take()
        kept = connection is not None
        if connection is None:
            connection = await self._connect()
        await connection.ask(request, reply)
        if kept and reply.untouched:
            # A kept connection that the server closed meanwhile: it never saw the request.
            reply.start_over()
            connection = await self._connect()
            await connection.ask(request, reply)
        if not connection.closed:
            self._idle.append(connection)

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop, address = asyncio.get_running_loop(), self._address
        made = partial(Connection, self._clock)
        if address.unix is not None:
            _, connection = await loop.create_unix_connection(made, address.unix)
        else:
            _, connection = await loop.create_connection(
                made, address.host, address.port, ssl=self._tls
            )
        return connection

    def _head(self, method: str, path: str, length: int, headers: Mapping[str, str]) -> bytes:
        lines = [f"{method} {self._address.path}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in (self._headers | dict(headers)).items()]
        if method == "POST":
            lines += ["content-type: application/json", f"content-length: {length}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()
