"""Gateway whose replicas come and go, and the upstreams behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx2

from argosy.deployment import GatewayConfig
from argosy.gateway import GatewayServer
from argosy.gateway.config_reloader import ConfigLoader
from argosy.gateway.pool import Resolver, resolve_host
from tests.support.fake_upstream import FakeUpstream, UpstreamRequest, fake_upstream
from tests.support.gateway_client import run_gateway_server
from tests.support.waiting import until

BODY = {"model": "big", "prompt": "Say something", "max_tokens": 3}


@dataclass(frozen=True)
class RunningGateway:
    """Gateway with a client."""

    server: GatewayServer
    client: httpx2.AsyncClient

    @property
    def replica_names(self) -> set[str]:
        return {replica.name for replica in self.server.replicas}

    async def request_status(self) -> int:
        """Send a request and return the status of the response."""
        return (await self.client.post("/v1/completions", json=BODY)).status_code

    async def wait_until_served_by(self, *upstreams: FakeUpstream) -> None:
        """Send requests until each of these upstreams has received one."""
        for upstream in upstreams:
            upstream.requests.clear()
        while not all(upstream.requests for upstream in upstreams):
            assert await self.request_status() == 200


@contextlib.asynccontextmanager
async def gateway(
    config: GatewayConfig,
    load_config: ConfigLoader | None = None,
    resolver: Resolver = resolve_host,
) -> AsyncIterator[RunningGateway]:
    """Run a gateway, which must leave no task behind."""
    before = asyncio.all_tasks()
    async with run_gateway_server(config, load_config, resolver) as (server, client):
        yield RunningGateway(server, client)
    await until(lambda: asyncio.all_tasks() <= before)


@contextlib.asynccontextmanager
async def fake_pods(count: int) -> AsyncIterator[list[FakeUpstream]]:
    """Run upstreams on one port of the addresses 127.0.0.1, 127.0.0.2 and so on."""
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(fake_upstream())
        others = [
            await stack.enter_async_context(
                fake_upstream(host=pod_address(number), port=first.port)
            )
            for number in range(1, count)
        ]
        yield [first, *others]


def pod_address(number: int) -> str:
    return f"127.0.0.{number + 1}"


async def wait_until_disconnected(*upstreams: FakeUpstream) -> None:
    """Wait until the gateway has closed all connections to these upstreams, before they are idle for long."""
    async with asyncio.timeout(20):
        await until(lambda: not any(upstream.num_connections for upstream in upstreams))


class PausedStream:
    """Script of a stream that pauses after its first text until `resume` is set."""

    def __init__(self) -> None:
        self.resume = asyncio.Event()
        self.started = asyncio.Event()

    async def __call__(self, request: UpstreamRequest) -> None:
        request.start_stream()
        request.send_text("first")
        self.started.set()
        await self.resume.wait()
        request.send_text(" last", "stop")
        request.end_stream(tokens=2)
