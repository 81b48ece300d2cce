"""A gateway in front of some servers, and what a client sees of a stream through it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx2

from argosy.gateway import (
    AuthConfig,
    GatewayConfig,
    GatewayServer,
    ModelConfig,
    ReplicaConfig,
    Timeouts,
)
from argosy.store import StoreConfig

QUICK = Timeouts(first_token_timeout_s=5.0, stream_idle_timeout_s=5.0, failover_timeout_s=0.5)
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "big", "messages": [{"role": "user", "content": "Tell me"}]},
    COMPLETION: {"model": "big", "prompt": "Tell me", "max_tokens": 12},
}


@contextlib.asynccontextmanager
async def gateway(
    *replicas: ReplicaConfig,
    timeouts: Timeouts = QUICK,
    patience_s: float | None = 30.0,
    store: StoreConfig | None = None,
    auth: AuthConfig = AuthConfig(),  # noqa: B008 - immutable
) -> AsyncIterator[tuple[GatewayServer, httpx2.AsyncClient]]:
    """A gateway that takes the servers in turn, and a client of it, which waits for so long."""
    model = ModelConfig(name="big", routing="round-robin", replicas=list(replicas))
    config = GatewayConfig(port=0, models=[model], timeouts=timeouts, store=store, auth=auth)
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = GatewayServer(config, url.set_result)
    running = asyncio.create_task(server.run())
    try:
        async with httpx2.AsyncClient(base_url=await url, timeout=patience_s) as client:
            yield server, client
    finally:
        server.stop()
        await running


@dataclass
class Seen:
    """What a client makes of a stream."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    finish: list[str] = field(default_factory=list)
    usage: list[dict[str, Any]] = field(default_factory=list)
    roles: int = 0
    """Chunks that say the role and nothing else."""
    errors: list[dict[str, Any]] = field(default_factory=list)
    done: int = 0

    @property
    def identities(self) -> set[tuple[object, ...]]:
        return {(chunk["id"], chunk["created"], chunk["object"]) for chunk in self.chunks}

    @property
    def counts(self) -> list[tuple[int, int]]:
        """Tokens of the prompt and of the answer, as each usage says."""
        return [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in self.usage]

    def take(self, data: str) -> None:
        if data == "[DONE]":
            self.done += 1
            return
        chunk = json.loads(data)
        if "error" in chunk:
            self.errors.append(chunk["error"])
            return
        self.chunks.append(chunk)
        if chunk.get("usage"):
            self.usage.append(chunk["usage"])
        for choice in chunk["choices"]:
            text = said(choice)
            self.text += text
            told = bool(text or choice.get("finish_reason"))
            self.roles += "role" in choice.get("delta", {}) and not told
            if choice.get("finish_reason"):
                self.finish.append(choice["finish_reason"])


def said(choice: dict[str, Any]) -> str:
    """The text of a chunk's choice."""
    return choice.get("text") or choice.get("delta", {}).get("content") or ""


async def stream(client: httpx2.AsyncClient, path: str, **changes: object) -> Seen:
    """A stream, as a client sees it."""
    answer = await client.post(path, json=BODIES[path] | {"stream": True} | changes)
    assert answer.status_code == 200, answer.text
    seen = Seen()
    for line in answer.text.splitlines():
        if line.startswith("data:"):
            seen.take(line[5:].strip())
    return seen
