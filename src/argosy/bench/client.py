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

from argosy.bench.response import BenchResponse
from argosy.protocol import Endpoint

Clock = Callable[[], float]


class BenchConnection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._response: BenchResponse | None = None
        self._done: asyncio.Future[None] | None = None
        self.completed_responses = 0
        """Answers that came whole."""
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    async def send_request(self, request: bytes, response: BenchResponse) -> None:
        """Send `request` and return when `reply` has ended, well or not. Cancelling closes the connection."""
        self._response = response
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
        if self._response is None:  # nobody asked
            self.abort()
            return
        self._response.received_at = now
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._response is not None:  # else the answer is whole, and this came after it
                self._response.record_error("malformed", f"The answer is not HTTP: {error}")
            self.abort()
            self._finish_response()

    def eof_received(self) -> None:
        """The server will send no more."""
        self.closed = True

    def connection_lost(self, exc: Exception | None) -> None:
        """An answer that has not ended was cut."""
        self.closed = True
        if self._response is not None:
            self._response.received_at = self._clock()
            if not (exc is None and self._response.ends_at_eof):
                self._response.record_error(
                    "cut", "The server closed the connection before the end."
                )
            self._finish_response()

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: ARG002 - the parser's face
        """Remember what says where a body ends."""
        if self._response is not None and name.lower() in {b"content-length", b"transfer-encoding"}:
            self._response.has_body_length = True

    def on_headers_complete(self) -> None:
        """The status is known."""
        if self._response is not None:
            self._response.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if self._response is not None:
            self._response.on_body(body)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        if self._response is not None and self._response.status >= 200:
            self.completed_responses += 1
            if not self._parser.should_keep_alive():
                self.closed = True
            self._finish_response()

    def _finish_response(self) -> None:
        if self._response is not None:
            self._response.on_end()
        self._response = None
        self._parser = httptools.HttpResponseParser(self)
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class BenchClient:
    """All connections to one server."""

    def __init__(
        self, address: Endpoint, clock: Clock, headers: Mapping[str, str], timeout_s: float
    ) -> None:
        self._address = address
        self._clock = clock
        self._timeout_s = timeout_s
        self._headers = {"host": address.authority, "user-agent": "argosy-bench", **headers}
        self._idle: list[BenchConnection] = []
        self._tls = ssl.create_default_context() if address.tls else None

    async def post(
        self, path: str, body: bytes, response: BenchResponse, request_id: str = ""
    ) -> BenchResponse:
        """POST JSON. Whatever happens is in the reply; only a cancellation raises."""
        headers = {"x-request-id": request_id} if request_id else {}
        return await self._send_timed("POST", path, body, response, headers)

    async def get(self, path: str, response: BenchResponse) -> BenchResponse:
        """GET. As `post`."""
        return await self._send_timed("GET", path, b"", response, {})

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _send_timed(
        self, method: str, path: str, body: bytes, reply: BenchResponse, headers: Mapping[str, str]
    ) -> BenchResponse:
        request = self._render_head(method, path, len(body), headers) + body
        reply.on_sent(self._clock())  # to connect is the server's part, too
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send_on_connection(request, reply)
        except TimeoutError:
            reply.received_at = self._clock()
            reply.record_error("timeout", f"No whole answer within {self._timeout_s:g} s.")
            reply.on_end()
        except (OSError, UnicodeError) as error:  # the latter for names that no resolver takes
            reply.received_at = self._clock()
            reply.record_error(
                "connect", f"Cannot connect to {self._address.display_name}: {error}"
            )
            reply.on_end()
        return reply

    async def _send_on_connection(self, request: bytes, reply: BenchResponse) -> None:
        connection = self._pop_idle()
        kept = connection is not None
        if connection is None:
            connection = await self._connect()
        await connection.send_request(request, reply)
        if kept and reply.closed_before_response:
            # A kept connection that the server closed meanwhile: it never saw the request.
            reply.on_resend()
            connection = await self._connect()
            await connection.send_request(request, reply)
        if not connection.closed:
            self._idle.append(connection)

    def _pop_idle(self) -> BenchConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    async def _connect(self) -> BenchConnection:
        loop, address = asyncio.get_running_loop(), self._address
        made = partial(BenchConnection, self._clock)
        if address.socket_path is not None:
            _, connection = await loop.create_unix_connection(made, address.socket_path)
        else:
            _, connection = await loop.create_connection(
                made, address.host, address.port, ssl=self._tls
            )
        return connection

    def _render_head(
        self, method: str, path: str, length: int, headers: Mapping[str, str]
    ) -> bytes:
        lines = [f"{method} {self._address.path_prefix}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in (self._headers | dict(headers)).items()]
        if method == "POST":
            lines += ["content-type: application/json", f"content-length: {length}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()
