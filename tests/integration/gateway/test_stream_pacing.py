"""Paced streams: every dialect has the same content, and neither sizes nor times of writes show the steps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.support.fake_upstream import listening
from tests.support.gateway_client import serve_gateway
from tests.support.gateway_processes import open_organisation
from tests.support.native_upstream import (
    NativeScript,
    NativeUpstream,
    continue_call,
    start_call,
    think,
)

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.store import StoreConfig

MODES = {"steps": [], "tokens": ["stream-pacing-tokens"], "interval": ["stream-pacing-interval"]}
PIECE_CHARS, PADDED_BYTES = 4, 2048
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"stream_options": {"include_usage": True}}),
    "responses": ("/v1/responses", {"input": "Tell me", "store": False}),
    "messages": ("/v1/messages", {"max_tokens": 99}),
    "ollama": ("/api/chat", {}),
}
STEPS = ("The king", " of Fr", "ance said that", " he", " would c\u00f6me \U0001f451 soon.")
ARGUMENTS = '{"city": "Paris", "days": 3}'
DELTAS = [
    *(think(text) for text in STEPS[:2]),
    *({"content": text} for text in STEPS),
    start_call(0, "get_weather"),
    continue_call(0, ARGUMENTS),
]


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[tuple[str, dict[str, str], NativeUpstream]]:
    """URL of a gateway, keys of projects by their pacing, and one of its two replicas."""
    url = f"sqlite:///{tmp_path}/argosy.db"
    replica = NativeUpstream()
    replica.native_script = NativeScript(deltas=DELTAS, finish_reason="tool_calls")
    with open_organisation(url) as accounts:
        keys = {
            mode: accounts.key(accounts.project(mode, flags=flags)) for mode, flags in MODES.items()
        }
        async with listening(replica):
            replicas = [
                ReplicaConfig(url=replica.url, kind="argosy", model="m", name=name) for name in "ab"
            ]
            config = GatewayConfig(
                port=0,
                models=[ModelConfig(name="big", replicas=replicas)],
                store=StoreConfig(url=url),
            )
            async with serve_gateway(config) as (_, base_url):
                yield base_url, keys, replica


async def read_writes(url: str, key: str, path: str, fields: dict[str, Any]) -> list[bytes]:
    """Return the HTTP chunks of a stream."""
    body = {"model": "big", "messages": [{"role": "user", "content": "Tell me"}], "stream": True}
    content = json.dumps(body | fields).encode()
    target = urlsplit(url)
    reader, writer = await asyncio.open_connection(target.hostname, target.port)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
    )
    writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    _, _, rest = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    chunks = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        chunks.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return chunks[:-1]


TEXT_NAMES = {
    "content",
    "reasoning_content",
    "reasoning",
    "text",
    "thinking",
    "arguments",
    "partial_json",
    "delta",
}


def read_texts(stream: bytes) -> list[tuple[str, str]]:
    """Return the names and texts of all pieces of output in a stream of any dialect."""
    texts: list[tuple[str, str]] = []

    def visit(value: Any, name: str) -> None:  # noqa: ANN401 - JSON
        if isinstance(value, dict):
            for key, each in value.items():
                visit(each, key)
        elif isinstance(value, list):
            for each in value:
                visit(each, name)
        elif isinstance(value, str) and value and name in TEXT_NAMES:
            texts.append((name, value))

    for line in stream.splitlines():
        data = line.removeprefix(b"data: ")
        if data.startswith(b"{"):
            event = json.loads(data)
            for name in ("choices", "delta", "message"):
                visit(event.get(name), name)
    return texts


def join_texts(stream: bytes) -> dict[str, str]:
    """Return the whole text of each name."""
    joined: dict[str, str] = {}
    for name, text in read_texts(stream):
        joined[name] = joined.get(name, "") + text
    return joined


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SMOOTHING_S", 0.1), ("FIRST_PACE_S", 0.01), ("INTERVAL_S", 0.02)):
        monkeypatch.setattr(f"argosy.gateway.proxy.stream_pacing.{name}", value)


@pytest.mark.usefixtures("quick")
async def test_writes_of_every_dialect_have_the_same_content_and_hide_the_steps(
    gateway: tuple[str, dict[str, str], NativeUpstream],
) -> None:
    url, keys, replica = gateway
    for dialect, (path, fields) in DIALECTS.items():
        steps, interval, tokens = await asyncio.gather(
            *(
                read_writes(url, keys[mode], path, fields)
                for mode in ("steps", "interval", "tokens")
            )
        )
        expected = join_texts(b"".join(steps))
        assert any("".join(STEPS) in text for text in expected.values()), dialect
        assert join_texts(b"".join(interval)) == expected == join_texts(b"".join(tokens)), dialect
        has_long_piece = [
            any(len(text) > PIECE_CHARS for write in writes for _, text in read_texts(write))
            for writes in (steps, tokens)
        ]
        assert has_long_piece == [True, False], dialect
        sizes = [0]
        for write in interval:
            sizes[-1] += len(b"%x" % len(write)) + len(write) + 4
            if write.startswith(b": "):
                sizes.append(0)
        assert dialect == "ollama" or len(sizes) > 1
        assert all(size % PADDED_BYTES == 0 for size in sizes[:-1]), dialect
    for mode in MODES:
        replica.cut_after = 6
        path, fields = DIALECTS["chat"]
        writes = await read_writes(url, keys[mode], path, fields)
        assert replica.cut_after is None
        assert join_texts(b"".join(writes))["content"] == "".join(STEPS), f"failover, {mode}"
