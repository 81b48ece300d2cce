"""Slow clients: a slow reader gets its response, a stalled one is disconnected, and little is buffered for either."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from tests.support.http_serving import HttpLimits, run_server

from argosy.http_server import HttpExchange, HttpRequest, SlowReaderError
from argosy.http_server.http_exchange import MAX_PIECE_BYTES

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
