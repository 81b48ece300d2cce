"""Gateway process objects in front of given replicas, and the view that a client has of a stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from argosy.deployment import (
    AdapterConfig,
    AuthConfig,
    GatewayConfig,
    ModelConfig,
    ReplicaConfig,
    Timeouts,
    load_config,
)
from argosy.gateway import GatewayServer
from argosy.gateway.config_reloader import ConfigLoader
from argosy.gateway.pool.dns_discovery import Resolver, resolve_host
from argosy.store import StoreConfig
from tests.support.fake_backend import FakeBackend, serve_backends

QUICK_TIMEOUTS = Timeouts(
    first_token_timeout_s=5.0, stream_idle_timeout_s=5.0, failover_timeout_s=0.5
)
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
ONE_MODEL = "models: [{name: big, replicas: [{url: 'http://localhost:1'}]}]\n"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "big", "messages": [{"role": "user", "content": "Tell me"}]},
    COMPLETION: {"model": "big", "prompt": "Tell me", "max_tokens": 12},
}


def check_settings_error(folder: Path, settings: str, message: str) -> None:
    """Check that settings in YAML are refused beside `ONE_MODEL`, with an error that matches a pattern."""
    path = folder / "gateway.yaml"
    path.write_text(f"{ONE_MODEL}{settings}\n")
    with pytest.raises(ValueError, match=message):
        load_config(path)


def replica_config(backend: FakeBackend, **settings: Any) -> ReplicaConfig:  # noqa: ANN401 - of the struct
    """Configure a fake backend as a replica."""
    return ReplicaConfig(url=backend.url, model=backend.model, **settings)


@contextlib.asynccontextmanager
async def serve_gateway(
    config: GatewayConfig,
    **options: Any,  # noqa: ANN401 - keyword arguments of `GatewayServer`
) -> AsyncIterator[tuple[GatewayServer, str]]:
    """Run a gateway in this event loop, and yield it with its URL. Raises what ends it before it listens."""
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = GatewayServer(config, url.set_result, **options)
    running = asyncio.create_task(server.run())
    try:
        futures: set[asyncio.Future[Any]] = {running, url}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
        yield server, await url
    finally:
        server.stop()
        await running


@contextlib.asynccontextmanager
async def run_gateway_server(
    config: GatewayConfig,
    load_config: ConfigLoader | None = None,
    resolver: Resolver = resolve_host,
    client_timeout_s: float | None = 30.0,
) -> AsyncIterator[tuple[GatewayServer, httpx2.AsyncClient]]:
    """Run a gateway in this event loop, with a client."""
    async with (
        serve_gateway(config, load_config=load_config, resolver=resolver) as (server, url),
        httpx2.AsyncClient(base_url=url, timeout=client_timeout_s) as client,
    ):
        yield server, client


@contextlib.asynccontextmanager
async def gateway(
    *replicas: ReplicaConfig,
    timeouts: Timeouts = QUICK_TIMEOUTS,
    client_timeout_s: float | None = 30.0,
    store: StoreConfig | None = None,
    auth: AuthConfig = AuthConfig(),  # noqa: B008 - immutable
    adapters: tuple[AdapterConfig, ...] = (),
) -> AsyncIterator[tuple[GatewayServer, httpx2.AsyncClient]]:
    """Run a gateway that sends requests to the replicas in turn, with a client."""
    model = ModelConfig(
        name="big", routing="round-robin", replicas=list(replicas), adapters=adapters
    )
    config = GatewayConfig(port=0, models=[model], timeouts=timeouts, store=store, auth=auth)
    async with run_gateway_server(config, client_timeout_s=client_timeout_s) as (server, client):
        yield server, client


@contextlib.asynccontextmanager
async def gateway_to(
    *backends: FakeBackend,
    timeouts: Timeouts = QUICK_TIMEOUTS,
    **settings: Any,  # noqa: ANN401 - of `ReplicaConfig`
) -> AsyncIterator[tuple[GatewayServer, httpx2.AsyncClient]]:
    """Run fake backends and a gateway in front of them, with these settings for each."""
    async with serve_backends(*backends):
        replicas = [replica_config(backend, **settings) for backend in backends]
        async with gateway(*replicas, timeouts=timeouts) as (server, client):
            yield server, client


@dataclass
class StreamResult:
    """Stream as a client parses it."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    usage: list[dict[str, Any]] = field(default_factory=list)
    role_chunks: int = 0
    """Number of chunks with a role and nothing else."""
    errors: list[dict[str, Any]] = field(default_factory=list)
    done_count: int = 0

    @property
    def stream_ids(self) -> set[tuple[object, ...]]:
        return {(chunk["id"], chunk["created"], chunk["object"]) for chunk in self.chunks}

    @property
    def token_counts(self) -> list[tuple[int, int]]:
        """Prompt and completion tokens of each usage."""
        return [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in self.usage]

    @property
    def is_complete(self) -> bool:
        """Whether the stream has a finish reason, exactly one `[DONE]` and no error."""
        return (bool(self.finish_reasons), self.errors, self.done_count) == (True, [], 1)

    def add_event(self, data: str) -> None:
        if data == "[DONE]":
            self.done_count += 1
            return
        chunk = json.loads(data)
        if "error" in chunk:
            self.errors.append(chunk["error"])
            return
        self.chunks.append(chunk)
        if chunk.get("usage"):
            self.usage.append(chunk["usage"])
        for choice in chunk["choices"]:
            text = chunk_text(choice)
            self.text += text
            has_content = bool(text or choice.get("finish_reason"))
            self.role_chunks += "role" in choice.get("delta", {}) and not has_content
            if choice.get("finish_reason"):
                self.finish_reasons.append(choice["finish_reason"])


def chunk_text(choice: dict[str, Any]) -> str:
    """Return the text of a chunk's choice."""
    return choice.get("text") or choice.get("delta", {}).get("content") or ""


def parse_stream(content: str) -> StreamResult:
    """Parse the content of a stream."""
    result = StreamResult()
    for line in content.splitlines():
        if line.startswith("data:"):
            result.add_event(line[5:].strip())
    return result


async def read_stream(
    client: httpx2.AsyncClient,
    path: str,
    body: dict[str, Any],
    after_eight_chunks: Callable[[], object] | None = None,
) -> StreamResult:
    """Read a stream, and call the function after its eighth chunk."""
    result = StreamResult()
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                result.add_event(line[6:])
            if after_eight_chunks is not None and len(result.chunks) == 8:
                after_eight_chunks()
                after_eight_chunks = None
    return result


async def stream(client: httpx2.AsyncClient, path: str, **changes: object) -> StreamResult:
    """Send a streaming request with changes to the path's body."""
    response = await client.post(path, json=BODIES[path] | {"stream": True} | changes)
    assert response.status_code == 200, response.text
    return parse_stream(response.text)
