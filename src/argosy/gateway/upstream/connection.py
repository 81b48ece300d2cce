"""One HTTP/1.1 connection to a replica, on httptools, which calls back for every piece of an answer.

There is no task and no queue between a replica's socket and whoever takes its answer: `data_received` calls
the sink, and a sink that cannot go on pauses reading, so a slow client slows its replica through TCP and
no memory grows.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from argosy.policy import AttemptOutcome
from argosy.process import enable_tcp_keepalive

MAX_OVERHEAD_BYTES = 64 * 1024
"""Most bytes in a row that are no body: heads, interim answers, chunk sizes, trailers."""

TCP_USER_TIMEOUT_S = 20
"""A machine that answers no packet for so long is gone: one that is there does, whatever its processes do.

It has to take what it is sent within that time, too.
"""

LONG_PAUSE_S = 10.0
"""A server whose answer was not taken for so long may have given us up, as it does with all that take nothing."""

MAX_REASON_CHARS = 300
"""Characters: it may have been made of what a replica said, and is kept and logged."""


class UpstreamError(Exception):
    """The transport to a replica failed: no connection, a cut, or what is no HTTP."""

    def __init__(
        self,
        message: str,
        *,
        before_response: bool = False,
        outcome: AttemptOutcome | None = AttemptOutcome.FAILURE,
    ) -> None:
        super().__init__(message[:MAX_REASON_CHARS])
        self.before_response = before_response
        """Nothing of an answer had come."""
        self.outcome = outcome
        """What that says of the replica; None: nothing."""


class ResponseListener(Protocol):
    """Takes an answer, called back in order: one `on_head`, any `on_body`, then `on_end` or `on_failure`."""

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Status and headers (names in lower case)."""

    def on_body(self, body: bytes) -> None:
        """A piece of the body, as it came."""

    def on_end(self) -> None:
        """The answer is whole."""

    def on_failure(self, error: UpstreamError) -> None:
        """The answer will not become whole."""


class UpstreamConnection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, release: Callable[[UpstreamConnection], None]) -> None:
        self._release = release
        self.transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._listener: ResponseListener | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._is_framed = False
        """The answer says where it ends."""
        self._at_chunk_boundary = self._ends_with_crlf = False
        """A chunk of the answer was whole; what was read ends like one."""
        self._status = 0
        self._overhead_bytes = 0
        """Bytes since the last piece of a body."""
        self._paused_at: float | None = None
        self._was_long_paused = False
        """The answer was not taken for long."""
        self._is_message_complete = False
        """The answer's end was parsed; what it means waits until all bytes at hand are."""
        self.closed = False

    # --- for whoever asks ------------------------------------------------------------------------

    def send_request(self, request: bytes, listener: ResponseListener) -> None:
        """Send a request; the answer goes to `sink`."""
        self._listener = listener
        self._status = self._overhead_bytes = 0
        self._was_long_paused = False
        assert self.transport is not None  # noqa: S101 - it is connected, or it would not be handed out
        self.transport.write(request)

    def pause_reading(self) -> None:
        """Take nothing more from the replica for now."""
        if self.transport is not None and not self.closed:
            self._paused_at = self._paused_at or time.monotonic()
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Go on taking."""
        if self.transport is not None and not self.closed:
            self._record_pause()
            self.transport.resume_reading()

    def lend_socket(self) -> int | None:
        """Its socket's descriptor, for who reads what comes next instead: whole chunks, until `take_back`.

        None: it is TLS's, or in the middle of a chunk.
        """
        transport = self.transport
        if (
            transport is None
            or self.closed
            or not (self._at_chunk_boundary and self._ends_with_crlf and self._listener)
        ):
            return None
        if transport.get_extra_info("ssl_object") is not None:
            return None
        transport.pause_reading()
        return cast("int", transport.get_extra_info("socket").fileno())

    def reclaim_socket(self, unparsed: bytes) -> None:
        """Read on here: first `rest`, which has been read."""
        self.resume_reading()
        if unparsed and not self.closed:
            self.data_received(unparsed)

    def close(self) -> None:
        """Close an idle connection, with TLS's goodbye where it has one."""
        self.closed = True
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Close at once: the replica sees that nobody waits. The sink hears nothing more."""
        self._listener = None
        self.closed = True
        if self.transport is not None:
            self.transport.abort()

    # --- asyncio's and the parser's --------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self.transport = cast("asyncio.Transport", transport)
        peer: socket.socket | None = transport.get_extra_info("socket")
        if peer is not None and peer.family != socket.AF_UNIX:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            enable_tcp_keepalive(peer, TCP_USER_TIMEOUT_S)

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer."""
        if self._listener is None:  # nobody asked: it is not in step with us
            self.abort()
            return
        self._overhead_bytes += len(data)
        self._ends_with_crlf = data.endswith(b"\r\n")
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._is_message_complete:
                self._fail_response(f"the replica's answer is no HTTP ({error})")
                return
            self.closed = True  # the answer is whole; what came after it is nobody's
        if self._is_message_complete:
            self._finish_response()
        elif self._overhead_bytes > MAX_OVERHEAD_BYTES:
            self._fail_response("the replica's answer has too many headers")

    def connection_lost(self, exc: Exception | None) -> None:
        """Cut, or closed."""
        del self._parser  # which has methods of ours: the two would keep each other
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
        """An answer begins; a second one to the same request puts the connection out of step."""
        if self._is_message_complete:
            self.closed = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        lowered = name.lower()
        if lowered in {b"content-length", b"transfer-encoding"}:
            self._is_framed = True
        self._headers.append((lowered, value))

    def on_headers_complete(self) -> None:
        """Status and headers are whole."""
        status, headers = self._parser.get_status_code(), self._headers
        self._headers = []
        if status < 200:
            self._is_framed = False  # what it says of its length is not of the answer
        elif self._listener is not None and not self._is_message_complete:
            self._status = status
            self._listener.on_head(status, headers)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._overhead_bytes = 0
        if self._listener is not None and not self._is_message_complete:
            self._listener.on_body(body)

    def on_chunk_header(self) -> None:
        """A chunk begins."""
        self._at_chunk_boundary = False

    def on_chunk_complete(self) -> None:
        """It is whole."""
        self._at_chunk_boundary = True

    def on_message_complete(self) -> None:
        """The answer is whole, or was an interim one (1xx)."""
        if self._parser.get_status_code() >= 200:
            self._is_message_complete = True
            if not self._parser.should_keep_alive():
                self.closed = True

    def _finish_response(self) -> None:
        sink, self._listener = self._listener, None
        self._is_message_complete = self._is_framed = self._at_chunk_boundary = False
        if self.closed and self.transport is not None:
            self.transport.abort()
        self.resume_reading()  # whoever paused it has the whole answer; the next one is to be read
        self._release(self)
        if sink is not None:
            sink.on_end()

    def _record_pause(self) -> None:
        paused_at, self._paused_at = self._paused_at, None
        if paused_at is not None and time.monotonic() - paused_at >= LONG_PAUSE_S:
            self._was_long_paused = True

    def _fail_response(
        self, message: str, outcome: AttemptOutcome | None = AttemptOutcome.FAILURE
    ) -> None:
        sink, untouched = self._listener, self._status == 0
        self.abort()
        if sink is not None:
            sink.on_failure(UpstreamError(message, before_response=untouched, outcome=outcome))
