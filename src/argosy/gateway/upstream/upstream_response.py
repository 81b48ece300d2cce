"""Response to a request to one replica, whose status and body a coroutine can await, also in a single call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from argosy.gateway.upstream.connection import UpstreamConnection, UpstreamError
from argosy.gateway.upstream.upstream import Upstream
from argosy.http_server import JSON_CONTENT_TYPE
from argosy.policy.placement import AttemptEnding

_SAFE_CONTENT_TYPES = frozenset(
    {JSON_CONTENT_TYPE, b"text/plain", b"text/event-stream", b"application/openmetrics-text"}
)
"""Content types that no browser renders as a page."""
STALE_CONNECTION_WINDOW_S = 1.0
"""Time after a request within which a failed idle connection may have been closed before the request arrived."""
MAX_BUFFERED_BYTES = 64 * 1024 * 1024
"""Default limit in bytes on the part of a body that is buffered until it is read."""
MAX_FETCHED_BYTES = 4 * 1024 * 1024
"""Maximum size of a response in bytes. The model lists of hosted APIs have about one megabyte."""


class ResponseTooLargeError(UpstreamError):
    """The response exceeds the buffer. The request may have asked for it, so the replica is not at fault."""

    def __init__(self, message: str) -> None:
        super().__init__(message, outcome=None)


class StreamPausedError(UpstreamError):
    """The gateway ended the response although its replica works. It is resumed later, or by another replica."""

    ending = AttemptEnding.PAUSED

    def __init__(self, reason: str) -> None:
        super().__init__(reason, outcome=None)


class UpstreamResponse:
    """A `ResponseListener` whose status and end can be awaited. The body is buffered until `stream_body`."""

    is_request_sent = False
    """Whether the request was sent to the replica."""
    _connection: UpstreamConnection | None = None
    _buffered_bytes = 0
    _next_piece: asyncio.Future[None] | None = None
    """Done when the next piece of the body arrives."""
    _on_piece: Callable[[bytes], None] | None = None
    """Consumer of the body; None while the body is buffered."""

    def __init__(self, clock: Callable[[], float], max_buffered_bytes: int | None = None) -> None:
        """Create a response before its request is sent.

        Args:
            clock: Monotonic clock in seconds.
            max_buffered_bytes: Limit on buffered bytes; None for `MAX_BUFFERED_BYTES`.
        """
        loop = asyncio.get_running_loop()
        self.status: asyncio.Future[int] = loop.create_future()
        """HTTP status. Raises UpstreamError if no response arrives."""
        self.end_of_body: asyncio.Future[None] = loop.create_future()
        """Done when the response is complete. Raises UpstreamError if it stays incomplete."""
        self.headers: dict[bytes, bytes] = {}
        self.last_activity_at = clock()
        """Time at which the last part of the response arrived, or the request was sent."""
        self._clock = clock
        self._max_buffered_bytes = max_buffered_bytes or MAX_BUFFERED_BYTES
        self._buffered: list[bytes] = []

    async def send(self, upstream: Upstream, request: bytes) -> None:
        """Send the request on an idle connection, or on a new one.

        Raises:
            UpstreamError: No connection could be opened, or an idle connection failed after the replica may have
                seen the request.
        """
        idle = upstream.take_idle_connection()
        self._connection = idle or await upstream.connect()
        self.is_request_sent = True
        self.last_activity_at = self._clock()
        self._connection.send_request(request, self)
        if idle is None:
            return
        try:
            await self.status
        except UpstreamError as error:
            if (
                not error.before_response
                or self._clock() - self.last_activity_at > STALE_CONNECTION_WINDOW_S
            ):
                raise
            # The replica closed the idle connection meanwhile. It never saw the request, unless it crashed on it.
            self.status = asyncio.get_running_loop().create_future()
            self.end_of_body = asyncio.get_running_loop().create_future()
            self._connection = await upstream.connect()
            self._connection.send_request(request, self)

    def stream_body(self, on_piece: Callable[[bytes], None]) -> None:
        """Pass the body to `on_piece`, piece by piece, from the first byte."""
        buffered, self._buffered = self._buffered, []
        self._on_piece = on_piece
        for piece in buffered:
            self.on_body(piece)
        if self.end_of_body.done():
            self._release_callback()

    async def wait_for_piece(self, is_wanted: Callable[[bytes], bool]) -> None:
        """Wait until a buffered piece satisfies `is_wanted`, or until the end of the body. Raises UpstreamError."""
        seen = 0
        while not any(map(is_wanted, self._buffered[seen:])):
            seen = len(self._buffered)
            if self.end_of_body.done():
                await self.end_of_body
                return
            self._next_piece = asyncio.get_running_loop().create_future()
            await asyncio.wait(
                (self._next_piece, self.end_of_body), return_when=asyncio.FIRST_COMPLETED
            )

    async def read_body(self) -> bytes:
        """Wait for the whole body and return it. Raises UpstreamError."""
        await self.end_of_body
        return b"".join(self._buffered)

    @property
    def content_type(self) -> bytes:
        """Content type to forward. Anything but JSON, SSE or plain text is downgraded to `text/plain`.

        HTML from a replica would run in the gateway's origin.
        """
        content_type = self.headers.get(b"content-type", JSON_CONTENT_TYPE)
        return (
            content_type
            if content_type.partition(b";")[0].strip().lower() in _SAFE_CONTENT_TYPES
            else b"text/plain"
        )

    def pause_reading(self) -> None:
        """Stop reading from the replica until `resume_reading`."""
        if self._connection is not None:
            self._connection.pause_reading()

    def resume_reading(self) -> None:
        """Continue reading from the replica."""
        if self._connection is not None:
            self._connection.resume_reading()

    def lend_socket(self) -> int | None:
        """Lend the connection's socket (see `UpstreamConnection.lend_socket`); None without a connection."""
        return None if self._connection is None else self._connection.lend_socket()

    def reclaim_socket(self, unparsed: bytes) -> None:
        """Continue reading a lent socket, after the bytes `unparsed` that the borrower read and did not use."""
        if self._connection is not None:
            self._connection.reclaim_socket(unparsed)

    def abort(self, reason: str | UpstreamError) -> None:
        """Close the connection. All waiters get an UpstreamError with this reason, or this error."""
        if self._connection is not None:
            self._connection.abort()
        self.on_failure(UpstreamError(reason) if isinstance(reason, str) else reason)

    def finish_early(self) -> None:
        """Close the connection and end the response as complete, although the replica would continue."""
        if self._connection is not None:
            self._connection.abort()
        self.on_end()

    # --- called by the connection ----------------------------------------------------------------

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Record status and headers."""
        self.last_activity_at = self._clock()
        self.headers = dict(headers)
        if not self.status.done():
            self.status.set_result(status)

    def on_body(self, body: bytes) -> None:
        """Pass a piece of the body to its consumer, or buffer it. Abort if the consumer cannot read it."""
        self.last_activity_at = self._clock()
        try:
            (self._on_piece or self._buffer_piece)(body)
        except (ValueError, LookupError) as error:
            self._on_piece = _discard_piece
            if self.end_of_body.done():  # the whole body was buffered before `stream_body`
                self.end_of_body = asyncio.get_running_loop().create_future()
            self.abort(f"the replica's stream cannot be read ({error})")

    def on_end(self) -> None:
        """Mark the response as complete."""
        self._connection = None
        self._release_callback()
        if not self.end_of_body.done():
            self.end_of_body.set_result(None)

    def on_failure(self, error: UpstreamError) -> None:
        """Fail the futures that are not done."""
        self._connection = None
        self._release_callback()
        for future in (self.status, self.end_of_body):
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks the exception as retrieved, since no coroutine may be waiting

    def _release_callback(self) -> None:
        """Drop the consumer of the body. It may refer to this object, which would form a reference cycle."""
        if self._on_piece is not None:
            self._on_piece = _discard_piece

    def _buffer_piece(self, piece: bytes) -> None:
        self._buffered_bytes += len(piece)
        if self._buffered_bytes > self._max_buffered_bytes:
            self.abort(
                ResponseTooLargeError(
                    f"the replica's response is larger than {self._max_buffered_bytes} bytes"
                )
            )
        else:
            self._buffered.append(piece)
            if self._next_piece is not None and not self._next_piece.done():
                self._next_piece.set_result(None)


def _discard_piece(body: bytes) -> None:
    """Ignore a piece of the body after a failure."""


async def fetch_path(
    upstream: Upstream, path: bytes, *headers: tuple[bytes, bytes]
) -> tuple[int, bytes]:
    """Send a GET request and return status and body. Raises UpstreamError."""
    return await fetch_response(upstream, upstream.build_request(b"GET", path, b"", [*headers]))


async def fetch_response(upstream: Upstream, request: bytes) -> tuple[int, bytes]:
    """Send an encoded request and return status and body. Raises UpstreamError."""
    response = UpstreamResponse(time.monotonic, MAX_FETCHED_BYTES)
    try:
        await response.send(upstream, request)
        return await response.status, await response.read_body()
    except BaseException:
        response.abort("the request was cancelled")
        raise
