"""Draining of an HTTP server: a client that was not asked to close its connection may send another request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from argosy.http_server import HttpRequest, HttpServer, bind_tcp

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def make_request(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()


@dataclass
class HeldApp:
    """An application whose responses to /stream and /later wait for `release`."""

    started: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, request: HttpRequest) -> None:
        transport = request.transport
        if request.path == "/later":
            self.started.set()
            await self.release.wait()
        transport.start_response(200, [])
        if request.path == "/stream":
            transport.write_nowait(b"a")
            self.started.set()
            await self.release.wait()
        transport.write_nowait(b"the end")
        transport.end_response()


@contextlib.asynccontextmanager
async def serve_app(app: HeldApp) -> AsyncIterator[tuple[HttpServer, asyncio.Task[None], Client]]:
    """Run a server and connect a client to it."""
    server, listen_socket = HttpServer(app), bind_tcp("127.0.0.1", 0)
    server_task = asyncio.create_task(server.serve(sockets=[listen_socket]))
    reader, writer = await asyncio.open_connection(*listen_socket.getsockname())
    try:
        yield server, server_task, (reader, writer)
    finally:
        writer.close()
        server.stop()
        await server_task


async def test_client_of_stream_may_send_another_request_while_draining() -> None:
    """The response headers allow it, so the next request may be on its way when the stream ends."""
    app = HeldApp()
    async with serve_app(app) as (server, _, (reader, writer)):
        writer.write(make_request("/stream"))
        assert b"connection: close" not in await reader.readuntil(b"\r\n\r\n")
        await app.started.wait()
        drain_task = asyncio.create_task(server.drain(60))
        await asyncio.sleep(0)
        app.release.set()
        assert b"the end" in await reader.readuntil(b"0\r\n\r\n")
        writer.write(make_request("/"))
        response = await reader.read()  # to the end of the connection
        assert response.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close\r\n" in response
        await drain_task


async def test_idle_client_of_stream_does_not_delay_drain() -> None:
    app = HeldApp()
    async with serve_app(app) as (server, _, (reader, writer)):
        writer.write(make_request("/stream"))
        await app.started.wait()
        drain_task = asyncio.create_task(server.drain(0.01))
        await asyncio.sleep(0)
        app.release.set()
        assert (await reader.read()).endswith(b"0\r\n\r\n")
        await drain_task


async def test_pipelined_requests_are_answered_while_draining() -> None:
    app = HeldApp()
    async with serve_app(app) as (server, _, (reader, writer)):
        writer.write(make_request("/later") + make_request("/") + make_request("/"))
        await app.started.wait()
        drain_task = asyncio.create_task(server.drain(60))
        await asyncio.sleep(0)
        app.release.set()
        responses = await reader.read()
        assert responses.count(b"HTTP/1.1 200 ") == responses.count(b"the end") == 3
        assert responses.count(b"connection: close\r\n") == 1
        await drain_task


async def has_ended(server_task: asyncio.Task[None]) -> bool:
    """Whether the server ends without a timer: this many iterations of the loop take less than one timer tick."""
    for _ in range(100):
        if server_task.done():
            return True
        await asyncio.sleep(0)
    return False


@pytest.mark.parametrize("is_used", [False, True])
async def test_server_without_running_requests_stops_immediately(*, is_used: bool) -> None:
    async with serve_app(HeldApp()) as (server, server_task, (reader, writer)):
        if is_used:
            writer.write(make_request("/"))
            assert b"the end" in await reader.readuntil(b"0\r\n\r\n")
        assert not await has_ended(server_task)
        server.stop()
        assert await has_ended(server_task)
        assert await reader.read() == b""


async def test_stopped_server_ends_with_last_response() -> None:
    app = HeldApp()
    async with serve_app(app) as (server, server_task, (reader, writer)):
        writer.write(make_request("/later"))
        await app.started.wait()
        server.stop()
        assert not await has_ended(server_task)
        app.release.set()
        response = await reader.read()  # to the end of the connection
        assert response.startswith(b"HTTP/1.1 200 ")
        assert await has_ended(server_task)
