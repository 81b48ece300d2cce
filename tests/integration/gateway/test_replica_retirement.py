"""Connections of a server that leaves: who was told that it may ask again may."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from argosy.http_server import HttpServer, Receive, Scope, Send, bind_tcp

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def asked(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()


@dataclass
class Held:
    """An application whose answers under /stream have begun, and end once they may."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        if scope["path"] == "/later":
            self.begun.set()
            await self.may_end.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/stream":
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
            self.begun.set()
            await self.may_end.wait()
        await send({"type": "http.response.body", "body": b"the end"})


@contextlib.asynccontextmanager
async def serving(app: Held) -> AsyncIterator[tuple[HttpServer, asyncio.Task[None], Client]]:
    """A server, and a client that is connected."""
    listener, bound = HttpServer(app), bind_tcp("127.0.0.1", 0)
    running = asyncio.create_task(listener.serve(sockets=[bound]))
    reader, writer = await asyncio.open_connection(*bound.getsockname())
    try:
        yield listener, running, (reader, writer)
    finally:
        writer.close()
        listener.stop()
        await running


async def test_a_stream_that_began_before_its_server_leaves_lets_its_client_ask_again() -> None:
    """Its head has said so: the next request may be on its way when the stream ends."""
    app = Held()
    async with serving(app) as (listener, _, (reader, writer)):
        writer.write(asked("/stream"))
        assert b"connection: close" not in await reader.readuntil(b"\r\n\r\n")
        await app.begun.wait()
        retiring = asyncio.create_task(listener.drain(60))
        await asyncio.sleep(0)
        app.may_end.set()
        assert b"the end" in await reader.readuntil(b"0\r\n\r\n")
        writer.write(asked("/"))
        answer = await reader.read()  # to the connection's end
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close\r\n" in answer
        await retiring


async def test_a_stream_whose_client_asks_no_more_keeps_no_server() -> None:
    app = Held()
    async with serving(app) as (listener, _, (reader, writer)):
        writer.write(asked("/stream"))
        await app.begun.wait()
        retiring = asyncio.create_task(listener.drain(0.01))
        await asyncio.sleep(0)
        app.may_end.set()
        assert (await reader.read()).endswith(b"0\r\n\r\n")
        await retiring


async def test_requests_that_came_together_before_a_server_leaves_are_all_answered() -> None:
    app = Held()
    async with serving(app) as (listener, _, (reader, writer)):
        writer.write(asked("/later") + asked("/") + asked("/"))
        await app.begun.wait()
        retiring = asyncio.create_task(listener.drain(60))
        await asyncio.sleep(0)
        app.may_end.set()
        answers = await reader.read()
        assert answers.count(b"HTTP/1.1 200 ") == answers.count(b"the end") == 3
        assert answers.count(b"connection: close\r\n") == 1
        await retiring


async def has_ended(running: asyncio.Task[None]) -> bool:
    """Whether it ends without waiting for a clock: so many turns of the loop take less than one of its ticks."""
    for _ in range(100):
        if running.done():
            return True
        await asyncio.sleep(0)
    return False


async def test_a_server_that_nobody_uses_ends_at_once() -> None:
    listener, bound = HttpServer(Held()), bind_tcp("127.0.0.1", 0)
    running = asyncio.create_task(listener.serve(sockets=[bound]))
    assert not await has_ended(running)
    listener.stop()
    assert await has_ended(running)


async def test_a_server_whose_clients_wait_for_nothing_ends_at_once() -> None:
    async with serving(Held()) as (listener, running, (reader, writer)):
        writer.write(asked("/"))
        assert b"the end" in await reader.readuntil(b"0\r\n\r\n")
        listener.stop()
        assert await has_ended(running)
        assert await reader.read() == b""


async def test_a_server_that_is_stopped_ends_with_the_last_answer() -> None:
    app = Held()
    async with serving(app) as (listener, running, (reader, writer)):
        writer.write(asked("/later"))
        await app.begun.wait()
        listener.stop()
        assert not await has_ended(running)
        app.may_end.set()
        answer = await reader.read()  # to the connection's end
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert await has_ended(running)
