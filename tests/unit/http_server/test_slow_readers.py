"""A client that takes its answer slowly gets it, one that takes nothing is cut off, and for neither much is kept."""

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
from argosy.http_server.http_exchange import MAX_PIECE_BYTES, TRANSPORT_KEY

MIB = 1 << 20
BODY = bytes(range(256)) * (8 * MIB // 256)


@dataclass(frozen=True)
class Limits:
    """An `ExchangeLimits`."""

    body_limit_bytes: int = MIB
    body_timeout_s: float = 60.0
    slow_reader_timeout_s: float = 60.0


@contextlib.asynccontextmanager
async def asked(
    handle: Callable[[HttpExchange], Awaitable[None]], limits: Limits
) -> AsyncIterator[tuple[socket.socket, asyncio.Task[None]]]:
    """A client that has asked, and the task that answers it."""
    answering: asyncio.Future[asyncio.Task[None]] = asyncio.get_running_loop().create_future()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.ensure_future(handle(HttpExchange(scope, receive, send, limits)))
        answering.set_result(task)
        await asyncio.wait({task})

    listening = bind_tcp("127.0.0.1", 0)
    listener = HttpServer(app)
    serving = asyncio.create_task(listener.serve(sockets=[listening]))
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listening.getsockname())
        client.sendall(b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
        yield client, await answering
    listener.stop()
    await serving


class Slow:
    """As much of a `Wire` as is asked of one whose client is behind: so much waits, each time that it is looked."""

    is_backpressured = True
    is_disconnected = False
    was_cut = False

    def __init__(self, unsent: list[int]) -> None:
        self.unsent_then = unsent

    @property
    def unsent_bytes(self) -> int:
        return self.unsent_then.pop(0)

    async def wait_writable(self) -> None:
        await asyncio.Event().wait()

    def write_nowait(self, data: bytes) -> None: ...

    def abort(self) -> None:
        self.was_cut = True


async def test_little_is_kept_for_who_takes_nothing() -> None:
    """Megabytes for each of thousands would be all memory that the kernel has for connections."""
    sent = 0

    async def flood(exchange: HttpExchange) -> None:
        nonlocal sent
        await exchange.start_stream()
        while True:
            await exchange.write(bytes(MAX_PIECE_BYTES))
            sent += MAX_PIECE_BYTES

    async with asked(flood, Limits(slow_reader_timeout_s=0.05)) as (_, answering):
        with pytest.raises(SlowReaderError):
            await answering
    assert sent < MIB


async def test_who_takes_a_little_is_not_cut_off_until_they_take_nothing() -> None:
    wire = Slow([300, 200, 100, 100])
    exchange = HttpExchange(
        {"method": "GET", "path": "/", "headers": [], "state": {TRANSPORT_KEY: wire}},
        *(None, None),  # type: ignore[arg-type] # nothing is asked of them
        Limits(slow_reader_timeout_s=0.001),
    )
    with pytest.raises(SlowReaderError):
        await exchange.write(b"more")
    assert wire.unsent_then == []
    assert wire.was_cut


async def test_a_large_answer_waits_for_who_takes_nothing_no_longer_than_a_stream_does() -> None:
    async with asked(
        lambda exchange: exchange.send_response(200, BODY), Limits(slow_reader_timeout_s=0.05)
    ) as (_, answering):
        with pytest.raises(SlowReaderError):
            await answering


async def test_a_large_answer_is_the_same_bytes_in_pieces() -> None:
    async with asked(lambda exchange: exchange.send_response(200, BODY), Limits()) as (
        client,
        answering,
    ):
        answer = await asyncio.to_thread(read, client)
        await answering
    head, _, body = answer.partition(b"\r\n\r\n")
    assert f"content-length: {len(BODY)}".encode() in head
    assert b"chunked" not in head
    assert body == BODY


def read(client: socket.socket) -> bytes:
    """All of its answer."""
    return b"".join(iter(lambda: client.recv(1 << 16), b""))
