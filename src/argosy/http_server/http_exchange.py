"""Exchange of one HTTP request and its response, with limits on body size, body time and slow readers."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from argosy.http_server.http_request import HttpRequest
from argosy.http_server.response_transport import (
    ClientListener,
    Headers,
    ResponseDialect,
    ResponseTranslator,
    ResponseTransport,
)
from argosy.http_server.websocket import WebSocket, build_handshake
from argosy.protocol import SSE_CONTENT_TYPE, ApiError, format_comment

JSON_CONTENT_TYPE = b"application/json"
SSE_PROBE_COMMENT = format_comment(b"")
"""SSE comment without content, which clients ignore."""

MAX_PIECE_BYTES = 64 * 1024
"""Size in bytes of the pieces in which a larger complete response is sent, at the speed of the client."""
OPENAI_VERSION = b"2020-10-01"
"""Version of the OpenAI API. OpenAI has published no other."""
CHUNK_FRAME_BYTES = len(b"100\r\n\r\n")
"""Bytes around an HTTP chunk of 256 to 4095 bytes."""
MIN_PADDING_BYTES = 256 + CHUNK_FRAME_BYTES
"""Minimum size of the HTTP chunk that pads a write."""
MAX_SDK_RETRY_S = 120
"""Longest delay in seconds for which SDKs may retry. Some SDKs would otherwise sleep for hours within a call."""
UNIQUE_ID_DIGITS = 32
"""Length of a unique id in hexadecimal digits."""
LARGE_BODY_BYTES = 1 << 20
"""Size from which a body is parsed in a thread."""
_parser_thread = ThreadPoolExecutor(1, thread_name_prefix="parse-body")
_parser_turns: WeakValueDictionary[str | None, asyncio.Lock] = WeakValueDictionary()
"""Locks of the tenants whose large bodies are parsed, one at a time of each, so that others come in between."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

T = TypeVar("T")


class SlowReaderError(Exception):
    """The client has read nothing for too long, and its connection has been closed."""


class ExchangeLimits(Protocol):
    """Limits on a request's size and duration."""

    @property
    def body_limit_bytes(self) -> int:
        """Maximum size of a request body."""

    @property
    def body_timeout_s(self) -> float:
        """Time within which the body must arrive, or the request is rejected."""

    @property
    def slow_reader_timeout_s(self) -> float:
        """Time without read progress after which a client is disconnected."""


class ResponseObserver(Protocol):
    """Second receiver of a response, besides the client."""

    def on_start(self, content_type: bytes) -> None:
        """Handle the start of the response, which has this content type."""

    def on_body(self, data: bytes) -> None:
        """Handle a part of the response body."""


class HttpExchange:
    """HTTP request and response. Responses carry `x-request-id`, `openai-processing-ms` and `openai-version`."""

    path_parameters: Mapping[str, str] = {}
    """Parameters in the path, as its route names them."""
    status: int | None = None
    """Status of the response, once it has been sent."""
    tenant: str | None = None
    """Tenant of the sender, once it is known. Large bodies take its share of the memory for bodies."""
    response_complete = False
    """Whether the whole response has been sent."""
    error_code: str | None = None
    """Code of the error that ended the request."""
    first_output_at: float | None = None
    """Monotonic time of the first output of a response that is sent whole; None if it is not known."""
    internal_route = ""
    """Route in the ledger of a request that the gateway itself sends on behalf of another one; empty for others."""
    forbids_storage = False
    """Whether the client has said that nothing of the request may be stored."""
    batch_line: Any = None
    """The line of a batch that the request is, of the application's type; None for other requests."""
    filter_stored: Callable[[Any], Awaitable[Any]] | None = None
    """Returns a JSON value of the request or its response as it may be stored; None to store all as it is."""
    _observer: ResponseObserver | None = None
    _dialect: ResponseDialect | None = None
    _translator: ResponseTranslator | None = None
    _body: bytes | None = None
    """Body that replaces the client's."""

    def __init__(self, request: HttpRequest, limits: ExchangeLimits, server_id: str = "") -> None:
        """Create an exchange.

        Args:
            request: The request.
            limits: Limits on the request.
            server_id: Hexadecimal digits with which `unique_id` begins.
        """
        self._request = request
        self._limits = limits
        self._server_id = server_id
        self._transport = request.transport
        self.write_nowait: Callable[[bytes], None] = request.transport.write_nowait
        """Send a part of a stream without waiting. The listener reports backpressure."""
        self._write_untranslated: Callable[[bytes], None] = request.transport.write_nowait
        self.arrived_at = time.monotonic()
        self.method = request.method
        self.path = request.path
        """Path that is handled, which an application may replace. `requested_path` is the client's."""
        self.query = request.query
        """Query string, without the `?`."""
        self.peer_address = request.peer_address
        """Address of the peer; "unix" over a Unix socket, and empty if unknown after a disconnect."""
        self.headers = _merge_headers(request.headers)
        self.unique_id = server_id + secrets.token_hex(UNIQUE_ID_DIGITS // 2)[len(server_id) :]
        """Id that clients cannot choose."""
        self.request_id = f"req_{self.unique_id}"
        if b"x-request-id" in self.headers:
            client_id = self.get_header(b"x-request-id")
            if _REQUEST_ID.fullmatch(client_id):
                self.request_id = client_id
        self.extra_headers: Headers = []
        """Headers to add to the response, also to an error response."""

    @property
    def requested_path(self) -> str:
        """Path that the client requested."""
        return self._request.path

    def read_first_output_s(self) -> float | None:
        """Return the seconds until the first output of a response that is sent whole; None if they are not known."""
        return None if self.first_output_at is None else self.first_output_at - self.arrived_at

    @property
    def is_disconnected(self) -> bool:
        """Whether the client has disconnected."""
        return self._transport.is_disconnected

    def get_header(self, name: bytes) -> str:
        """Return a header's value, or an empty string if the header is missing."""
        return self.headers.get(name, b"").decode("latin-1")

    def set_request_id(self, request_id: str) -> None:
        """Use a request id from the body, unless a header has set one or the id is no valid header value."""
        if b"x-request-id" not in self.headers and _REQUEST_ID.fullmatch(request_id):
            self.request_id = request_id

    def set_dialect(self, dialect: ResponseDialect) -> None:
        """Send errors and headers in the shape of another dialect of the API."""
        self._dialect = dialect

    def translate(self, body: bytes, translator: ResponseTranslator) -> None:
        """Replace the request by its internal form, and translate the response to it.

        Observers receive the translated response. The socket cannot be lent.

        Args:
            body: The request's body in the internal form.
            translator: Translates the response.
        """
        self._body = body
        self._translator = translator
        self._set_writer()

    @property
    def is_translated(self) -> bool:
        """Whether the response is translated."""
        return self._translator is not None

    def stop_translating(self) -> None:
        """Send the response as the handler writes it, because it is in the client's dialect already."""
        self._translator = None
        self._set_writer()

    def detach(
        self,
        transport: ResponseTransport,
        *,
        method: str | None = None,
        path: str | None = None,
        dropped_headers: Collection[bytes] = (),
    ) -> HttpExchange:
        """Return an exchange of the same request over another transport, for work that outlives the connection.

        Args:
            transport: The other transport.
            method: Method of the new request; None for that of this one.
            path: Its path; None for that of this one.
            dropped_headers: Names of headers that the new request does not have.
        """
        request = HttpRequest(
            method or self.method,
            path or self._request.path,
            self._request.query,
            [one for one in self._request.headers if one[0] not in dropped_headers],
            self._request.peer_address,
            transport,
        )
        return HttpExchange(request, self._limits, self._server_id)

    @property
    def is_websocket_handshake(self) -> bool:
        """Whether the client asks for a WebSocket."""
        return self._request.open_websocket is not None

    def accept_websocket(self) -> WebSocket:
        """Answer the client's handshake, after which the connection carries the messages of a WebSocket.

        Raises:
            ApiError: 400 if the handshake is invalid, 503 if the server shuts down.
        """
        if self._request.open_websocket is None:
            raise ValueError("the client asks for no WebSocket")
        headers = build_handshake(self.path, self._request.headers)
        return self._request.open_websocket(
            lambda: self._build_headers(101, headers),  # records the status, so not before an error
            self._limits.body_limit_bytes,
            self._limits.body_timeout_s,
            self.tenant,
        )

    async def read_body(self) -> bytes:
        """Return the whole body.

        Raises:
            ApiError: 413 if the body is too large, before reading it. 408 if the body does not arrive in time.
                415 if the body is compressed. 503 if the server buffers too many request bodies.
        """
        if self._body is not None:
            return self._body
        max_bytes, transport = self._limits.body_limit_bytes, self._transport
        length = self.headers.get(b"content-length", b"0")
        if (
            b"content-encoding" in self.headers
            or not length.isdigit()
            or int(length[:20]) > max_bytes
        ):
            self._check_body_headers(max_bytes)
        if transport.is_body_complete:
            body = await transport.read_body(max_bytes)
        else:
            try:
                async with asyncio.timeout(self._limits.body_timeout_s):
                    body = await transport.read_body(max_bytes, self.tenant)
            except TimeoutError as error:
                seconds = self._limits.body_timeout_s
                message = f"The body was not complete after {seconds:g} s. Send it faster."
                raise ApiError(408, "request_timeout", message) from error
        if len(body) > max_bytes:
            raise _body_too_large_error(max_bytes)
        return body

    async def iter_body(self, max_bytes: int) -> AsyncIterator[bytes]:
        """Yield the parts of the body as they arrive. Nothing is read from the client while no part is taken.

        Each MiB has to arrive within the time limit of a whole small body.

        Args:
            max_bytes: Limit on the body instead of that of `read_body`.

        Raises:
            ApiError: 408, 413 and 415 as in `read_body`.
            DisconnectedError: The client has disconnected before the end.
        """
        self._check_body_headers(max_bytes)
        limit_s, size = self._limits.body_timeout_s, 0
        waited_s, waited_bytes = 0.0, 0
        while True:
            started_at = time.monotonic()
            try:
                async with asyncio.timeout(limit_s - waited_s):
                    part = await self._transport.read_part()
            except TimeoutError as error:
                message = f"Less than 1 MiB of the body arrived in {limit_s:g} s. Send it faster."
                raise ApiError(408, "request_timeout", message) from error
            if not part:
                return
            size += len(part)
            if size > max_bytes:
                raise _body_too_large_error(max_bytes)
            waited_s, waited_bytes = (
                waited_s + time.monotonic() - started_at,
                waited_bytes + len(part),
            )
            if waited_bytes >= LARGE_BODY_BYTES:
                waited_s, waited_bytes = 0.0, 0
            yield part

    async def parse_body(self, body: bytes, parse: Callable[[bytes], T]) -> T:
        """Return what `parse` makes of the body. Raises as `parse` does.

        Large bodies are parsed in a thread, one after the other, with those of the tenants in turn. A call of the
        parser keeps the interpreter for some milliseconds, and the event loop goes on between two calls.
        """
        if len(body) < LARGE_BODY_BYTES:
            return parse(body)
        turn = _parser_turns.get(self.tenant)
        if turn is None:
            turn = _parser_turns[self.tenant] = asyncio.Lock()
        self._transport.count_body_bytes(len(body))
        try:
            async with turn:
                return await asyncio.get_running_loop().run_in_executor(_parser_thread, parse, body)
        finally:
            self._transport.count_body_bytes(-len(body))

    def _check_body_headers(self, max_bytes: int) -> None:
        if self.headers.get(b"content-encoding", b"").lower() not in {b"identity", b""}:
            message = "Compressed bodies are not supported. Send an uncompressed one."
            raise ApiError(415, "unsupported_encoding", message)
        if (self.body_length or 0) > max_bytes:
            raise _body_too_large_error(max_bytes)

    @property
    def body_length(self) -> int | None:
        """Length of the body in bytes as the client announced it; None if it did not."""
        length = self.headers.get(b"content-length", b"")
        return int(length[:20]) if length.isdigit() else None

    def listen_for_disconnect(self, callback: Callable[[], object]) -> DisconnectListener:
        """Call `callback` when the client disconnects, until the returned listener is cancelled."""
        listener = DisconnectListener(self._transport, callback)
        self._transport.set_listener(listener)
        return listener

    async def send_response(
        self, status: int, body: bytes, content_type: bytes = JSON_CONTENT_TYPE
    ) -> None:
        """Send a complete response, translated if a translator is set."""
        if self._transport.is_backpressured:
            await self._wait_writable()
        if self._translator is not None:
            body = await self._translator.translate_response(status, body, self.request_id)
            content_type = JSON_CONTENT_TYPE
        if self._observer is not None:
            self._observer.on_start(content_type)
            self._observer.on_body(body)
        await self._send_body(status, body, content_type)

    async def _send_body(self, status: int, body: bytes, content_type: bytes) -> None:
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
        if len(body) <= MAX_PIECE_BYTES:
            self._transport.send_response(status, self._build_headers(status, headers), body)
        else:
            await self._send_in_pieces(status, headers, _cut_pieces(body))
        self.response_complete = True

    async def send_parts(
        self, status: int, parts: AsyncIterator[bytes], length: int, content_type: bytes
    ) -> None:
        """Send a response of `length` bytes, whose parts are taken at the client's speed."""
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % length)]
        await self._send_in_pieces(status, headers, parts)
        self.response_complete = True

    async def _send_in_pieces(
        self, status: int, headers: Headers, pieces: AsyncIterator[bytes]
    ) -> None:
        """Send the body at the client's speed, since buffering it for thousands of slow clients costs memory."""
        self._transport.start_sized_response(status, self._build_headers(status, headers))
        try:
            async for piece in pieces:
                await self._wait_writable()
                self._transport.write_nowait(piece)
        except BaseException:
            self.abort()  # an error response cannot replace the rest of the body
            raise
        self._transport.end_response()

    async def send_error(self, error: ApiError) -> None:
        """Send an error response, with headers for the time to retry."""
        if error.retry_after_s is not None:
            seconds = str(max(1, math.ceil(error.retry_after_s))).encode()
            milliseconds = str(math.ceil(error.retry_after_s * 1000)).encode()
            self.extra_headers += [(b"retry-after", seconds), (b"retry-after-ms", milliseconds)]
            if error.retry_after_s > MAX_SDK_RETRY_S:
                self.extra_headers.append((b"x-should-retry", b"false"))
        if self._dialect is None:
            body = error.encode_body(self.request_id)
        else:
            body = self._dialect.encode_error(error, self.request_id)
        if self._transport.is_backpressured:
            await self._wait_writable()
        await self._send_body(error.status, body, JSON_CONTENT_TYPE)

    async def start_stream(self, content_type: bytes = SSE_CONTENT_TYPE) -> None:
        """Start a stream, by default of server-sent events. Does nothing if the response has started."""
        if self._transport.is_backpressured:
            await self._wait_writable()
        self.try_start_stream(content_type)

    def try_start_stream(self, content_type: bytes = SSE_CONTENT_TYPE) -> None:
        """Start a stream unless the response has started, or the client still reads an earlier response."""
        if self.status is not None or self._transport.is_backpressured:
            return
        if self._translator is not None:
            content_type = self._translator.stream_content_type
        if self._observer is not None:
            self._observer.on_start(content_type)
        headers = [
            (b"content-type", content_type),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        self._transport.start_response(200, self._build_headers(200, headers))

    def write_comment(self, comment: bytes) -> None:
        """Send an SSE comment at once. Observers do not receive it, because it is no part of the response."""
        if self._translator is not None:
            comment = self._translator.translate_comment(comment)
        self._transport.write_nowait(comment)

    def write_padded(self, data: bytes, multiple: int) -> None:
        """Send a part of a stream and an SSE comment, which together have a multiple of bytes, of at most 2048.

        Streams without comments are not padded. Nothing is sent without data to a client that reads too slowly.
        """
        transport, translator = self._transport, self._translator
        if not data and transport.is_backpressured:
            return
        unsent_bytes = transport.unsent_bytes
        if data:
            self.write_nowait(data)
        if translator is None or translator.stream_content_type == SSE_CONTENT_TYPE:
            missing = unsent_bytes - transport.unsent_bytes - MIN_PADDING_BYTES
            size = MIN_PADDING_BYTES + missing % multiple - CHUNK_FRAME_BYTES
            transport.write_nowait(b":".ljust(size - len(b"\n\n")) + b"\n\n")

    def write_heartbeat(self, event: bytes) -> None:
        """Send an event without content at once, which keeps an idle stream alive."""
        if self._translator is not None:
            event = self._translator.translate_heartbeat(event)
        self._write_untranslated(event)

    async def write(self, data: bytes) -> None:
        """Send a part of a stream after the client has caught up."""
        await self.wait_writable()
        self.write_nowait(data)

    async def wait_writable(self) -> None:
        """Wait until the client has caught up. Raises SlowReaderError if it reads nothing."""
        if self._transport.is_backpressured:
            await self._wait_writable()

    def observe_response(self, observer: ResponseObserver | None) -> None:
        """Copy all further writes to `observer`, or stop copying if None. The socket must not be lent meanwhile."""
        self._observer = observer
        self._set_writer()

    def _set_writer(self) -> None:
        """Connect `write_nowait` with the translator, the observer and the connection, in this order."""
        write: Callable[[bytes], None] = self._transport.write_nowait
        if self._observer is not None:
            write = _tee_writes(write, self._observer.on_body)
        self._write_untranslated = write
        if self._translator is not None:
            write = _translate_writes(write, self._translator)
        self.write_nowait = write

    def lend_socket(self) -> int | None:
        """Return the socket's file descriptor if native code may write to it, as `ResponseTransport` does."""
        is_read_here = self._translator is not None or self._observer is not None
        return None if is_read_here else self._transport.lend_socket()

    def write_raw_chunks(self, chunks: bytes) -> None:
        """Send HTTP chunks that the borrower of the socket could not send."""
        self._transport.write_raw_chunks(chunks)

    def set_listener(self, listener: ClientListener | None) -> None:
        """Set the only listener for write progress, or remove it."""
        self._transport.set_listener(listener)

    async def end_stream(self) -> None:
        """Complete the stream."""
        if self._translator is not None and (events := await self._translator.finish_stream()):
            self._write_untranslated(events)
        if self._transport.is_backpressured:
            await self._wait_writable()
        self._transport.end_response()
        self.response_complete = True

    def abort(self) -> None:
        """Close the connection at once and discard unsent data. The listener is notified."""
        self._transport.abort()

    async def abort_and_yield(self) -> None:
        """Close the connection at once, and let the server handle the disconnect before this call returns."""
        self.abort()
        await asyncio.sleep(0)

    def elapsed_ms(self) -> float:
        """Return the time since the request arrived, in milliseconds."""
        return round((time.monotonic() - self.arrived_at) * 1000, 1)

    def _build_headers(self, status: int, headers: Headers) -> Headers:
        """Return the headers with those of every response appended, and record the status."""
        self.status = status
        spent_ms = b"%d" % round((time.monotonic() - self.arrived_at) * 1000)
        headers += [
            *self.extra_headers,
            (b"x-request-id", self.request_id.encode("latin-1")),
            (b"openai-processing-ms", spent_ms),
            (b"openai-version", OPENAI_VERSION),
        ]
        return headers if self._dialect is None else self._dialect.translate_headers(headers)

    async def _wait_writable(self) -> None:
        """Wait until the client has caught up.

        Raises:
            SlowReaderError: The client has read nothing for `slow_reader_timeout_s`, and its connection is closed.
        """
        last_unsent_bytes = math.inf
        while (unsent := self._transport.unsent_bytes) < last_unsent_bytes:
            try:
                async with asyncio.timeout(self._limits.slow_reader_timeout_s):
                    return await self._transport.wait_writable()
            except TimeoutError:
                last_unsent_bytes = unsent
        await self.abort_and_yield()
        raise SlowReaderError


class DisconnectListener(ClientListener):
    """Listener of an event stream that reports only the client's disconnect."""

    def __init__(self, transport: ResponseTransport, callback: Callable[[], object]) -> None:
        self._transport = transport
        self._callback = callback

    def cancel(self) -> None:
        """Stop listening."""
        self._transport.set_listener(None)

    def on_half_close(self) -> None:
        """Probe the client with an SSE comment."""
        self._transport.write_nowait(SSE_PROBE_COMMENT)

    def on_disconnect(self) -> None:
        """Call the callback."""
        self._callback()


def _merge_headers(headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return headers by name, with repeated ones joined by commas (RFC 9110, section 5.3). Proxies repeat headers."""
    merged = dict(headers)
    if len(merged) < len(headers):
        values_by_name: dict[bytes, list[bytes]] = {}
        for name, value in headers:
            values_by_name.setdefault(name, []).append(value)
        merged = {name: b", ".join(values) for name, values in values_by_name.items()}
    return merged


def _tee_writes(
    first: Callable[[bytes], None], second: Callable[[bytes], None]
) -> Callable[[bytes], None]:
    """Return a function that passes its data to both functions, in this order."""

    def write_both(data: bytes) -> None:
        first(data)
        second(data)

    return write_both


def _translate_writes(
    write: Callable[[bytes], None], translator: ResponseTranslator
) -> Callable[[bytes], None]:
    """Return a function that writes the translation of its data."""

    def write_translated(events: bytes) -> None:
        if translated := translator.translate_events(events):
            write(translated)

    return write_translated


async def _cut_pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), MAX_PIECE_BYTES):
        yield body[start : start + MAX_PIECE_BYTES]


def _body_too_large_error(max_bytes: int) -> ApiError:
    message = f"The body is larger than {max_bytes} bytes. Send a smaller request."
    return ApiError(413, "request_too_large", message)
