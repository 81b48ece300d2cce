"""WebSocket on an upgraded client connection (RFC 6455): whole messages, keepalive, limits, and the closing handshake.

The frames are those of the sans-I/O half of the library `websockets`. Extensions and subprotocols are not negotiated.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from websockets.datastructures import Headers
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import Protocol as FrameProtocol
from websockets.protocol import Side, State
from websockets.server import ServerProtocol

from argosy.http_server.client_connection import ClientConnection
from argosy.http_server.response_transport import ResponseTransport
from argosy.protocol import invalid_request

PING_INTERVAL_S = 20.0
"""Interval of pings. A client from which nothing has arrived since the last ping is disconnected."""
CLOSE_TIMEOUT_S = 5.0
"""Time that a client has to answer a close frame, and to read what was sent before it."""
MAX_AGE_S = 3600.0
"""Age after which a connection is closed between two responses, as OpenAI's are."""
MAX_QUEUED_MESSAGES = 16
"""Messages that wait for the response to an earlier one before reading pauses."""
MAX_QUEUED_BYTES = 64 * 1024
"""Size of the waiting messages above which reading pauses."""
_DATA_OPCODES = frozenset({Opcode.TEXT, Opcode.BINARY, Opcode.CONT})


def build_handshake(path: str, headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers that accept a request for a WebSocket.

    Raises:
        ApiError: 400 if a header of the handshake is missing or invalid.
    """
    pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
    protocol = ServerProtocol()
    response = protocol.accept(Request(path, Headers(pairs)))
    if response.status_code != 101:
        message = f"The WebSocket handshake is invalid: {protocol.handshake_exc}."
        raise invalid_request(message, "Sec-WebSocket-Key")
    return [
        (name.lower().encode(), value.encode())
        for name, value in response.headers.raw_items()
        if name.lower() != "date"
    ]


class WebSocket:
    """Messages of one client. Not thread-safe: use it from one event loop.

    Args:
        connection: The client's connection.
        transport: The handshake's response, on which frames are written.
        max_message_bytes: Maximum size of a message. A larger one closes the connection (1009).
        message_timeout_s: Time within which a message must be complete, or the connection is closed (1008).
        tenant: Tenant whose share of the memory for bodies the messages take.
    """

    def __init__(
        self,
        connection: ClientConnection,
        transport: ResponseTransport,
        *,
        max_message_bytes: int,
        message_timeout_s: float,
        tenant: str | None,
    ) -> None:
        self._connection = connection
        self._tenant = tenant
        self.transport = transport
        """Carries the frames. A disconnect and backpressure are seen here."""
        self._message_timeout_s = message_timeout_s
        self._frames = FrameProtocol(Side.SERVER, max_size=max_message_bytes)
        self._loop = asyncio.get_running_loop()
        self._opened_at = self._last_data_at = self._loop.time()
        self._incomplete: bytearray | None = None
        """The fragments so far of a message that is not complete."""
        self._is_text = False
        """Whether the incomplete message is text."""
        self._partial_bytes = 0
        """Bytes since the last complete frame."""
        self._message_since: float | None = None
        """Time at which the incomplete message began."""
        self._messages: deque[bytes] = deque()
        self._queued_bytes = 0
        self._buffered_bytes = 0
        """Bytes that are counted as unread by the server."""
        self._is_reading_paused = False
        self._is_draining = False
        """Whether the connection closes after the messages that have arrived. Later ones are dropped."""
        self._wakeup = asyncio.Event()
        self._closed = asyncio.Event()
        self._pinged_at: float | None = None
        self._timer = self._loop.call_later(PING_INTERVAL_S, self._on_timer)

    # --- for the handler -------------------------------------------------------------------------

    async def receive(self) -> bytes | None:
        """Return the next message, or None if the connection is closed or has to be."""
        while not self._messages or not self._is_open:
            if self._is_draining or not self._is_open:
                return None
            self._connection.slot.mark_idle()
            self._wakeup.clear()
            await self._wakeup.wait()
        self._connection.slot.mark_busy()
        message = self._messages.popleft()
        self._queued_bytes -= len(message)
        self._update_buffered_bytes()
        return message

    def send(self, message: bytes) -> None:
        """Send a text message. It is discarded if the connection is closed."""
        if self._is_open:
            self._frames.send_text(message)
            self._write()

    async def close(self, code: int = CloseCode.GOING_AWAY, reason: str = "") -> None:
        """Close the connection, and wait until the client has answered or `CLOSE_TIMEOUT_S` has passed."""
        if self._is_open:
            self._frames.send_close(code, reason)
            self._write()
            self._timer.cancel()
            self._timer = self._loop.call_later(CLOSE_TIMEOUT_S, self._connection.abort)
        await self._closed.wait()

    @property
    def _is_open(self) -> bool:
        return self._frames.state is State.OPEN and not self._closed.is_set()

    # --- for the connection ----------------------------------------------------------------------

    def on_data(self, data: bytes) -> None:
        """Read a part of the client's frames."""
        self._last_data_at = self._loop.time()
        self._frames.receive_data(data)
        events = self._frames.events_received()
        self._partial_bytes = 0 if events else self._partial_bytes + len(data)
        for event in events:
            if isinstance(event, Frame) and event.opcode in _DATA_OPCODES:
                self._add_frame(event)
                event.data = b""  # the library's parser keeps the frame until the next one
        self._write()
        if not self._partial_bytes and self._incomplete is None:
            self._message_since = None
        elif self._message_since is None:
            self._message_since = self._last_data_at
        if not self._update_buffered_bytes() and self._buffered_bytes > MAX_QUEUED_BYTES:
            self._fail(CloseCode.TRY_AGAIN_LATER, "the server buffers too many messages")

    def on_writable(self) -> None:
        """Read again, because the client has read what waited for it."""
        self._update_buffered_bytes()

    def on_connection_lost(self) -> None:
        """Handle the end of the connection."""
        self._timer.cancel()
        self._messages.clear()
        self._incomplete = None
        self._queued_bytes = self._partial_bytes = 0
        self._update_buffered_bytes()
        self._closed.set()
        self._wakeup.set()

    def close_when_idle(self) -> None:
        """Let `receive` return None once the messages that have arrived are answered."""
        self._is_draining = True
        self._wakeup.set()

    # --- internal --------------------------------------------------------------------------------

    def _add_frame(self, frame: Frame) -> None:
        if self._incomplete is None:
            self._incomplete, self._is_text = bytearray(), frame.opcode is Opcode.TEXT
        self._incomplete += frame.data
        if not frame.fin:
            return
        message, self._incomplete, self._message_since = bytes(self._incomplete), None, None
        if self._is_draining:
            return
        try:
            if self._is_text:
                message.decode()
        except UnicodeDecodeError:
            self._fail(CloseCode.INVALID_DATA, "a text message is not valid UTF-8")
            return
        self._messages.append(message)
        self._queued_bytes += len(message)
        self._wakeup.set()

    def _update_buffered_bytes(self) -> bool:
        """Count the buffered bytes, and pause or resume reading.

        Returns:
            Whether the bytes of all connections are within their limit.
        """
        buffered_bytes = self._queued_bytes + len(self._incomplete or b"") + self._partial_bytes
        added_bytes = buffered_bytes - self._buffered_bytes
        self._buffered_bytes = buffered_bytes
        self._is_reading_paused = (
            self._queued_bytes > MAX_QUEUED_BYTES
            or len(self._messages) >= MAX_QUEUED_MESSAGES
            or self._connection.is_backpressured  # each ping would add a pong to what waits
        )
        # Each time, since a response that waits for its client resumes reading too.
        if self._is_reading_paused:
            self._connection.pause_reading()
        else:
            self._connection.resume_reading()
        return self._connection.server_state.add_unread_bytes(added_bytes, self._tenant)

    def _fail(self, code: CloseCode, reason: str) -> None:
        self._frames.fail(code, reason)
        self._write()

    def _write(self) -> None:
        """Write pending frames. After the last one, close the connection."""
        for data in self._frames.data_to_send():
            if data:
                self.transport.write_nowait(data)
            else:
                self._timer.cancel()
                self._timer = self._loop.call_later(CLOSE_TIMEOUT_S, self._connection.abort)
                # The transport sends what it has coalesced in a callback that was scheduled before this one.
                self._loop.call_soon(self._connection.transport.close)
                self._wakeup.set()

    def _on_timer(self) -> None:
        """Ping the client, and end connections that are dead, too slow or too old."""
        now = self._loop.time()
        self._timer = self._loop.call_later(PING_INTERVAL_S, self._on_timer)
        if self._is_reading_paused:  # neither pongs nor the rest of a message can arrive
            self._last_data_at = now
            self._message_since = None if self._message_since is None else now
        if self._message_since is not None and now - self._message_since > self._message_timeout_s:
            seconds = self._message_timeout_s
            self._fail(
                CloseCode.POLICY_VIOLATION, f"a message was not complete after {seconds:g} s"
            )
            return
        if self._pinged_at is not None and self._last_data_at < self._pinged_at:
            self._fail(CloseCode.INTERNAL_ERROR, "the client answered no ping")
            return
        if now - self._opened_at > MAX_AGE_S:
            self.close_when_idle()
        self._pinged_at = now
        self._frames.send_ping(b"")
        self._write()


WebSocketOpener: TypeAlias = Callable[
    [Callable[[], list[tuple[bytes, bytes]]], int, float, str | None], WebSocket
]
"""Accepts a handshake. Gets a function that returns the headers of the response, the maximum size of a message, the
time within which a message must be complete, and the tenant. Raises ApiError: 400 if the client has sent more than the
handshake, 503 if the server shuts down."""
