"""Parts of a client's connection: its address, deadlines, coalesced writes, and clients that read slowly or nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import cast

import pytest
from tests.support.http_serving import HttpLimits, run_server

from argosy.http_server import (
    LARGE_BODY_BYTES,
    Deadlines,
    HttpExchange,
    HttpRequest,
    ResponseTransport,
    SlowReaderError,
    bind_tcp,
)
from argosy.http_server.client_connection import ClientConnection, HttpServerState, get_peer_address
from argosy.http_server.connection_limiter import ConnectionSlot
from argosy.http_server.http1_transport import (
    MAX_COALESCED_BYTES,
    MAX_PREFETCHED_BODY_BYTES,
    Http1Transport,
)
from argosy.http_server.http_exchange import MAX_PIECE_BYTES


class SocketTransport:
    """The part of a transport that is read: its socket."""

    def __init__(self, client: socket.socket) -> None:
        self._client = client

    def get_extra_info(self, name: str) -> socket.socket | None:
        return self._client if name == "socket" else None


def address_of(client: socket.socket) -> str:
    return get_peer_address(cast("asyncio.Transport", SocketTransport(client)))


@pytest.fixture
def accepted() -> Iterator[socket.socket]:
    with (
        bind_tcp("127.0.0.1", 0) as server,
        socket.create_connection(server.getsockname()),
    ):
        client, _ = server.accept()
        with client:
            yield client


def test_tcp_client_has_the_address_of_its_peer(accepted: socket.socket) -> None:
    assert address_of(accepted) == "127.0.0.1"


def test_packets_to_a_tcp_client_do_not_wait_for_its_acknowledgement(
    accepted: socket.socket,
) -> None:
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_client_of_a_unix_socket_is_unix() -> None:
    first, second = socket.socketpair(socket.AF_UNIX)
    with first, second:
        assert address_of(first) == "unix"


def test_disconnected_client_has_no_address_and_is_not_local() -> None:
    with socket.socket() as never_connected:
        assert address_of(never_connected) == ""


async def test_items_that_are_not_removed_expire_in_order() -> None:
    expired: list[int] = []
    last = asyncio.Event()

    def on_expired(item: int) -> None:
        expired.append(item)
        if item == 9:
            last.set()

    deadlines = Deadlines(0.01, on_expired)
    for item in range(10):
        deadlines.add(item)
    deadlines.add(0)  # again, so it moves behind the others
    deadlines.add(9)
    for item in (3, 4):
        deadlines.remove(item)
    deadlines.remove(99)
    await last.wait()
    assert expired == [1, 2, 5, 6, 7, 8, 0, 9]


async def test_item_added_after_an_expiry_expires_too() -> None:
    expired: asyncio.Queue[str] = asyncio.Queue()
    deadlines = Deadlines(0.005, expired.put_nowait)
    for item in ("first", "second"):
        deadlines.add(item)
        assert await expired.get() == item


async def test_readded_items_share_one_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, timers, expirations, finished = asyncio.get_running_loop(), 0, 0, asyncio.Event()
    call_later = loop.call_later

    def count_timers(delay: float, on_expired: Callable[[], None]) -> asyncio.TimerHandle:
        nonlocal timers
        timers += 1
        return call_later(delay, on_expired)

    def on_expired(item: int) -> None:
        nonlocal expirations
        expirations += 1
        deadlines.add(item)
        if expirations == 50:
            deadlines.remove(item)
            finished.set()

    monkeypatch.setattr(loop, "call_later", count_timers)
    deadlines = Deadlines(0.002, on_expired)
    deadlines.add(1)
    await finished.wait()
    assert timers <= 2 * expirations  # a timer may fire slightly early


async def test_failing_callback_does_not_affect_other_items() -> None:
    loop, failed, second_expired = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    loop.set_exception_handler(lambda *_: failed.set())
    actions: dict[str, Callable[[], object]] = {
        "failing": lambda: 1 / 0,
        "working": second_expired.set,
    }
    deadlines: Deadlines[str] = Deadlines(0.005, lambda item: actions[item]())
    deadlines.add("failing")
    deadlines.add("working")
    await failed.wait()
    await second_expired.wait()


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
        super().__init__(HttpServerState(), ConnectionSlot(lambda: 0.0))
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


# --- slow readers ----------------------------------------------------------------------------------

MIB = 1 << 20


@contextlib.asynccontextmanager
async def connected_client(
    handle: Callable[[HttpExchange], Awaitable[None]], limits: HttpLimits
) -> AsyncIterator[tuple[socket.socket, asyncio.Task[None]]]:
    """Yield a client that has sent a request, and the task that responds to it."""
    response_task: asyncio.Future[asyncio.Task[None]] = asyncio.get_running_loop().create_future()

    async def app(request: HttpRequest) -> None:
        task = asyncio.ensure_future(handle(HttpExchange(request, limits)))
        response_task.set_result(task)
        await asyncio.wait({task})

    async with run_server(app) as (_, port):
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            client.sendall(b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
            yield client, await response_task


class BackpressuredTransport:
    """A `ResponseTransport` whose client is behind. `unsent_sequence` lists the unsent bytes at each check."""

    is_backpressured = True
    is_disconnected = False
    is_aborted = False

    def __init__(self, unsent_sequence: list[int]) -> None:
        self.unsent_sequence = unsent_sequence

    @property
    def unsent_bytes(self) -> int:
        return self.unsent_sequence.pop(0)

    async def wait_writable(self) -> None:
        await asyncio.Event().wait()

    def write_nowait(self, data: bytes) -> None: ...

    def abort(self) -> None:
        self.is_aborted = True


async def test_stalled_client_has_a_bounded_send_buffer() -> None:
    """Megabytes for each of thousands of clients would exhaust the kernel's socket memory."""
    sent = 0

    async def flood(exchange: HttpExchange) -> None:
        nonlocal sent
        await exchange.start_stream()
        while True:
            await exchange.write(bytes(MAX_PIECE_BYTES))
            sent += MAX_PIECE_BYTES

    async with connected_client(flood, HttpLimits(slow_reader_timeout_s=0.05)) as (
        _,
        response_task,
    ):
        with pytest.raises(SlowReaderError):
            await response_task
    assert sent < MIB


async def test_large_bodies_of_tenants_are_parsed_in_turn() -> None:
    parsed = list[str | None]()

    async def parse(tenant: str) -> None:
        request = HttpRequest("POST", "/", b"", [], "", ResponseTransport())
        exchange = HttpExchange(request, HttpLimits())
        exchange.tenant = tenant
        await exchange.parse_body(bytes(LARGE_BODY_BYTES), lambda _: parsed.append(tenant))

    await asyncio.gather(*map(parse, "aaaabbc"))
    assert parsed == [*"abcabaa"]


async def test_slow_client_is_disconnected_only_when_it_reads_nothing() -> None:
    transport = BackpressuredTransport([300, 200, 100, 100])
    request = HttpRequest("GET", "/", b"", [], "", transport)  # type: ignore[arg-type] # has what is called
    exchange = HttpExchange(request, HttpLimits(slow_reader_timeout_s=0.001))
    with pytest.raises(SlowReaderError):
        await exchange.write(b"more")
    assert transport.unsent_sequence == []
    assert transport.is_aborted


async def test_large_response_to_a_stalled_client_times_out() -> None:
    async with connected_client(
        lambda exchange: exchange.send_response(200, bytes(8 * MIB)),
        HttpLimits(slow_reader_timeout_s=0.05),
    ) as (_, response_task):
        with pytest.raises(SlowReaderError):
            await response_task
