"""One try to get an answer from one replica: its head, then its body to whoever takes it, then how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from argosy.gateway.upstream.connection import UpstreamConnection, UpstreamError
from argosy.gateway.upstream.upstream import Upstream
from argosy.http_server import JSON_CONTENT_TYPE

_SAFE_CONTENT_TYPES = frozenset(
    {JSON_CONTENT_TYPE, b"text/plain", b"text/event-stream", b"application/openmetrics-text"}
)
"""Content types that no browser takes for a page."""
STALE_CONNECTION_WINDOW_S = 1.0
"""A connection that fails within so long of a request may have been closed before that came."""
MAX_BUFFERED_BYTES = 64 * 1024 * 1024
"""Most bytes of an answer that are kept until somebody takes them."""


class ResponseTooLargeError(UpstreamError):
    """The replica gives more than can be kept, which may be what it was asked for."""

    def __init__(self, message: str) -> None:
        super().__init__(message, outcome=None)


class UpstreamResponse:
    """A `Sink` whose end can be awaited. Body pieces that come before `deliver` are kept for it."""

    def __init__(self, clock: Callable[[], float], max_buffered_bytes: int | None = None) -> None:
        """`most`: bytes of its answer that are kept until somebody takes them; None: as of any."""
        loop = asyncio.get_running_loop()
        self.status: asyncio.Future[int] = loop.create_future()
        """The status. Raises UpstreamError when none will come."""
        self.end_of_body: asyncio.Future[None] = loop.create_future()
        """Done when the answer is whole. Raises UpstreamError when it will not be."""
        self.is_request_sent = False
        """A replica was sent the request."""
        self.headers: dict[bytes, bytes] = {}
        self.last_activity_at = clock()
        """When something came last."""
        self._clock = clock
        self._max_buffered_bytes = max_buffered_bytes or MAX_BUFFERED_BYTES
        self._connection: UpstreamConnection | None = None
        self._buffered: list[bytes] = []
        self._buffered_bytes = 0
        self._next_piece: asyncio.Future[None] | None = None
        """Somebody waits for the next piece of the body."""
        self._on_piece: Callable[[bytes], None] | None = None
        """Where the body goes; None: it is kept for `deliver`."""

    async def send(self, upstream: Upstream, request: bytes) -> None:
        """Send the request on a kept connection, or a new one. Raises UpstreamError when there is none."""
        kept = upstream.take_idle_connection()
        self._connection = kept or await upstream.connect()
        self.is_request_sent = True
        self.last_activity_at = self._clock()
        self._connection.send_request(request, self)
        if kept is None:
            return
        try:
            await self.status
        except UpstreamError as error:
            if (
                not error.before_response
                or self._clock() - self.last_activity_at > STALE_CONNECTION_WINDOW_S
            ):
                raise
            # A kept connection that the replica closed meanwhile: it never saw the request, unless it is gone with it.
            self.status = asyncio.get_running_loop().create_future()
            self.end_of_body = asyncio.get_running_loop().create_future()
            self._connection = await upstream.connect()
            self._connection.send_request(request, self)

    def stream_body(self, on_piece: Callable[[bytes], None]) -> None:
        """Give the body to `take`, piece by piece, from the first."""
        early, self._buffered = self._buffered, []
        self._on_piece = on_piece
        for piece in early:
            self.on_body(piece)
        if self.end_of_body.done():
            self._release_callback()

    async def wait_for_piece(self, is_wanted: Callable[[bytes], bool]) -> None:
        """Wait for the first piece of the body that is `wanted`, before `deliver`, or its end. Raises UpstreamError."""
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
        """The whole body. Raises UpstreamError."""
        await self.end_of_body
        return b"".join(self._buffered)

    @property
    def content_type(self) -> bytes:
        """The content type, as far as the answer may be passed on as that: a page would speak to us as its reader."""
        told = self.headers.get(b"content-type", JSON_CONTENT_TYPE)
        return (
            told
            if told.partition(b";")[0].strip().lower() in _SAFE_CONTENT_TYPES
            else b"text/plain"
        )

    def pause_reading(self) -> None:
        """Take nothing more for now."""
        if self._connection is not None:
            self._connection.pause_reading()

    def resume_reading(self) -> None:
        """Go on."""
        if self._connection is not None:
            self._connection.resume_reading()

    def lend_socket(self) -> int | None:
        """See `Connection`; None where there is none."""
        return None if self._connection is None else self._connection.lend_socket()

    def reclaim_socket(self, unparsed: bytes) -> None:
        """See `Connection`."""
        if self._connection is not None:
            self._connection.reclaim_socket(unparsed)

    def abort(self, reason: str) -> None:
        """Close the connection; whoever waits gets an UpstreamError with this reason."""
        self._abort_with(UpstreamError(reason))

    def finish_early(self) -> None:
        """Its answer is whole although the replica would go on: close the connection, and end well."""
        if self._connection is not None:
            self._connection.abort()
        self.on_end()

    # --- what the connection calls ---------------------------------------------------------------

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """See `Sink`."""
        self.last_activity_at = self._clock()
        self.headers = dict(headers)
        if not self.status.done():
            self.status.set_result(status)

    def on_body(self, body: bytes) -> None:
        """See `Sink`."""
        self.last_activity_at = self._clock()
        try:
            (self._on_piece or self._buffer_piece)(body)
        except (ValueError, LookupError) as error:
            self._on_piece = _discard_piece
            if self.end_of_body.done():  # all of it came before `deliver`
                self.end_of_body = asyncio.get_running_loop().create_future()
            self.abort(f"the replica's stream cannot be read ({error})")

    def on_end(self) -> None:
        """See `Sink`."""
        self._connection = None
        self._release_callback()
        if not self.end_of_body.done():
            self.end_of_body.set_result(None)

    def on_failure(self, error: UpstreamError) -> None:
        """See `Sink`."""
        self._connection = None
        self._release_callback()
        for future in (self.status, self.end_of_body):
            if not future.done():
                future.set_exception(error)
                future.exception()  # it may be that nobody asks

    def _abort_with(self, error: UpstreamError) -> None:
        if self._connection is not None:
            self._connection.abort()
        self.on_failure(error)

    def _release_callback(self) -> None:
        """Of whoever took the body: it is over, and they may have this attempt."""
        if self._on_piece is not None:
            self._on_piece = _discard_piece

    def _buffer_piece(self, piece: bytes) -> None:
        self._buffered_bytes += len(piece)
        if self._buffered_bytes > self._max_buffered_bytes:
            self._abort_with(
                ResponseTooLargeError(
                    f"the replica's answer is larger than {self._max_buffered_bytes} bytes"
                )
            )
        else:
            self._buffered.append(piece)
            if self._next_piece is not None and not self._next_piece.done():
                self._next_piece.set_result(None)


def _discard_piece(body: bytes) -> None:
    """What comes after something that cannot be read is of no use."""
