"""What is sent of an answer goes out with what else is sent at that moment, and never waits for more."""

from __future__ import annotations

import asyncio

import pytest

from argosy.http_server.http1_transport import (
    MAX_COALESCED_BYTES,
    MAX_PREFETCHED_BODY_BYTES,
    Http1Transport,
)

SCOPE = {"method": "POST", "http_version": "1.1"}
EVENTS = [(b"content-type", b"text/event-stream")]


class Kernel(asyncio.Transport):
    """Notes each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:  # type: ignore[override] # as it is called
        self.writes.append(data)


class Client:
    """An `Owner`."""

    default_headers = ()
    is_backpressured = False

    def __init__(self) -> None:
        self.held = False
        self.kernel = Kernel()
        self.transport: asyncio.Transport = self.kernel

    def add_unread_bytes(self, byte_count: int) -> bool:
        del byte_count
        return True

    def pause_reading(self) -> None:
        self.held = True

    def resume_reading(self) -> None:
        self.held = False

    def on_response_complete(self, transport: Http1Transport) -> None:
        assert transport.response_complete

    def abort(self) -> None: ...


def begun() -> tuple[Http1Transport, list[bytes]]:
    client = Client()
    wire = Http1Transport(client, SCOPE, keep_alive=True, expects_continue=False)
    wire.start_response(200, EVENTS)
    return wire, client.kernel.writes


async def test_a_stream_begins_with_its_first_piece() -> None:
    wire, writes = begun()
    wire.write_nowait(b"first")
    await asyncio.sleep(0)
    assert len(writes) == 1
    assert writes[0].endswith(b"\r\n\r\n5\r\nfirst\r\n")


async def test_a_head_does_not_wait_for_a_piece() -> None:
    _, writes = begun()
    await asyncio.sleep(0)
    assert len(writes) == 1
    assert writes[0].endswith(b"chunked\r\n\r\n")


async def test_the_last_piece_brings_the_end() -> None:
    wire, writes = begun()
    await asyncio.sleep(0)
    wire.write_nowait(b"last")
    wire.end_response()
    assert writes[1:] == [b"4\r\nlast\r\n0\r\n\r\n"]
    await asyncio.sleep(0)
    assert len(writes) == 2


async def test_much_at_once_does_not_pile_up() -> None:
    wire, writes = begun()
    for _ in range(100):
        wire.write_nowait(bytes(MAX_COALESCED_BYTES))
    assert sum(map(len, writes)) > 100 * MAX_COALESCED_BYTES
    assert max(map(len, writes)) < 2 * MAX_COALESCED_BYTES


async def test_a_large_body_that_came_at_once_does_not_hide_that_its_client_leaves() -> None:
    client = Client()
    wire = Http1Transport(client, SCOPE, keep_alive=True, expects_continue=False)
    wire.on_body(bytes(MAX_PREFETCHED_BODY_BYTES + 1))
    assert client.held
    wire.on_body_complete()
    assert not client.held


@pytest.mark.parametrize("value", [b"a\r\nx-other: b", b"a\nb", b"a\rb"])
async def test_a_header_with_a_line_break_is_not_sent(value: bytes) -> None:
    client = Client()
    wire = Http1Transport(client, SCOPE, keep_alive=True, expects_continue=False)
    with pytest.raises(ValueError, match="line break"):
        wire.send_response(200, [(b"x-some", value), (b"content-length", b"0")], b"")
    await asyncio.sleep(0)
    assert not client.kernel.writes
