"""Slow clients: a slow reader gets its response, a stalled one is disconnected, and little is buffered for either."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest

from argosy.http_server import (
    HttpExchange,
    HttpServer,
    Receive,
    Scope,
    Send,
    SlowReaderError,
    bind_tcp,
)
from argosy.http_server.http_exchange import MAX_PIECE_BYTES
from argosy.http_server.response_transport import TRANSPORT_KEY

MIB = 1 << 20
BODY = bytes(range(256)) * (8 * MIB // 256)


@dataclass(frozen=True)
class FakeExchangeLimits:
    """Limits of the exchange under test, as `ExchangeLimits` declares them."""

    body_limit_bytes: int = MIB
    body_timeout_s: float = 60.0
    slow_reader_timeout_s: float = 60.0


@contextlib.asynccontextmanager
async def connected_client(
    handle: Callable[[HttpExchange], Awaitable[None]], limits: FakeExchangeLimits
) -> AsyncIterator[tuple[socket.socket, asyncio.Task[None]]]:
    """Yield a client that has sent a request, and the task that responds to it."""
    response_task: asyncio.Future[asyncio.Task[None]] = asyncio.get_running_loop().create_future()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.ensure_future(handle(HttpExchange(scope, receive, send, limits)))
        response_task.set_result(task)
        await asyncio.wait({task})

    listening = bind_tcp("127.0.0.1", 0)
    listener = HttpServer(app)
    serving = asyncio.create_task(listener.serve(sockets=[listening]))
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listening.getsockname())
        client.sendall(b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
        yield client, await response_task
    listener.stop()
    await serving


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

    async with connected_client(flood, FakeExchangeLimits(slow_reader_timeout_s=0.05)) as (
        _,
        response_task,
    ):
        with pytest.raises(SlowReaderError):
            await response_task
    assert sent < MIB


async def test_slow_client_is_disconnected_only_when_it_reads_nothing() -> None:
    transport = BackpressuredTransport([300, 200, 100, 100])
    exchange = HttpExchange(
        {"method": "GET", "path": "/", "headers": [], "state": {TRANSPORT_KEY: transport}},
        *(None, None),  # type: ignore[arg-type] # not called
        FakeExchangeLimits(slow_reader_timeout_s=0.001),
    )
    with pytest.raises(SlowReaderError):
        await exchange.write(b"more")
    assert transport.unsent_sequence == []
    assert transport.is_aborted


async def test_large_response_to_a_stalled_client_times_out() -> None:
    async with connected_client(
        lambda exchange: exchange.send_response(200, BODY),
        FakeExchangeLimits(slow_reader_timeout_s=0.05),
    ) as (_, response_task):
        with pytest.raises(SlowReaderError):
            await response_task


async def test_large_response_is_complete() -> None:
    async with connected_client(
        lambda exchange: exchange.send_response(200, BODY), FakeExchangeLimits()
    ) as (
        client,
        response_task,
    ):
        response = await asyncio.to_thread(read_all, client)
        await response_task
    head, _, body = response.partition(b"\r\n\r\n")
    assert f"content-length: {len(BODY)}".encode() in head
    assert b"chunked" not in head
    assert body == BODY


def read_all(client: socket.socket) -> bytes:
    """Return the complete response."""
    return b"".join(iter(lambda: client.recv(1 << 16), b""))
