"""Transport of a request that runs without the connection of a client."""

from __future__ import annotations

from argosy.http_server.response_transport import ClientListener


class DetachedTransport:
    """A `ResponseTransport` whose client never disconnects, and which discards the response."""

    is_body_complete = True
    is_backpressured = False
    is_disconnected = False
    unsent_bytes = 0

    async def read_body(self, max_bytes: int) -> bytes:  # noqa: ARG002 - the handler has the body
        return b""

    async def wait_writable(self) -> None:
        """Return at once."""

    def send_response(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Discard the response."""

    def start_response(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Discard the status and the headers."""

    def start_sized_response(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Discard the status and the headers."""

    def write_nowait(self, data: bytes) -> None:
        """Discard the data."""

    def lend_socket(self) -> int | None:
        return None

    def write_raw_chunks(self, chunks: bytes) -> None:
        """Discard the chunks."""

    def end_response(self) -> None:
        """Do nothing, since there is no connection."""

    def abort(self) -> None:
        """Do nothing, since there is no connection."""

    def set_listener(self, listener: ClientListener | None) -> None:
        """Do nothing, since there is no client that disconnects."""
