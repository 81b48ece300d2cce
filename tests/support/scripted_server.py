"""A server that answers each request as a test scripts it, down to the bytes and the cut."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from argosy.protocol import SSE_DONE, format_event

MODELS = {"object": "list", "data": [{"id": "rough", "object": "model"}]}


@dataclass(slots=True)
class Asked:
    """One request, and the writer to answer it with."""

    path: str
    body: dict[str, object]
    writer: asyncio.StreamWriter

    def json(self, status: int, content: object) -> None:
        """A whole answer."""
        body = json.dumps(content).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)

    def stream(self) -> None:
        """The head of a stream that the end of the connection ends or cuts."""
        self.writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")

    def send(self, data: bytes) -> None:
        """One piece of it."""
        self.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def say(self, text: str, finish: str | None = None) -> None:
        """A chunk of a completion."""
        choice = {"index": 0, "text": text, "finish_reason": finish}
        self.send(format_event(json.dumps({"choices": [choice]}).encode()))

    def end(self, *, tokens: int | None = None) -> None:
        """Usage, `[DONE]`, and the end."""
        if tokens is not None:
            usage = {"prompt_tokens": 1, "completion_tokens": tokens}
            self.send(format_event(json.dumps({"choices": [], "usage": usage}).encode()))
        self.send(SSE_DONE)
        self.writer.write(b"0\r\n\r\n")


Answer = Callable[[Asked], Awaitable[None]]


async def plain(asked: Asked) -> None:
    """An answer of `max_tokens` tokens."""
    count = asked.body["max_tokens"]
    assert isinstance(count, int)
    if not asked.body.get("stream"):
        text = "".join(f" {place}" for place in range(count))
        usage = {"prompt_tokens": 1, "completion_tokens": count}
        choice = {"index": 0, "text": text, "finish_reason": "length"}
        asked.json(200, {"choices": [choice], "usage": usage})
        return
    asked.stream()
    for place in range(count):
        asked.say(f" {place}", "length" if place == count - 1 else None)
    asked.end(tokens=count)


@dataclass(slots=True)
class Rough:
    """A running server; `script` answers generations, once the client has got to know the server."""

    script: Answer = plain
    probed: Answer = plain
    """Answers who asks for one token."""
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    """Generations of the plan: probes ask for one token and are not among them."""
    most_at_once: int = 0
    tokenize: list[int] | None = None
    tokenizes_with: int = 200
    """The status of that."""
    refuses: set[str] = field(default_factory=set)
    """Fields of bodies and of stream options that it does not know."""
    _at_once: int = 0
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])

    @property
    def connections(self) -> int:
        """That are open."""
        return len(self._writers)

    def close(self) -> None:
        """Close all connections."""
        for writer in self._writers:
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                await self._one(reader, writer)
                await writer.drain()
                if writer.is_closing():
                    break
        writer.close()
        self._writers.discard(writer)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ")[1]
        length = 0
        for line in head.split("\r\n"):
            if line.lower().startswith("content-length:"):
                length = int(line.split(":")[1])
        raw = await reader.readexactly(length)
        asked = Asked(path, json.loads(raw) if raw else {}, writer)
        if path == "/v1/models":
            asked.json(200, MODELS)
        elif path == "/tokenize" and self.tokenize is not None:
            asked.json(self.tokenizes_with, {"tokens": self.tokenize})
        elif path not in {"/v1/completions", "/v1/chat/completions"}:
            asked.json(404, {"error": {"message": "no such path"}})
        elif unknown := self.refuses & _fields(asked.body):
            asked.json(400, {"error": {"message": f"unknown: {unknown}"}})
        elif asked.body.get("max_tokens") == 1:
            await self.probed(asked)
        else:
            await self._generate(asked)

    async def _generate(self, asked: Asked) -> None:
        self.asked.append(asked)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            await self.script(asked)
        finally:
            self._at_once -= 1


def _fields(body: dict[str, object]) -> set[str]:
    options = body.get("stream_options")
    return {*body, *(options if isinstance(options, dict) else {})}


@contextlib.asynccontextmanager
async def rough_server(
    script: Answer = plain, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[Rough]:
    """A server, by default on a free port."""
    rough = Rough(script)
    server = await asyncio.start_server(rough.serve, host, port)
    rough.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield rough
    finally:
        server.close()
        rough.close()
        await asyncio.sleep(0)
