"""Interfaces between an HTTP exchange and the connection that carries it or a translator of its response."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from argosy.protocol import ApiError

Headers = list[tuple[bytes, bytes]]


class DisconnectedError(Exception):
    """The client has disconnected."""


class ClientListener:
    """Callbacks that report write progress. This class ignores them."""

    def on_backpressure(self) -> None:
        """Handle a client that reads too slowly: pause writing."""

    def on_writable(self) -> None:
        """Handle a drained write buffer: resume writing."""

    def on_half_close(self) -> None:
        """Handle a client that has closed its sending side.

        The client may have disconnected. The listener writes data that is valid within the response as a probe.
        """

    def on_disconnect(self) -> None:
        """Handle the disconnect of the client."""


class ResponseTransport:
    """Connection of one request. Data written after the client has disconnected is discarded without an error.

    This class has no connection: it discards the response, and its client never disconnects.
    """

    __slots__ = ()

    @property
    def is_body_complete(self) -> bool:
        """Whether the whole request body has arrived."""
        return True

    @property
    def is_backpressured(self) -> bool:
        """Whether the client reads more slowly than data is written."""
        return False

    @property
    def unsent_bytes(self) -> int:
        """Bytes written and not yet sent to the client."""
        return 0

    @property
    def is_disconnected(self) -> bool:
        """Whether the client has disconnected."""
        return False

    async def read_body(self, max_bytes: int, tenant: str | None = None) -> bytes:  # noqa: ARG002 - for subclasses
        """Return the whole body, or more than `max_bytes` bytes of a larger body.

        Args:
            max_bytes: Limit on the body.
            tenant: Tenant whose share of the memory for bodies it takes; None if the sender is unknown.

        Raises:
            DisconnectedError: The client has disconnected.
            ApiError: 503 if the server buffers too many request bodies.
        """
        return b""

    async def read_part(self) -> bytes:
        """Return what has arrived of the body since the last call, after waiting for some; empty at its end.

        Raises:
            DisconnectedError: The client has disconnected before the end.
        """
        return b""

    def count_body_bytes(self, byte_count: int) -> None:
        """Count bytes, which may be negative, of a body that was read and is not parsed yet as bytes in transit."""

    async def wait_writable(self) -> None:
        """Wait until the client has caught up or has disconnected."""

    def send_response(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a complete response. `headers` contain its length."""

    def start_response(self, status: int, headers: Headers) -> None:
        """Start a response of unknown length. Under HTTP/1.0 the end of the connection ends the response."""

    def start_sized_response(self, status: int, headers: Headers) -> None:
        """Start a response whose length is in `headers`."""

    def write_nowait(self, data: bytes) -> None:
        """Send a part of the response in progress."""

    def lend_socket(self) -> int | None:
        """Return the socket's file descriptor for native code that sends HTTP chunks.

        Returns None over TLS, while earlier data is unsent, or if the response is not chunked.
        """
        return None

    def write_raw_chunks(self, chunks: bytes) -> None:
        """Send HTTP chunks that the borrower of the socket could not send."""

    def end_response(self) -> None:
        """Complete the response."""

    def abort(self) -> None:
        """Close the connection at once and discard unsent data."""

    def set_listener(self, listener: ClientListener | None) -> None:
        """Set the only listener for write progress, or remove it."""


@dataclass(frozen=True, slots=True)
class ResponseDialect:
    """Shape of errors and headers in one dialect of the API."""

    encode_error: Callable[[ApiError, str], bytes]
    """Encodes the body of an error response, with the request's id."""
    translate_headers: Callable[[Headers], Headers]
    """Returns the headers with which a response is sent."""


class ResponseTranslator(Protocol):
    """Translator of one response from the OpenAI chat or completions API, sent as a whole or as a stream."""

    @property
    def stream_content_type(self) -> bytes:
        """Content type of a translated stream."""

    async def translate_response(self, status: int, body: bytes, request_id: str) -> bytes:
        """Translate a whole response.

        Raises:
            ApiError: 502 if the body is no response of the API.
        """

    def translate_events(self, events: bytes) -> bytes:
        """Translate a part of a stream of server-sent events.

        Raises:
            ValueError: An event is malformed.
        """

    def translate_comment(self, comment: bytes) -> bytes:
        """Translate a comment that keeps an idle stream alive."""

    def translate_heartbeat(self, event: bytes) -> bytes:
        """Translate an event without content that keeps an idle stream alive."""

    async def finish_stream(self) -> bytes:
        """Return the last events of a stream, which are sent when all others have been."""
