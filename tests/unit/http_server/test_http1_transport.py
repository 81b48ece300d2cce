"""HTTP/1.1 transport: writes of one loop iteration are coalesced and never delayed further."""

from __future__ import annotations

import asyncio

import pytest

from argosy.http_server.client_connection import ClientConnection, HttpServerState
from argosy.http_server.connection_limiter import ConnectionLimiter, ConnectionSlot
from argosy.http_server.http1_transport import (
    MAX_COALESCED_BYTES,
    MAX_PREFETCHED_BODY_BYTES,
    Http1Transport,
)

EVENTS = [(b"content-type", b"text/event-stream")]


class RecordingTransport(asyncio.Transport):
    """Records each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:  # type: ignore[override] # only bytes are written
        self.writes.append(data)


class FakeConnection(ClientConnection):
    """A connection whose transport records its writes."""

    def __init__(self) -> None:
        limiter = ConnectionLimiter(1, None, lambda _: False, lambda _: None, lambda: 0.0)
        super().__init__(HttpServerState(), ConnectionSlot(limiter, None))
        self.is_reading_paused = False
        self.written_to = RecordingTransport()
        self.transport: asyncio.Transport = self.written_to

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False

    def create_transport(self) -> Http1Transport:
        return Http1Transport(self, lambda _: None, keep_alive=True, expects_continue=False)


def started_response() -> tuple[Http1Transport, list[bytes]]:
    """Start a response and return its transport and the recorded writes."""
    connection = FakeConnection()
    transport = connection.create_transport()
    transport.start_response(200, EVENTS)
    return transport, connection.written_to.writes


async def test_head_and_first_chunk_are_one_write() -> None:
    transport, writes = started_response()
    transport.write_nowait(b"first")
    await asyncio.sleep(0)
    assert len(writes) == 1
    assert writes[0].endswith(b"\r\n\r\n5\r\nfirst\r\n")


async def test_head_does_not_wait_for_a_chunk() -> None:
    _, writes = started_response()
    await asyncio.sleep(0)
    assert len(writes) == 1
    assert writes[0].endswith(b"chunked\r\n\r\n")


async def test_last_chunk_and_end_are_one_write() -> None:
    transport, writes = started_response()
    await asyncio.sleep(0)
    transport.write_nowait(b"last")
    transport.end_response()
    assert writes[1:] == [b"4\r\nlast\r\n0\r\n\r\n"]
    await asyncio.sleep(0)
    assert len(writes) == 2


async def test_coalesced_writes_are_bounded() -> None:
    transport, writes = started_response()
    for _ in range(100):
        transport.write_nowait(bytes(MAX_COALESCED_BYTES))
    assert sum(map(len, writes)) > 100 * MAX_COALESCED_BYTES
    assert max(map(len, writes)) < 2 * MAX_COALESCED_BYTES


async def test_reading_resumes_after_a_large_body_is_complete() -> None:
    """Otherwise a disconnect would go unnoticed."""
    connection = FakeConnection()
    transport = connection.create_transport()
    transport.on_body(bytes(MAX_PREFETCHED_BODY_BYTES + 1))
    assert connection.is_reading_paused
    transport.on_body_complete()
    assert not connection.is_reading_paused


@pytest.mark.parametrize("value", [b"a\r\nx-other: b", b"a\nb", b"a\rb"])
async def test_header_with_a_line_break_is_rejected(value: bytes) -> None:
    connection = FakeConnection()
    transport = connection.create_transport()
    with pytest.raises(ValueError, match="line break"):
        transport.send_response(200, [(b"x-some", value), (b"content-length", b"0")], b"")
    await asyncio.sleep(0)
    assert not connection.written_to.writes
