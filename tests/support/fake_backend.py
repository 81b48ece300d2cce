"""A server that speaks one engine's published shapes, with a model that always says the same and faults on demand.

The model is a list of tokens. Whoever asks it to go on, from a text or from token ids, gets what comes
after them; from anything else it goes on with `WRONG`, so an answer that was put together badly shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

ANSWER = ("Once", " upon ", "a", " time", ",", " said\n", "the", " cät", ".")
"""White space at the end of some, for whoever goes on from a text tells it again."""
WHOLE = "".join(ANSWER)
PROMPT_IDS = (901, 902, 903, 904)
FIRST_ID = 100
"""The answer's tokens are numbered from here."""
WRONG = (" WRONG",)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with a request after so many events of its stream."""

    kind: Literal["die", "stall", "error", "abort", "refuse"]
    events: int = 0
    status: int = 503


@dataclass(slots=True)
class Asked:
    """A request."""

    path: str
    headers: dict[str, str]
    body: Json

    @property
    def chat(self) -> bool:
        return self.path == "/v1/chat/completions"

    @property
    def usage(self) -> bool:
        return bool((self.body.get("stream_options") or {}).get("include_usage"))

    @property
    def usage_with_each(self) -> bool:
        return bool((self.body.get("stream_options") or {}).get("continuous_usage_stats"))


@dataclass(slots=True)
class Part:
    """What a request gets: tokens from `start` on, and why they end."""

    start: int
    tokens: tuple[str, ...]
    finish: str
    prompt_tokens: int
    stop: str | None = None
    """The stop string that they end with."""

    @property
    def usage(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.tokens),
            "total_tokens": self.prompt_tokens + len(self.tokens),
        }


@dataclass
class Double:
    """One server; a family overrides what is its own."""

    owner: ClassVar[str] = ""
    model: ClassVar[str] = "cat"
    default_tokens: ClassVar[int] = 1000
    answer: ClassVar[tuple[str, ...]] = ANSWER
    """What its model always says; a token without text is a part of the next one's."""

    name: str = ""
    prompt_ids: tuple[int, ...] = PROMPT_IDS
    """What every prompt becomes."""
    faults: deque[Fault] = field(default_factory=deque)
    """Of the next requests, whichever of the servers that share it gets them."""
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    got: list[str] = field(default_factory=list)
    running: int = 0
    waiting: int = 0
    healthy: bool = True
    kv_sources: Json = field(default_factory=dict)
    """Where it says that it publishes KV cache events, in its own words."""

    # --- what families override ------------------------------------------------------------------

    def pages(self) -> dict[str, object]:
        """Paths that are got: text, or JSON."""
        return {}

    def events(self, asked: Asked, part: Part) -> Iterator[bytes]:
        """A stream's events."""
        raise NotImplementedError

    def whole(self, asked: Asked, part: Part) -> Json:
        """A whole answer."""
        text = "".join(part.tokens)
        said: Json = {"message": {"role": "assistant", "content": text}}
        choice = {
            "index": 0,
            "finish_reason": part.finish,
            **(said if asked.chat else {"text": text}),
        }
        return {"id": "whole-1", "model": self.model, "choices": [choice], "usage": part.usage}

    def error(self, status: int, message: str) -> Json:
        """An error's body, and what a stream that fails carries."""
        return {"error": {"message": message, "type": "InternalServerError", "code": status}}

    def refusal(self, asked: Asked) -> str | None:
        """Why it does not take a body."""
        return None

    def goes_on_from(self, asked: Asked) -> str | None:
        """The text that it is asked to go on from; None: it cannot be known. Empty: from the start."""
        if not asked.chat:
            prompt = asked.body["prompt"]
            return prompt.removeprefix("Tell me") if isinstance(prompt, str) else None
        last = asked.body["messages"][-1]
        if last["role"] != "assistant":
            return ""
        return last["content"] if self.continues(asked.body) else None

    def continues(self, body: Json) -> bool:
        """Whether a chat asks to go on after its last message."""
        return (
            bool(body.get("continue_final_message")) and body.get("add_generation_prompt") is False
        )

    # --- the model -------------------------------------------------------------------------------

    def part(self, asked: Asked) -> Part:
        """What the model gives for this request."""
        start, prompt_tokens = self._start(asked), len(self.prompt_ids)
        tokens = WRONG if start is None else self.answer[start:]
        if start and tokens and not isinstance(asked.body.get("prompt"), list):
            before = "".join(self.answer[:start])
            tokens = (before[len(before.rstrip()) :] + tokens[0], *tokens[1:])
        most = asked.body.get("max_completion_tokens") or asked.body.get("max_tokens")
        default = self.default_tokens if not asked.chat else 1000
        limit = most if most and most > 0 else default  # below 0: llama.cpp's way to say none
        finish = "stop" if len(tokens) < limit else "length"
        start = start or 0
        return Part(start, tokens[:limit], finish, prompt_tokens + start)

    def _start(self, asked: Asked) -> int | None:
        prompt = asked.body.get("prompt")
        if isinstance(prompt, list):
            told = prompt[len(self.prompt_ids) :]
            good = prompt[: len(self.prompt_ids)] == list(self.prompt_ids)
            return len(told) if good and told == [*range(FIRST_ID, FIRST_ID + len(told))] else None
        text = self.goes_on_from(asked)
        counts = range(len(self.answer) + 1)
        ends = ["".join(self.answer[:count]).rstrip() for count in counts]
        return ends.index(text.rstrip()) if text is not None and text.rstrip() in ends else None

    # --- HTTP ------------------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._one(reader, writer):
                await writer.drain()
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {
            name.lower(): value for name, _, value in (line.partition(": ") for line in lines)
        }
        raw = await reader.readexactly(int(headers.get("content-length", "0")))
        method, path, _ = first.split(" ")
        if method == "GET":
            self.got.append(path)
            self._get(path, writer)
            return True
        asked = Asked(path, headers, json.loads(raw))
        self.asked.append(asked)
        return await self._answer(asked, writer)

    def _get(self, path: str, writer: asyncio.StreamWriter) -> None:
        card = {"id": self.model, "object": "model", "created": 1, "owned_by": self.owner}
        pages = {"/v1/models": {"object": "list", "data": [card]}, "/health": {}, **self.pages()}
        if not self.healthy:
            _send(writer, 503, self.error(503, "shutting down"))
        elif path not in pages:
            _send(writer, 404, {"detail": "Not Found"})
        else:
            _send(writer, 200, pages[path])

    async def _answer(self, asked: Asked, writer: asyncio.StreamWriter) -> bool:
        fault = self.faults.popleft() if self.faults else None
        if fault is not None and fault.kind == "refuse":
            _send(writer, fault.status, self.error(fault.status, "not now"))
            return True
        refusal = self.refusal(asked)
        if refusal is not None:
            _send(writer, 400, self.error(400, refusal))
            return True
        part = self.part(asked)
        if not asked.body.get("stream"):
            _send(writer, 200, self.whole(asked, part))
            return True
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        for count, event in enumerate(self.events(asked, part)):
            if fault is not None and count == fault.events:
                return await self._fail(fault, writer)
            _chunk(writer, event)
            await writer.drain()
        if fault is not None:  # after the last event, before the stream's end
            return await self._fail(fault, writer)
        writer.write(b"0\r\n\r\n")
        return True

    async def _fail(self, fault: Fault, writer: asyncio.StreamWriter) -> bool:
        if fault.kind == "stall":
            await writer.drain()
            await asyncio.Event().wait()
        if fault.kind in {"error", "abort"}:
            choice: Json = {"index": 0, "text": "", "delta": {}, "finish_reason": "abort"}
            broken_off = {"id": "x", "created": 7, "model": self.model, "choices": [choice]}
            error = self.error(500, "EngineCore died")
            _chunk(writer, sse(error if fault.kind == "error" else broken_off))
            _chunk(writer, b"data: [DONE]\n\n")
            writer.write(b"0\r\n\r\n")
            return True
        await writer.drain()
        return False


def sse(data: object) -> bytes:
    """An event with JSON as most engines write it."""
    return (
        b"data: " + json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
    )


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _send(writer: asyncio.StreamWriter, status: int, content: object) -> None:
    text = isinstance(content, str)
    body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
    kind = "text/plain; version=0.0.4" if text else "application/json"
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


@contextlib.asynccontextmanager
async def running(*doubles: Double) -> AsyncIterator[None]:
    """All of them listening on free ports, sharing the first one's faults."""
    tasks: set[asyncio.Task[None]] = set()
    servers = []
    for double in doubles:
        double.faults = doubles[0].faults

        async def serve(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, double: Double = double
        ) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            with contextlib.suppress(asyncio.CancelledError):
                await double.serve(reader, writer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        double.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        servers.append(server)
    try:
        yield
    finally:
        for server in servers:
            server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
