"""A server that answers with known delays and remembers when it sent what: the yardstick of the self-check.

It speaks just enough of the OpenAI API: `/v1/models`, streamed `/v1/completions` and
`/v1/chat/completions`. `main` prints its URL and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import cast

import httptools
import msgspec

from argosy.protocol import SSE_DONE, event

MODEL = "stub"
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Delays(msgspec.Struct, frozen=True):
    """How slow it is, in seconds."""

    first_s: float = 0.0
    """From the request to the first token."""
    gap_s: float = 0.0
    """Between tokens."""


class Served(msgspec.Struct):
    """What the stub saw of one request. Times are of `time.perf_counter`, which processes share on Linux."""

    asked_at: float
    sent_at: list[float] = []


class _Body(msgspec.Struct):
    max_tokens: int = 16
    messages: list[object] = []


class Stub:
    """The server's state, and how to start it."""

    def __init__(self, delays: Delays) -> None:
        self.delays = delays
        self.served: dict[str, Served] = {}
        """By `x-request-id`."""
        self.tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> tuple[asyncio.Server, str]:
        """Listen on a free port of the loopback interface; gives the server and its URL."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        return server, f"http://127.0.0.1:{port}"


class _Connection(asyncio.Protocol):
    def __init__(self, stub: Stub) -> None:
        self._stub = stub
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._task: asyncio.Task[None] | None = None
        self._clear()

    def _clear(self) -> None:
        self._path = b""
        self._request_id = ""
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's face
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._request_id = value.decode()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        asked_at = time.perf_counter()
        path, body, request_id = self._path, self._body, self._request_id
        self._clear()
        if path == b"/v1/models":
            self._json(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        elif path == b"/served":
            self._json(200, self._stub.served)
        elif path in {b"/v1/completions", b"/v1/chat/completions"}:
            served = Served(asked_at)
            self._stub.served[request_id] = served
            task = asyncio.create_task(self._answer(body, served))
            self._task = task
            self._stub.tasks.add(task)
            task.add_done_callback(self._stub.tasks.discard)
        else:
            self._json(404, {"error": {"message": "There is no such path.", "code": "not_found"}})

    def _json(self, status: int, content: object) -> None:
        body = msgspec.json.encode(content)
        head = (
            f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        self._write(head.encode() + b"\r\n\r\n" + body)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    async def _answer(self, body: bytes, served: Served) -> None:
        asked = msgspec.json.decode(body, type=_Body)
        chat = bool(asked.messages)
        delays = self._stub.delays
        self._write(_HEAD)
        due = served.asked_at + delays.first_s
        for place in range(asked.max_tokens):
            if delays.first_s or delays.gap_s:
                await _until(due)
            else:
                await asyncio.sleep(0)
            due = time.perf_counter() + delays.gap_s
            last = place == asked.max_tokens - 1
            chunk = _chunk(place + 1, last=last, chat=chat)
            served.sent_at.append(time.perf_counter())
            self._write(_framed(event(chunk) + (SSE_DONE if last else b"")))
        self._write(b"0\r\n\r\n")


async def _until(due: float) -> None:
    while True:
        left = due - time.perf_counter()
        if left <= 0:
            return
        await asyncio.sleep(left - 0.001 if left > 0.002 else 0)


def _framed(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _chunk(count: int, *, last: bool, chat: bool) -> bytes:
    choice: dict[str, object] = {"index": 0, "finish_reason": "length" if last else None}
    text = f" {count}"
    choice |= {"delta": {"content": text}} if chat else {"text": text}
    usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": 1 + count}
    return msgspec.json.encode({"id": "stub", "choices": [choice], "usage": usage})


async def _serve(delays: Delays) -> None:
    server, url = await Stub(delays).start()
    sys.stdout.write(url + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    server.close()


def main() -> None:
    """Serve with the `Delays` that the last argument gives as JSON."""
    import uvloop

    uvloop.run(_serve(msgspec.json.decode(sys.argv[-1], type=Delays)))
