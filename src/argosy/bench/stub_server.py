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

from argosy.protocol import SSE_DONE, format_event

STUB_MODEL = "stub"
_RESPONSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


class StubDelays(msgspec.Struct, frozen=True):
    """How slow it is, in seconds."""

    first_token_s: float = 0.0
    """From the request to the first token."""
    token_gap_s: float = 0.0
    """Between tokens."""


class StubRequestTimes(msgspec.Struct):
    """What the stub saw of one request. Times are of `time.perf_counter`, which processes share on Linux."""

    received_at: float
    token_sent_at: list[float] = []


class _Body(msgspec.Struct):
    max_tokens: int = 16
    messages: list[object] = []


class StubServer:
    """The server's state, and how to start it."""

    def __init__(self, delays: StubDelays) -> None:
        self.delays = delays
        self.request_times: dict[str, StubRequestTimes] = {}
        """By `x-request-id`."""
        self.tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> tuple[asyncio.Server, str]:
        """Listen on a free port of the loopback interface; gives the server and its URL."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _StubConnection(self), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        return server, f"http://127.0.0.1:{port}"


class _StubConnection(asyncio.Protocol):
    def __init__(self, stub: StubServer) -> None:
        self._stub = stub
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._task: asyncio.Task[None] | None = None
        self._reset_request()

    def _reset_request(self) -> None:
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
        self._reset_request()
        if path == b"/v1/models":
            self._send_json(
                200, {"object": "list", "data": [{"id": STUB_MODEL, "object": "model"}]}
            )
        elif path == b"/served":
            self._send_json(200, self._stub.request_times)
        elif path in {b"/v1/completions", b"/v1/chat/completions"}:
            served = StubRequestTimes(asked_at)
            self._stub.request_times[request_id] = served
            task = asyncio.create_task(self._stream_answer(body, served))
            self._task = task
            self._stub.tasks.add(task)
            task.add_done_callback(self._stub.tasks.discard)
        else:
            self._send_json(
                404, {"error": {"message": "There is no such path.", "code": "not_found"}}
            )

    def _send_json(self, status: int, content: object) -> None:
        body = msgspec.json.encode(content)
        head = (
            f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        self._write(head.encode() + b"\r\n\r\n" + body)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    async def _stream_answer(self, body: bytes, served: StubRequestTimes) -> None:
        asked = msgspec.json.decode(body, type=_Body)
        chat = bool(asked.messages)
        delays = self._stub.delays
        self._write(_RESPONSE_HEAD)
        due = served.received_at + delays.first_token_s
        for place in range(asked.max_tokens):
            if delays.first_token_s or delays.token_gap_s:
                await _sleep_until(due)
            else:
                await asyncio.sleep(0)
            due = time.perf_counter() + delays.token_gap_s
            last = place == asked.max_tokens - 1
            chunk = _render_chunk(place + 1, last=last, chat=chat)
            served.token_sent_at.append(time.perf_counter())
            self._write(_frame_chunk(format_event(chunk) + (SSE_DONE if last else b"")))
        self._write(b"0\r\n\r\n")


async def _sleep_until(due: float) -> None:
    while True:
        left = due - time.perf_counter()
        if left <= 0:
            return
        await asyncio.sleep(left - 0.001 if left > 0.002 else 0)


def _frame_chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _render_chunk(count: int, *, last: bool, chat: bool) -> bytes:
    choice: dict[str, object] = {"index": 0, "finish_reason": "length" if last else None}
    text = f" {count}"
    choice |= {"delta": {"content": text}} if chat else {"text": text}
    usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": 1 + count}
    return msgspec.json.encode({"id": "stub", "choices": [choice], "usage": usage})


async def _serve_stub(delays: StubDelays) -> None:
    server, url = await StubServer(delays).start()
    sys.stdout.write(url + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    server.close()


def main() -> None:
    """Serve with the `Delays` that the last argument gives as JSON."""
    import uvloop

    uvloop.run(_serve_stub(msgspec.json.decode(sys.argv[-1], type=StubDelays)))
