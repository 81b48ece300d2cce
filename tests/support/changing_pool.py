"""A gateway whose replicas come and go, the servers behind it, and a client of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx2

from argosy.gateway import GatewayConfig, GatewayServer
from argosy.gateway.config_reloader import ConfigLoader
from argosy.gateway.pool.dns_discovery import Resolver, resolve_host
from tests.support.scripted_server import Asked, Rough, rough_server
from tests.support.waiting import until

BODY = {"model": "big", "prompt": "Say something", "max_tokens": 3}


@dataclass(frozen=True)
class Running:
    """A gateway, and a client of it."""

    server: GatewayServer
    client: httpx2.AsyncClient

    @property
    def names(self) -> set[str]:
        return {replica.name for replica in self.server.replicas}

    async def ask(self) -> int:
        return (await self.client.post("/v1/completions", json=BODY)).status_code

    async def served(self, *by: Rough) -> None:
        """Wait until each of them has been asked, and only they are."""
        for one in by:
            one.asked.clear()
        while not all(one.asked for one in by):
            assert await self.ask() == 200


@contextlib.asynccontextmanager
async def gateway(
    config: GatewayConfig, reread: ConfigLoader | None = None, look_up: Resolver = resolve_host
) -> AsyncIterator[Running]:
    """It leaves no task behind."""
    before = asyncio.all_tasks()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = GatewayServer(config, url.set_result, reread, look_up)
    serving = asyncio.create_task(server.run())
    try:
        async with httpx2.AsyncClient(base_url=await url, timeout=30) as client:
            yield Running(server, client)
    finally:
        server.stop()
        await serving
    await until(lambda: asyncio.all_tasks() <= before)


@contextlib.asynccontextmanager
async def pods(count: int) -> AsyncIterator[list[Rough]]:
    """Servers on one port of several addresses: 127.0.0.1, 127.0.0.2, ..."""
    async with contextlib.AsyncExitStack() as closing:
        first = await closing.enter_async_context(rough_server())
        others = [
            await closing.enter_async_context(rough_server(host=address(number), port=first.port))
            for number in range(1, count)
        ]
        yield [first, *others]


def address(number: int) -> str:
    return f"127.0.0.{number + 1}"


async def left(*servers: Rough) -> None:
    """Wait until the gateway has closed all its connections to them: at once, not when they have been idle for long."""
    async with asyncio.timeout(20):
        await until(lambda: not any(server.connections for server in servers))


class Steps:
    """A server's script: a stream that goes on when it is told to."""

    def __init__(self) -> None:
        self.more = asyncio.Event()
        self.begun = asyncio.Event()

    async def __call__(self, asked: Asked) -> None:
        asked.stream()
        asked.say("first")
        self.begun.set()
        await self.more.wait()
        asked.say(" last", "stop")
        asked.end(tokens=2)


async def whole(asked: Asked) -> None:
    choice = {"index": 0, "text": "something", "finish_reason": "stop"}
    asked.json(200, {"id": "cmpl-1", "object": "text_completion", "choices": [choice]})
