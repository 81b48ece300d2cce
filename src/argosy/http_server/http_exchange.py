"""One HTTP request and its answer over ASGI: body in under limits, answer or stream out, a cut if it stalls."""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Protocol

from argosy.http_server.response_observer import ResponseObserver, tee_writes
from argosy.protocol import SSE_CONTENT_TYPE, ApiError, format_comment

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON_CONTENT_TYPE = b"application/json"
SSE_PROBE_COMMENT = format_comment(b"")
"""Says nothing, between events."""
TRANSPORT_KEY = "argosy.wire"
"""Key of the scope's state: the connection that the request came by, a `Wire`."""
EXCHANGE_KEY = "argosy.exchange"
"""Key of the scope's state: the `Exchange`, for an application that it was handed to."""

MAX_PIECE_BYTES = 64 * 1024
"""A whole answer that is larger is sent in pieces of so many, as the client takes them."""
OPENAI_VERSION = b"2020-10-01"
"""Of the API that is spoken; there is no other."""
MAX_SDK_RETRY_S = 120
"""Who has to wait for longer is told that SDKs are not to: some would do so in the middle of a call, for hours."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class DisconnectedError(Exception):
    """The client has gone; nobody waits for an answer."""


class SlowReaderError(Exception):
    """The client takes nothing; its connection has been cut."""


class ClientListener(Protocol):
    """Whoever pushes to a client is told how the client takes it."""

    def on_backpressure(self) -> None:
        """It is behind: push nothing more for now."""

    def on_writable(self) -> None:
        """It has caught up."""

    def on_half_close(self) -> None:
        """It will send no more, and may have gone: whatever it is sent in the middle of an answer tells."""

    def on_disconnect(self) -> None:
        """It has gone away."""


class ResponseTransport(Protocol):
    """The connection under a request. What is sent after the client has gone is lost without an error."""

    @property
    def is_body_complete(self) -> bool:
        """Whether the body is all there."""

    @property
    def is_backpressured(self) -> bool:
        """Whether the client is behind with what was sent to it."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait for the client to take others."""

    @property
    def is_disconnected(self) -> bool:
        """Whether the client has gone."""

    async def read_body(self, max_bytes: int) -> bytes:
        """The whole body, or more than `limit` bytes of it. Raises DisconnectedError, or ApiError 503."""

    async def wait_writable(self) -> None:
        """Wait until the client is not behind, or has gone."""

    def send_response(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Send a whole answer; `headers` tell its length."""

    def start_response(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Begin an answer of unknown length, which ends with the connection where HTTP is 1.0."""

    def start_sized_response(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Begin one whose length `headers` tell."""

    def write_nowait(self, data: bytes) -> None:
        """Send a part of the answer that has begun."""

    def lend_socket(self) -> int | None:
        """The socket's descriptor, for who sends the next parts instead, in chunks as HTTP has them.

        None: it cannot be, since it is TLS's, what was sent before waits still, or the answer does not come in chunks.
        """

    def write_raw_chunks(self, chunks: bytes) -> None:
        """Send what who had the socket could not: it is in chunks already."""

    def end_response(self) -> None:
        """End it."""

    def abort(self) -> None:
        """Drop the connection at once, whatever waits to be sent."""

    def set_listener(self, listener: ClientListener | None) -> None:
        """Tell `watcher`, and nobody else, how the client takes what is pushed."""


class ExchangeLimits(Protocol):
    """What a client may send and how long it may take. Times are in seconds."""

    @property
    def body_limit_bytes(self) -> int:
        """Most bytes of a body."""

    @property
    def body_timeout_s(self) -> float:
        """A request whose body is not complete after this long is refused."""

    @property
    def slow_reader_timeout_s(self) -> float:
        """A client that takes nothing for this long is cut off."""


class HttpExchange:
    """One request and its answer. Every answer carries `x-request-id`, `openai-processing-ms` and `openai-version`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: ExchangeLimits) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._limits = limits
        self._transport: ResponseTransport = scope["state"][TRANSPORT_KEY]
        self.write_nowait = self._transport.write_nowait
        """Send a part of a stream at once; `watch` tells when the client is behind."""
        self.arrived_at = time.monotonic()
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        """What came after the path's `?`."""
        self.headers = _merge_headers(scope["headers"])
        self.request_id = self._choose_request_id()
        self.extra_headers: list[tuple[bytes, bytes]] = []
        """Headers of the answer, whatever it will be."""
        self.status: int | None = None
        """The status that was sent, once it was."""
        self.response_complete = False
        """Whether the whole answer was sent."""
        self._observer: ResponseObserver | None = None
        self.error_code: str | None = None
        """Code of the error that it ended with."""

    @property
    def peer_address(self) -> str:
        """Address of the other end; "unix" over a Unix socket; empty when nobody can tell any more."""
        client, server = self._scope.get("client"), self._scope.get("server")
        if client is not None:
            return str(client[0])
        return "unix" if server is not None and server[1] is None else ""

    @property
    def is_disconnected(self) -> bool:
        """Whether the client has gone: nobody gets what is sent."""
        return self._transport.is_disconnected

    def _choose_request_id(self) -> str:
        if b"x-request-id" in self.headers:
            given = self.get_header(b"x-request-id")
            if _REQUEST_ID.fullmatch(given):
                return given
        return f"req_{random.getrandbits(128):032x}"

    def get_header(self, name: bytes) -> str:
        """A header's value; empty when it was not sent."""
        return self.headers.get(name, b"").decode("latin-1")

    def set_request_id(self, request_id: str) -> None:
        """Take the id that the body gives, unless a header gave one or it cannot be a header."""
        if b"x-request-id" not in self.headers and _REQUEST_ID.fullmatch(request_id):
            self.request_id = request_id

    async def read_body(self) -> bytes:
        """The whole body. Raises ApiError 413 before reading too much, 408 when it does not come.

        503 when more bodies come than can be kept at a time.
        """
        limit, wire = self._limits.body_limit_bytes, self._transport
        self._check_body_headers(limit)
        if wire.is_body_complete:
            body = await wire.read_body(limit)
        else:
            try:
                async with asyncio.timeout(self._limits.body_timeout_s):
                    body = await wire.read_body(limit)
            except TimeoutError as error:
                seconds = self._limits.body_timeout_s
                message = f"The body was not complete after {seconds:g} s. Send it faster."
                raise ApiError(408, "request_timeout", message) from error
        if len(body) > limit:
            raise _body_too_large_error(limit)
        return body

    def _check_body_headers(self, max_bytes: int) -> None:
        length = self.headers.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > max_bytes:
            raise _body_too_large_error(max_bytes)
        encoding = self.headers.get(b"content-encoding", b"identity").lower()
        if encoding not in {b"identity", b""}:
            message = "Compressed bodies are not read. Send the JSON as it is."
            raise ApiError(415, "unsupported_encoding", message)

    def listen_for_disconnect(self, callback: Callable[[], object]) -> DisconnectListener:
        """Call `gone` when the client goes away; cancel what is returned when that is over."""
        leaving = DisconnectListener(self._transport, callback)
        self._transport.set_listener(leaving)
        return leaving

    async def send_response(
        self, status: int, body: bytes, content_type: bytes = JSON_CONTENT_TYPE
    ) -> None:
        """Send a whole answer."""
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
        if self._transport.is_backpressured:
            await self._wait_writable()
        if self._observer is not None:
            self._observer.on_start(content_type)
            self._observer.on_body(body)
        if len(body) <= MAX_PIECE_BYTES:
            self._transport.send_response(status, self._build_headers(status, headers), body)
        else:
            await self._send_in_pieces(status, self._build_headers(status, headers), body)
        self.response_complete = True

    async def _send_in_pieces(
        self, status: int, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> None:
        """No faster than the client takes them: for thousands who take nothing, all of it would be kept."""
        self._transport.start_sized_response(status, headers)
        try:
            for start in range(0, len(body), MAX_PIECE_BYTES):
                await self._wait_writable()
                self._transport.write_nowait(body[start : start + MAX_PIECE_BYTES])
        except BaseException:
            self.abort()  # nothing else can be said before the rest
            raise
        self._transport.end_response()

    async def send_error(self, error: ApiError) -> None:
        """Send an error body, with the headers that tell clients when to try again."""
        if error.retry_after_s is not None:
            seconds = str(max(1, math.ceil(error.retry_after_s))).encode()
            milliseconds = str(math.ceil(error.retry_after_s * 1000)).encode()
            self.extra_headers += [(b"retry-after", seconds), (b"retry-after-ms", milliseconds)]
            if error.retry_after_s > MAX_SDK_RETRY_S:
                self.extra_headers.append((b"x-should-retry", b"false"))
        await self.send_response(error.status, error.encode_body(self.request_id))

    async def start_stream(self, content_type: bytes = SSE_CONTENT_TYPE) -> None:
        """Begin a stream, by default one of events."""
        headers = [
            (b"content-type", content_type),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        if self._transport.is_backpressured:
            await self._wait_writable()
        if self._observer is not None:
            self._observer.on_start(content_type)
        self._transport.start_response(200, self._build_headers(200, headers))

    async def write(self, data: bytes) -> None:
        """Send a part of a stream, waiting while the client is behind."""
        if self._transport.is_backpressured:
            await self._wait_writable()
        self.write_nowait(data)

    def observe_response(self, observer: ResponseObserver | None) -> None:
        """Give `copy` too what is sent of the answer from now on: its socket must not be lent. None: nobody more."""
        self._observer = observer
        self.write_nowait = (
            self._transport.write_nowait
            if observer is None
            else tee_writes(self._transport.write_nowait, observer.on_body)
        )

    def lend_socket(self) -> int | None:
        """See `Wire`."""
        return self._transport.lend_socket()

    def write_raw_chunks(self, chunks: bytes) -> None:
        """See `Wire`."""
        self._transport.write_raw_chunks(chunks)

    def set_listener(self, listener: ClientListener | None) -> None:
        """Tell `watcher` from now on how the client takes what is pushed."""
        self._transport.set_listener(listener)

    async def end_stream(self) -> None:
        """End it."""
        if self._transport.is_backpressured:
            await self._wait_writable()
        self._transport.end_response()
        self.response_complete = True

    def abort(self) -> None:
        """Cut the connection at once, whatever waits to be sent; whoever watches learns of it."""
        self._transport.abort()

    async def abort_and_yield(self) -> None:
        """The same, for whoever answers."""
        self.abort()
        await asyncio.sleep(0)  # the server learns of it before we return

    async def delegate_to(self, app: AsgiApp) -> None:
        """Let `app` answer: it finds this exchange in its scope's state, under `EXCHANGE`."""
        state = self._scope["state"]
        state[EXCHANGE_KEY] = self
        try:
            await app(self._scope, self._receive, self._send)
        finally:
            del state[EXCHANGE_KEY]

    def elapsed_ms(self) -> float:
        """Milliseconds since the request came."""
        return round((time.monotonic() - self.arrived_at) * 1000, 1)

    def _build_headers(
        self, status: int, headers: list[tuple[bytes, bytes]]
    ) -> list[tuple[bytes, bytes]]:
        """The headers, with those that every answer has."""
        self.status = status
        spent_ms = b"%d" % round((time.monotonic() - self.arrived_at) * 1000)
        headers += [
            *self.extra_headers,
            (b"x-request-id", self.request_id.encode("latin-1")),
            (b"openai-processing-ms", spent_ms),
            (b"openai-version", OPENAI_VERSION),
        ]
        return headers

    async def _wait_writable(self) -> None:
        """Wait while the client is behind; when it takes nothing, cut it and raise SlowReaderError."""
        before = math.inf
        while (unsent := self._transport.unsent_bytes) < before:
            try:
                async with asyncio.timeout(self._limits.slow_reader_timeout_s):
                    return await self._transport.wait_writable()
            except TimeoutError:
                before = unsent
        await self.abort_and_yield()
        raise SlowReaderError


class DisconnectListener:
    """A `Watcher` of a stream of events that only wants to know when the client has gone."""

    def __init__(self, transport: ResponseTransport, callback: Callable[[], object]) -> None:
        self._transport = transport
        self._callback = callback

    def cancel(self) -> None:
        """It no longer wants to."""
        self._transport.set_listener(None)

    def on_backpressure(self) -> None:
        """See `Watcher`."""

    def on_writable(self) -> None:
        """See `Watcher`."""

    def on_half_close(self) -> None:
        """See `Watcher`."""
        self._transport.write_nowait(SSE_PROBE_COMMENT)

    def on_disconnect(self) -> None:
        """See `Watcher`."""
        self._callback()


def _merge_headers(headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Headers by name; several lines of one are a list with commas (RFC 9110, 5.3), which proxies add to by lines."""
    found = dict(headers)
    if len(found) < len(headers):
        lines: dict[bytes, list[bytes]] = {}
        for name, value in headers:
            lines.setdefault(name, []).append(value)
        found = {name: b", ".join(values) for name, values in lines.items()}
    return found


def _body_too_large_error(max_bytes: int) -> ApiError:
    message = f"The body is larger than {max_bytes} bytes. Send less in one request."
    return ApiError(413, "request_too_large", message)
