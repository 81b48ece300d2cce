"""Stub server for the self-check, which answers with known delays and records when it sent each token.

The stub supports `/v1/models`, and streamed `/v1/completions` and `/v1/chat/completions` of the OpenAI API.
`/served` returns the recorded times. `main` prints the URL and serves until its standard input ends.
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
    """Delays of the stub in seconds."""

    first_token_s: float = 0.0
    """Delay from the request to the first token."""
    token_gap_s: float = 0.0
    """Delay between two tokens."""


class StubRequestTimes(msgspec.Struct):
    """Times of one request on the clock of `time.perf_counter`, which processes share on Linux."""

    received_at: float
    token_sent_at: list[float] = []


class _Body(msgspec.Struct):
    max_tokens: int = 16
    messages: list[object] = []


class StubServer:
    """Listening socket and recorded times of the stub."""

    def __init__(self, delays: StubDelays) -> None:
        self.delays = delays
        self.request_times: dict[str, StubRequestTimes] = {}
        """Recorded times by `x-request-id`."""
        self.tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> tuple[asyncio.Server, str]:
        """Listen on a free port of the loopback interface, and return the server and its URL."""
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

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's interface
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
        received_at = time.perf_counter()
        path, body, request_id = self._path, self._body, self._request_id
        self._reset_request()
        if path == b"/v1/models":
            self._send_json(
                200, {"object": "list", "data": [{"id": STUB_MODEL, "object": "model"}]}
            )
        elif path == b"/served":
            self._send_json(200, self._stub.request_times)
        elif path in {b"/v1/completions", b"/v1/chat/completions"}:
            request_times = StubRequestTimes(received_at)
            self._stub.request_times[request_id] = request_times
            task = asyncio.create_task(self._stream_answer(body, request_times))
            self._task = task
            self._stub.tasks.add(task)
            task.add_done_callback(self._stub.tasks.discard)
        else:
            self._send_json(
                404, {"error": {"message": "The path does not exist.", "code": "not_found"}}
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

    async def _stream_answer(self, body: bytes, request_times: StubRequestTimes) -> None:
        request = msgspec.json.decode(body, type=_Body)
        is_chat = bool(request.messages)
        delays = self._stub.delays
        self._write(_RESPONSE_HEAD)
        due_at = request_times.received_at + delays.first_token_s
        for index in range(request.max_tokens):
            if delays.first_token_s or delays.token_gap_s:
                await _sleep_until(due_at)
            else:
                await asyncio.sleep(0)
            due_at = time.perf_counter() + delays.token_gap_s
            is_last = index == request.max_tokens - 1
            chunk = _render_chunk(index + 1, is_last=is_last, is_chat=is_chat)
            request_times.token_sent_at.append(time.perf_counter())
            self._write(_frame_chunk(format_event(chunk) + (SSE_DONE if is_last else b"")))
        self._write(b"0\r\n\r\n")


async def _sleep_until(due_at: float) -> None:
    while True:
        remaining = due_at - time.perf_counter()
        if remaining <= 0:
            return
        await asyncio.sleep(remaining - 0.001 if remaining > 0.002 else 0)


def _frame_chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _render_chunk(count: int, *, is_last: bool, is_chat: bool) -> bytes:
    choice: dict[str, object] = {"index": 0, "finish_reason": "length" if is_last else None}
    text = f" {count}"
    choice |= {"delta": {"content": text}} if is_chat else {"text": text}
    usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": 1 + count}
    return msgspec.json.encode({"id": "stub", "choices": [choice], "usage": usage})


async def _serve_stub(delays: StubDelays) -> None:
    server, url = await StubServer(delays).start()
    sys.stdout.write(url + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    server.close()


def main() -> None:
    """Serve with the `StubDelays` in the last argument, as JSON."""
    import uvloop

    uvloop.run(_serve_stub(msgspec.json.decode(sys.argv[-1], type=StubDelays)))
