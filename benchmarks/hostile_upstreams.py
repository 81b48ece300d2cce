"""Servers that behave badly behind a gateway, for `benchmarks.hostile_tenant --upstreams`.

    python -m benchmarks.hostile_upstreams BEHAVIOUR [BEHAVIOUR ...]

Prints one JSON object with the port of each behaviour, and serves until it is terminated. `healthy` behaves well.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import sys
from typing import NamedTuple

from argosy.deployment import BackendKind
from benchmarks.processes import exit_on_sigterm

GENERATION = "/v1/chat/completions"
PIECE_BYTES = 64 * 1024


class Behaviour(NamedTuple):
    """Response without an end to the requests of one path."""

    path: str
    head: bytes
    unit: bytes
    """Repeated without end."""
    interval_s: float = 0.0
    """Time between two units. 0 sends as many as the gateway reads."""


def _head(*headers: bytes) -> bytes:
    return b"\r\n".join([b"HTTP/1.1 200 OK", *headers, b"", b""])


EVENTS = _head(b"content-type: text/event-stream")
TEXT = _head(b"content-type: text/plain")
CHUNKED = _head(b"content-type: text/event-stream", b"transfer-encoding: chunked")
CHUNK = b'data: {"id": "x", "created": 1, "model": "m", "choices": [%b]%b}\n\n'
CHOICE = b'{"index": 0, "delta": {"content": "a"}, "finish_reason": null}'
USAGE = b', "usage": {"prompt_tokens": 1000000000000000, "completion_tokens": 1000000000000000}'
SEAL = b": argosy prompt 7 3\n\n"
RESET = b'data: {"reset": {"tokenizer": "x", "block_size": 16}}\n\n'
STORED = b"".join(
    b'data: {"stored": "%b"}\n\n' % base64.b64encode(os.urandom(6144)) for _ in range(100)
)

BEHAVIOURS: dict[str, Behaviour] = {
    "events": Behaviour(GENERATION, EVENTS, CHUNK % (CHOICE, b"")),
    "native events": Behaviour(
        GENERATION, EVENTS + SEAL, CHUNK % (CHOICE, b"") + b": argosy 0 1\n\n"
    ),
    "heads": Behaviour(GENERATION, b"HTTP/1.1 200 OK\r\n", b"x-a: b\r\n"),
    "interim responses": Behaviour(GENERATION, b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "lines": Behaviour(GENERATION, EVENTS + b"data: ", b"a" * PIECE_BYTES),
    "comments": Behaviour(GENERATION, EVENTS, b":\n\n"),
    "small chunks": Behaviour(GENERATION, CHUNKED, b"1\r\n:\r\n"),
    "nested events": Behaviour(GENERATION, EVENTS, b"data: " + b"[" * PIECE_BYTES + b"\n\n"),
    "many choices": Behaviour(GENERATION, EVENTS, CHUNK % (b",".join([CHOICE] * 10_000), b"")),
    "usage": Behaviour(GENERATION, EVENTS, CHUNK % (CHOICE, USAGE)),
    "slow bytes": Behaviour(GENERATION, EVENTS, b"d", 0.02),
    "slow heads": Behaviour(GENERATION, b"HTTP/1.1 200 OK\r\n", b"x", 0.02),
    "body": Behaviour(GENERATION, _head(b"content-type: application/json"), b" " * PIECE_BYTES),
    "load reports": Behaviour("/load", _head(b"content-length: 100000000"), b"[" * PIECE_BYTES),
    "metrics": Behaviour("/metrics", TEXT, b"vllm:num_requests_running{} 9\n"),
    "models": Behaviour("/v1/models", _head(b"content-type: application/json"), b" " * PIECE_BYTES),
    "kv resets": Behaviour("/kv_events", EVENTS, RESET),
    "kv blocks": Behaviour("/kv_events", EVENTS + RESET, STORED),
    "kv comments": Behaviour("/kv_events", EVENTS, b":\n\n"),
    "kv lines": Behaviour("/kv_events", EVENTS + b"data: ", b"a" * PIECE_BYTES),
}
KINDS: tuple[BackendKind, ...] = ("argosy", "vllm")
"""Each behaviour is that of a replica of each of these kinds."""

_COUNTS: tuple[str, ...] = ("server_load", "running", "waiting", "queued_tokens", "kv_blocks_used")
_COUNTS += ("kv_blocks_cached", "step", "step_s")
LOAD = dict.fromkeys(_COUNTS, 0) | {"state": "ready", "max_seqs": 64, "max_model_len": 8192}
PAGES: dict[str, object] = {
    "/load": LOAD | {"models": ["m"], "block_size": 16, "kv_blocks_total": 1000},
    "/v1/models": {"object": "list", "data": [{"id": "m", "max_model_len": 8192}]},
    GENERATION: {
        "id": "x",
        "choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
    },
}


async def answer(
    behaviour: Behaviour | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Answer the requests of one connection."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            path = head.split()[1].decode()
            if b"content-length: " in head:
                length = head.partition(b"content-length: ")[2].split()[0]
                await reader.readexactly(int(length))
            if behaviour is not None and behaviour.path == path:
                await send_without_end(behaviour, writer)
            status = "200 OK" if path in PAGES or path == "/health" else "404 Not Found"
            page = json.dumps(PAGES.get(path, {})).encode()
            fields = f"content-type: application/json\r\ncontent-length: {len(page)}"
            writer.write(f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n".encode() + page)
            await writer.drain()
    writer.close()


async def send_without_end(behaviour: Behaviour, writer: asyncio.StreamWriter) -> None:
    """Send the response until the gateway closes the connection. Raises OSError then."""
    writer.write(behaviour.head)
    piece = behaviour.unit
    if not behaviour.interval_s:
        piece *= max(1, PIECE_BYTES // len(piece))
    while True:
        writer.write(piece)
        await writer.drain()
        if behaviour.interval_s:
            await asyncio.sleep(behaviour.interval_s)


async def serve(names: list[str]) -> None:
    """Serve behaviours, each on a port of its own."""
    ports = {}
    for name in names:
        behaviour = BEHAVIOURS.get(name)

        async def on_connection(
            reader: asyncio.StreamReader,
            writer: asyncio.StreamWriter,
            behaviour: Behaviour | None = behaviour,
        ) -> None:
            await answer(behaviour, reader, writer)

        server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
        ports[name] = server.sockets[0].getsockname()[1]
    print(json.dumps(ports), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Serve the named behaviours."""
    exit_on_sigterm()
    if sys.argv[1:] != ["healthy"]:
        os.nice(10)  # their own machines are other ones
    asyncio.run(serve(sys.argv[1:]))


if __name__ == "__main__":
    main()
