"""HTTP/1.1 connection to a replica, parsed with httptools, which calls back for every piece of a response.

No task and no queue sits between a replica's socket and the consumer of its response. `data_received` calls the
listener directly. A listener that cannot continue pauses reading, so that TCP slows the replica down to the speed of
the client and no memory grows.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from argosy.http_server import PacedProtocol
from argosy.policy import AttemptOutcome
from argosy.policy.placement import AttemptEnding
from argosy.process import enable_tcp_keepalive

MAX_OVERHEAD_BYTES = 64 * 1024
"""Maximum number of consecutive bytes that are no body: heads, interim responses, chunk sizes, trailers."""

TCP_USER_TIMEOUT_S = 20
"""Seconds without a TCP acknowledgement after which a replica's machine counts as dead.

A running machine acknowledges packets whatever its processes do. The timeout also applies to sent data that the
replica does not read.
"""

LONG_PAUSE_S = 10.0
"""Seconds without reading after which a server may have closed the connection because of this gateway."""

MAX_REASON_CHARS = 300
"""Maximum length of an error message in characters. A replica may have supplied part of it, and it is logged."""


class UpstreamError(Exception):
    """Failure of the transport to a replica: no connection, a lost connection, or a response that is not HTTP."""

    ending = AttemptEnding.LOST
    """How an attempt ends that fails with this error."""

    def __init__(
        self,
        message: str,
        *,
        before_response: bool = False,
        outcome: AttemptOutcome | None = AttemptOutcome.FAILURE,
    ) -> None:
        super().__init__(message[:MAX_REASON_CHARS])
        self.before_response = before_response
        """Whether the failure happened before any part of a response arrived."""
        self.outcome = outcome
        """Outcome to record for the replica; None if the error says nothing about the replica."""


class ResponseListener(Protocol):
    """Callbacks for a response, in this order: one `on_head`, any `on_body`, then `on_end` or `on_failure`."""

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Handle the status and the headers, whose names are in lower case."""

    def on_body(self, body: bytes) -> None:
        """Handle a piece of the body, as it arrived."""

    def on_end(self) -> None:
        """Handle the end of a complete response."""

    def on_failure(self, error: UpstreamError) -> None:
        """Handle an error that leaves the response incomplete."""


class UpstreamConnection(PacedProtocol):
    """HTTP/1.1 connection to a replica, with one request at a time."""

    def __init__(self, release: Callable[[UpstreamConnection], None]) -> None:
        """Create a connection that calls `release` whenever a response is complete."""
        self._release = release
        self.transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._listener: ResponseListener | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._is_framed = False
        """Whether the response has a length or is chunked. Otherwise it ends when the connection closes."""
        self._at_chunk_boundary = self._ends_with_crlf = False
        """Whether the last chunk is complete, and whether the last bytes read end as a chunk does."""
        self._status = 0
        self._overhead_bytes = 0
        """Number of bytes since the last piece of a body."""
        self._paused_at: float | None = None
        self._was_long_paused = False
        """Whether reading of the current response was paused for `LONG_PAUSE_S`."""
        self._is_message_complete = False
        """Whether the end of the response was parsed. It is handled after the rest of the received bytes."""
        self.closed = False

    # --- called by the users of the connection ---------------------------------------------------

    def send_request(self, request: bytes, listener: ResponseListener) -> None:
        """Send a request whose response goes to `listener`."""
        self._listener = listener
        self._status = self._overhead_bytes = 0
        self._was_long_paused = False
        assert self.transport is not None  # noqa: S101 - `Upstream` returns only connected connections
        self.transport.write(request)

    def pause_reading(self) -> None:
        """Stop reading from the replica until `resume_reading`."""
        if self.transport is not None and not self.closed:
            self._paused_at = self._paused_at or time.monotonic()
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Continue reading from the replica."""
        if self.transport is not None and not self.closed:
            self._record_pause()
            self.update_reading()

    def update_reading(self) -> None:
        """Read from the replica, unless reading is paused or received input waits for its turn."""
        if self.transport is None or self.closed:
            return
        if self._paused_at is not None or self.waits_for_turn:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def lend_socket(self) -> int | None:
        """Stop reading and return the socket's descriptor, from which native code reads whole chunks.

        Returns:
            The descriptor, until `reclaim_socket`; None if the connection uses TLS or is in the middle of a chunk.
        """
        transport = self.transport
        if (
            transport is None
            or self.closed
            or self.waits_for_turn
            or not (self._at_chunk_boundary and self._ends_with_crlf and self._listener)
        ):
            return None
        if transport.get_extra_info("ssl_object") is not None:
            return None
        transport.pause_reading()
        return cast("int", transport.get_extra_info("socket").fileno())

    def reclaim_socket(self, unparsed: bytes) -> None:
        """Continue reading a lent socket, after the bytes `unparsed` that the borrower read and did not use."""
        self.resume_reading()
        if unparsed and not self.closed:
            self.data_received(unparsed)

    def close(self) -> None:
        """Close an idle connection, with a TLS shutdown if it uses TLS."""
        self.closed = True
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Close the connection at once, so that the replica notices. The listener gets no more calls."""
        self._listener = None
        self.closed = True
        self.take_unparsed()
        if self.transport is not None:
            self.transport.abort()

    # --- called by asyncio and the parser --------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Configure the socket of a new connection."""
        self.transport = cast("asyncio.Transport", transport)
        peer: socket.socket | None = transport.get_extra_info("socket")
        if peer is not None and peer.family != socket.AF_UNIX:
            enable_tcp_keepalive(peer, TCP_USER_TIMEOUT_S)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes and fail the response if they are malformed."""
        if len(data) > self.max_unpaced_bytes:
            self.pace_input(data)
            return
        if (
            self._listener is None
        ):  # data without a request, so requests and responses no longer match
            self.abort()
            return
        self._overhead_bytes += len(data)
        self._ends_with_crlf = data.endswith(b"\r\n")
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._is_message_complete:
                self._fail_response(f"the replica's response is not valid HTTP ({error})")
                return
            self.closed = True  # the response is complete, and the bytes after it belong to none
        if self._is_message_complete:
            self._finish_response()
        elif self._overhead_bytes > MAX_OVERHEAD_BYTES:
            self._fail_response("the replica's response has too many headers")

    def connection_lost(self, exc: Exception | None) -> None:
        """End or fail the current response after the connection closed."""
        if rest := self.take_unparsed():
            self.max_unpaced_bytes = math.inf
            self.data_received(rest)
        del self._parser  # breaks the reference cycle between the parser and its callbacks
        self.closed = True
        if self._listener is None:
            return
        if exc is None and self._status >= 200 and not self._is_framed:
            self._finish_response()
            return
        self._record_pause()
        outcome = None if self._was_long_paused else AttemptOutcome.FAILURE
        self._fail_response(
            f"the replica closed the connection ({exc or 'before the end'})", outcome
        )

    def on_message_begin(self) -> None:
        """Handle the beginning of a response. A second one to the same request makes the connection unusable."""
        if self._is_message_complete:
            self.closed = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header."""
        lowered = name.lower()
        if lowered in {b"content-length", b"transfer-encoding"}:
            self._is_framed = True
        self._headers.append((lowered, value))

    def on_headers_complete(self) -> None:
        """Pass status and headers to the listener, unless the response is an interim one (1xx)."""
        status, headers = self._parser.get_status_code(), self._headers
        self._headers = []
        if status < 200:
            self._is_framed = (
                False  # the framing headers of an interim response do not apply to the final one
            )
        elif self._listener is not None and not self._is_message_complete:
            self._status = status
            self._listener.on_head(status, headers)

    def on_body(self, body: bytes) -> None:
        """Pass a piece of the body to the listener."""
        self._overhead_bytes = 0
        if self._listener is not None and not self._is_message_complete:
            self._listener.on_body(body)

    def on_chunk_header(self) -> None:
        """Record that a chunk started."""
        self._at_chunk_boundary = False

    def on_chunk_complete(self) -> None:
        """Record that a chunk is complete."""
        self._at_chunk_boundary = True

    def on_message_complete(self) -> None:
        """Record that the response is complete, unless it is an interim one (1xx)."""
        if self._parser.get_status_code() >= 200:
            self._is_message_complete = True
            if not self._parser.should_keep_alive():
                self.closed = True

    def _finish_response(self) -> None:
        """Release the connection and report the end of the response to the listener."""
        if self._unparsed:  # the bytes after the response belong to none
            self.take_unparsed()
            self.closed = True
        listener, self._listener = self._listener, None
        self._is_message_complete = self._is_framed = self._at_chunk_boundary = False
        if self.closed and self.transport is not None:
            self.transport.abort()
        if (
            self._paused_at is not None
        ):  # a pause was for this response and must not delay the next one
            self.resume_reading()
        self._release(self)
        if listener is not None:
            listener.on_end()

    def _record_pause(self) -> None:
        paused_at, self._paused_at = self._paused_at, None
        if paused_at is not None and time.monotonic() - paused_at >= LONG_PAUSE_S:
            self._was_long_paused = True

    def _fail_response(
        self, message: str, outcome: AttemptOutcome | None = AttemptOutcome.FAILURE
    ) -> None:
        """Abort the connection and report the failure to the listener."""
        listener, before_response = self._listener, self._status == 0
        self.abort()
        if listener is not None:
            listener.on_failure(
                UpstreamError(message, before_response=before_response, outcome=outcome)
            )
