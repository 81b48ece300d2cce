"""WebSocket connections: frames, limits, dead and slow clients, and what precedes the handshake."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import websockets
from tests.integration.gateway.test_http_connections import connect, listen
from tests.support.waiting import until
from websockets.asyncio.client import ClientConnection
from websockets.frames import Frame, Opcode

from argosy.deployment import GatewayConfig
from argosy.gateway.app import serve_messages
from argosy.http_server import HttpExchange, HttpRequest, run_handler
from argosy.http_server import connection as http_connection
from argosy.http_server import websocket as http_websocket

MAX_BYTES = 100_000
HANDSHAKE = (
    b"GET / HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)

errors: list[str] = []
"""Codes of the errors that ended messages."""


async def answer(exchange: HttpExchange) -> None:
    """Respond with the message, or with the size of a long stream."""

    async def respond() -> None:
        body = await exchange.read_body()
        if not body.startswith(b"stream "):
            await exchange.send_response(200, body)
            return
        await exchange.start_stream()
        for _ in range(int(body.removeprefix(b"stream "))):
            await exchange.write(b"data: " + bytes(60_000).replace(b"\0", b"x") + b"\n\n")
        await exchange.end_stream()

    await run_handler(exchange, respond())
    if exchange.error_code is not None:
        errors.append(exchange.error_code)


async def echo(request: HttpRequest) -> None:
    config = GatewayConfig(
        models=[], body_limit_bytes=MAX_BYTES, body_timeout_s=0.2, slow_reader_timeout_s=0.2
    )
    exchange = HttpExchange(request, config)
    if exchange.is_websocket_handshake:
        await run_handler(exchange, serve_messages(exchange, answer))
    else:
        await exchange.send_response(200, exchange.get_header(b"upgrade").encode())


@contextlib.asynccontextmanager
async def open_websocket() -> AsyncIterator[ClientConnection]:
    async with (
        listen(echo) as port,
        websockets.connect(f"ws://127.0.0.1:{port}", max_size=None, ping_interval=None) as client,
    ):
        yield client


@pytest.fixture
def pings_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_websocket, "PING_INTERVAL_S", 0.05)


async def test_messages_are_echoed_whole_and_in_order() -> None:
    async with open_websocket() as client:
        long = "é" * (MAX_BYTES // 2)
        for message in ("a", b"bytes", long, ["frag", "", "ments"], ""):
            await client.send(message)
        received = [await client.recv() for _ in range(5)]
        assert received == ["a", "bytes", long, "fragments", ""]
        await (await client.ping(b"alive?"))
        await asyncio.gather(*(client.send(str(number)) for number in range(200)))
        assert [await client.recv() for _ in range(200)] == [str(number) for number in range(200)]


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([Frame(Opcode.TEXT, b"x" * (MAX_BYTES + 1))], 1009),
        ([Frame(Opcode.TEXT, b"x" * MAX_BYTES, fin=False), Frame(Opcode.CONT, b"x")], 1009),
        ([Frame(Opcode.TEXT, b"\xff")], 1007),
        ([Frame(Opcode.CONT, b"x")], 1002),
    ],
    ids=["too-big", "too-big-in-fragments", "invalid-utf8", "no-first-fragment"],
)
async def test_invalid_message_closes_connection(frames: list[Frame], code: int) -> None:
    async with open_websocket() as client:
        for frame in frames:
            client.transport.write(frame.serialize(mask=True))
        await client.wait_closed()
        assert client.close_code == code


@pytest.mark.usefixtures("pings_often")
async def test_incomplete_message_times_out() -> None:
    async with open_websocket() as client:
        client.transport.write(
            Frame(Opcode.TEXT, b"never complete", fin=False).serialize(mask=True)
        )
        await client.wait_closed()
        assert client.close_code == 1008


@pytest.mark.usefixtures("pings_often")
async def test_old_connection_is_closed_between_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_websocket, "MAX_AGE_S", 0.0)
    async with open_websocket() as client:
        await client.wait_closed()
        assert client.close_code == 1001


@pytest.mark.usefixtures("pings_often")
@pytest.mark.parametrize("is_alive", [True, False])
async def test_silent_client_is_closed_if_it_answers_no_ping(*, is_alive: bool) -> None:
    async with listen(echo) as port, connect(port) as (reader, writer):
        writer.write(HANDSHAKE)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        for _ in range(3 if is_alive else 1):
            assert await reader.readexactly(2) == b"\x89\0"
            if is_alive:
                writer.write(Frame(Opcode.PONG, b"").serialize(mask=True))
        if not is_alive:
            assert (await reader.read()).startswith(b"\x88")


async def test_client_that_reads_nothing_is_disconnected() -> None:
    errors.clear()
    async with listen(echo) as port, connect(port) as (reader, writer):
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined] # the transport of a socket
        writer.write(Frame(Opcode.TEXT, b"stream 1000").serialize(mask=True))
        await until(lambda: errors == ["slow_reader"])


def record_pauses(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets an item whenever the server pauses reading."""
    paused: list[bool] = []
    original = http_connection.HttpConnection.pause_reading

    def pause(connection: http_connection.HttpConnection) -> None:
        paused.append(True)
        original(connection)

    monkeypatch.setattr(http_connection.HttpConnection, "pause_reading", pause)
    return paused


async def test_pongs_that_nobody_reads_pause_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    paused = record_pauses(monkeypatch)
    pings = Frame(Opcode.PING, bytes(125)).serialize(mask=True) * 1000
    async with listen(echo) as port, connect(port) as (reader, writer):
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined] # the transport of a socket
        sent = 0
        while not paused:
            assert sent < 1000, "the server has buffered 127 MB of pongs"
            writer.write(pings)
            await asyncio.sleep(0)
            sent += 1
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        pong = Frame(Opcode.PONG, bytes(125)).serialize(mask=False)
        for _ in range(1000 * sent):
            assert await reader.readexactly(len(pong)) == pong


async def test_waiting_messages_pause_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_websocket, "MAX_QUEUED_MESSAGES", 2)
    paused = record_pauses(monkeypatch)
    async with open_websocket() as client:
        await asyncio.gather(*(client.send(str(number)) for number in range(50)))
        assert [await client.recv() for _ in range(50)] == [str(number) for number in range(50)]
        await until(lambda: bool(paused))


@pytest.mark.parametrize("cut", [1, 60, None])
async def test_handshake_after_another_request_in_pieces(cut: int | None) -> None:
    async with listen(echo) as port, connect(port) as (reader, writer):
        data = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" + HANDSHAKE
        writer.write(data[:cut])
        await writer.drain()
        await asyncio.sleep(0)
        if cut is not None:
            writer.write(data[cut:])
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        writer.write(Frame(Opcode.TEXT, b"hello").serialize(mask=True))
        assert await reader.readexactly(7) == b"\x81\x05hello"
        writer.write(Frame(Opcode.CLOSE, b"\x03\xe8").serialize(mask=True))
        assert await reader.read() == b"\x88\x02\x03\xe8"


@pytest.mark.parametrize(
    ("handshake", "status"),
    [
        (HANDSHAKE + HANDSHAKE, b"400"),
        (HANDSHAKE.replace(b"AAAA==", b"AA=="), b"400"),
        (HANDSHAKE.replace(b"GET", b"POST"), b"200"),
        (HANDSHAKE.replace(b"HTTP/1.1", b"HTTP/1.0"), b"200"),
        (HANDSHAKE.replace(b"host: x", b"host: x\r\ncontent-length: 3") + b"GET", b"200"),
    ],
    ids=["more-than-handshake", "key", "post", "http-1.0", "body"],
)  # fmt: skip
async def test_request_is_no_handshake(handshake: bytes, status: bytes) -> None:
    """A request that cannot be upgraded is answered as if it had no upgrade headers."""
    async with listen(echo) as port, connect(port) as (reader, writer):
        writer.write(handshake)
        writer.write_eof()
        response = await reader.read()
        assert response.startswith(b"HTTP/1.1 " + status)
