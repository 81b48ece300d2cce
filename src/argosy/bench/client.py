"""Measuring HTTP client: HTTP/1.1 on raw asyncio with httptools, with a timestamp for every read.

A connection carries one request at a time and is reused. The number of connections is not limited, so that the client
never queues requests that the plan wants sent. The timestamp is taken when the event loop delivers the bytes, before
they are parsed.
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
    """HTTP/1.1 connection that carries one request at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._response: BenchResponse | None = None
        self._done: asyncio.Future[None] | None = None
        self.completed_responses = 0
        """Number of complete responses."""
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    async def send_request(self, request: bytes, response: BenchResponse) -> None:
        """Send a request and return when its response has ended, also after an error.

        A cancellation closes the connection.
        """
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
        """Close the connection at once."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take the timestamp, then parse the bytes."""
        now = self._clock()
        if self._response is None:  # unexpected bytes without a request
            self.abort()
            return
        self._response.received_at = now
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._response is not None:  # otherwise the response was complete before these bytes
                self._response.record_error("malformed", f"The response is not HTTP: {error}")
            self.abort()
            self._finish_response()

    def eof_received(self) -> None:
        self.closed = True

    def connection_lost(self, exc: Exception | None) -> None:
        """End the current response. A response without a length may end here, any other is cut off."""
        self.closed = True
        if self._response is not None:
            self._response.received_at = self._clock()
            ends_at_eof = self._response.status >= 200 and not self._response.has_body_length
            if exc is not None or not ends_at_eof:
                self._response.record_error(
                    "cut", "The server closed the connection before the end of the response."
                )
            self._finish_response()

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: ARG002 - httptools' interface
        """Remember whether the response states the length of its body."""
        if self._response is not None and name.lower() in {b"content-length", b"transfer-encoding"}:
            self._response.has_body_length = True

    def on_headers_complete(self) -> None:
        if self._response is not None:
            self._response.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._response is not None:
            self._response.on_body(body)

    def on_message_complete(self) -> None:
        """End the current response. Informational responses (1xx) are skipped."""
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
    """HTTP client with all connections to one server."""

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
        """Send a POST request with a JSON body. Errors are recorded in `response`; only a cancellation raises."""
        headers = {"x-request-id": request_id} if request_id else {}
        return await self._send_timed("POST", path, body, response, headers)

    async def get(self, path: str, response: BenchResponse) -> BenchResponse:
        """Send a GET request, with errors handled like in `post`."""
        return await self._send_timed("GET", path, b"", response, {})

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _send_timed(
        self,
        method: str,
        path: str,
        body: bytes,
        response: BenchResponse,
        headers: Mapping[str, str],
    ) -> BenchResponse:
        request = self._render_head(method, path, len(body), headers) + body
        response.sent_at = self._clock()  # the time to connect counts as the server's
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send_on_connection(request, response)
        except TimeoutError:
            response.received_at = self._clock()
            response.record_error("timeout", f"No complete response within {self._timeout_s:g} s.")
            response.on_end()
        except (
            OSError,
            UnicodeError,
        ) as error:  # UnicodeError for host names that cannot be resolved
            response.received_at = self._clock()
            response.record_error(
                "connect", f"Cannot connect to {self._address.display_name}: {error}"
            )
            response.on_end()
        return response

    async def _send_on_connection(self, request: bytes, response: BenchResponse) -> None:
        connection = self._pop_idle()
        is_reused = connection is not None
        if connection is None:
            connection = await self._connect()
        await connection.send_request(request, response)
        if is_reused and response.error == "cut" and not response.status:
            # The server had closed the idle connection, so it never received the request.
            response.on_resend()
            connection = await self._connect()
            await connection.send_request(request, response)
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
        make_connection = partial(BenchConnection, self._clock)
        if address.socket_path is not None:
            _, connection = await loop.create_unix_connection(make_connection, address.socket_path)
        else:
            _, connection = await loop.create_connection(
                make_connection, address.host, address.port, ssl=self._tls
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
