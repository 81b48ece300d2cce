"""Fake upstream server whose responses a test scripts, down to the bytes and to where the connection is cut.

Never compared: each test scripts what its server sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from argosy.protocol import SSE_DONE, format_event

Json = dict[str, Any]

MODELS: Json = {"object": "list", "data": [{"id": "rough", "object": "model"}]}
POOLING_PATHS = frozenset({"/v1/embeddings", "/pooling", "/classify", "/score", "/v1/rerank"})
GENERATION_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"}) | POOLING_PATHS
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM_HEAD = CHUNKED_HEAD[:-2] + b"content-type: text/event-stream\r\n\r\n"


@dataclass(slots=True)
class UpstreamRequest:
    """Request that an upstream received, with methods that write the response."""

    path: str
    headers: dict[str, str]
    body: Json
    _writer: asyncio.StreamWriter | None = None

    @property
    def writer(self) -> asyncio.StreamWriter:
        """Writer of the connection; a request that a unit test builds has none."""
        assert self._writer is not None
        return self._writer

    @property
    def is_chat(self) -> bool:
        return self.path == "/v1/chat/completions"

    @property
    def chunk_object(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    @property
    def wants_usage(self) -> bool:
        return bool((self.body.get("stream_options") or {}).get("include_usage"))

    @property
    def wants_continuous_usage(self) -> bool:
        return bool((self.body.get("stream_options") or {}).get("continuous_usage_stats"))

    def send_json(self, status: int, content: object) -> None:
        """Send a complete JSON response without a content type."""
        body = json.dumps(content).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)

    def send_page(self, status: int, content: object) -> None:
        """Send text as text/plain and anything else as JSON."""
        is_text = isinstance(content, str)
        body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        content_type = "text/plain; version=0.0.4" if is_text else "application/json"
        self.writer.write(build_response(body, content_type, status))

    def start_stream(self) -> None:
        """Send the head of a chunked stream without a content type."""
        self.writer.write(CHUNKED_HEAD)

    def send_chunk(self, data: bytes) -> None:
        """Send one chunk of the stream."""
        self.writer.write(encode_chunk(data))

    def send_text(self, text: str, finish: str | None = None) -> None:
        """Send an event of a completion stream."""
        choice = {"index": 0, "text": text, "finish_reason": finish}
        self.send_chunk(format_event(json.dumps({"choices": [choice]}).encode()))

    def end_stream(self, *, tokens: int | None = None) -> None:
        """Send usage if `tokens` is given, `[DONE]` and the last chunk."""
        if tokens is not None:
            usage = {"prompt_tokens": 1, "completion_tokens": tokens}
            self.send_chunk(format_event(json.dumps({"choices": [], "usage": usage}).encode()))
        self.send_chunk(SSE_DONE)
        self.writer.write(encode_chunk(b""))


UpstreamScript = Callable[[UpstreamRequest], Awaitable[None]]


def encode_chunk(data: bytes) -> bytes:
    """Encode one chunk of a chunked body; no data encodes the end."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def build_response(
    body: bytes, content_type: str | None = "application/json", status: int = 200, *headers: str
) -> bytes:
    """Build a response with a content length."""
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *headers]
    if content_type is not None:
        lines.append(f"content-type: {content_type}")
    return "\r\n".join((*lines, "", "")).encode() + body


def build_stream(*events: bytes) -> bytes:
    """Build a stream whose chunks are these events."""
    return STREAM_HEAD + b"".join(map(encode_chunk, (*events, b"")))


def respond_with(response: bytes) -> UpstreamScript:
    """Return a script that sends these bytes for every request."""

    async def respond(request: UpstreamRequest) -> None:
        request.writer.write(response)

    return respond


async def respond_with_tokens(request: UpstreamRequest) -> None:
    """Generate `max_tokens` tokens."""
    count = request.body["max_tokens"]
    assert isinstance(count, int)
    if not request.body.get("stream"):
        text = "".join(f" {position}" for position in range(count))
        usage = {"prompt_tokens": 1, "completion_tokens": count}
        choice = {"index": 0, "text": text, "finish_reason": "length"}
        request.send_json(200, {"choices": [choice], "usage": usage})
        return
    request.start_stream()
    for position in range(count):
        request.send_text(f" {position}", "length" if position == count - 1 else None)
    request.end_stream(tokens=count)


async def respond_with_text(request: UpstreamRequest) -> None:
    """Send a complete response of one word, without usage."""
    choice = {"index": 0, "text": "something", "finish_reason": "stop"}
    request.send_json(200, {"id": "cmpl-1", "object": "text_completion", "choices": [choice]})


async def repeat_prompt(request: UpstreamRequest) -> None:
    """Answer with the prompt."""
    choice = {"index": 0, "text": request.body["prompt"], "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    request.send_json(200, {"choices": [choice], "usage": usage})


async def respond_500(request: UpstreamRequest) -> None:
    """Fail as a server does that is out of memory."""
    request.send_json(500, {"error": {"message": "out of memory"}})


async def respond_429(request: UpstreamRequest) -> None:
    """Reject as a full server does."""
    request.send_json(429, {"error": {"message": "later"}})


async def reset_connection(request: UpstreamRequest) -> None:
    """Reset the connection before the response starts."""
    request.writer.transport.abort()


async def hang(request: UpstreamRequest) -> None:
    """Never respond."""
    del request
    await asyncio.Event().wait()


@dataclass
class FakeUpstream:
    """HTTP server that serves pages on GET and responds to generations as scripted."""

    separates_probes: ClassVar[bool] = True
    """Whether requests for one token count as probes and not as generations."""

    script: UpstreamScript = respond_with_tokens
    """Responds to generations."""
    probe_script: UpstreamScript = respond_with_tokens
    """Responds to probes."""
    raw_response: Callable[[str], bytes] | None = None
    """Bytes for each path, GETs included, after which the connection closes. Replaces everything else."""
    url: str = ""
    requests: list[UpstreamRequest] = field(default_factory=list)
    """Generations received, without probes."""
    fetched_paths: list[str] = field(default_factory=list)
    """Paths of GETs received."""
    max_concurrent: int = 0
    """Largest number of generations that ran at a time."""
    is_healthy: bool = True
    """Whether GETs succeed; otherwise they get status 503."""
    token_ids: list[int] | None = None
    """Response of /tokenize; None if the server has no such path."""
    tokenize_status: int = 200
    adapters: dict[str, str] | None = None
    """Paths of the loaded adapters by name; None if the server loads none."""
    adapter_loads: int = 0
    """Number of load calls."""
    unknown_fields: set[str] = field(default_factory=set)
    """Fields of bodies and of stream options that the server rejects."""
    _num_running: int = 0
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def num_connections(self) -> int:
        return len(self._writers)

    def get_pages(self) -> dict[str, object]:
        """Pages by path, as text or JSON."""
        return {"/v1/models": MODELS}

    def build_error(self, status: int, message: str) -> Json:
        """Body of an error response."""
        return {"error": {"message": message, "code": status}}

    def close_connections(self) -> None:
        for writer in self._writers:
            writer.close()

    def crash(self) -> None:
        """Reset all connections and listen no more."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def listen(self, host: str, port: int) -> None:
        """Listen until `close`."""
        self._server = await asyncio.start_server(self.serve, host, port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stop listening, close connections and cancel scripts that still run."""
        assert self._server is not None
        self._server.close()
        self.close_connections()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            # A cancelled task would be reported to the loop's exception handler.
            with contextlib.suppress(
                ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError
            ):
                while not writer.is_closing():
                    await self._serve_one(reader, writer)
                    await writer.drain()
        finally:
            writer.close()
            self._writers.discard(writer)
            self._tasks.discard(task)

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {
            name.lower(): value for name, _, value in (line.partition(": ") for line in lines)
        }
        raw = await reader.readexactly(int(headers.get("content-length", "0")))
        method, path, _ = first.split(" ")
        request = UpstreamRequest(path, headers, json.loads(raw) if raw else {}, writer)
        if self.raw_response is not None:
            writer.write(self.raw_response(path))
            await writer.drain()
            writer.close()
        elif method == "GET":
            self.fetched_paths.append(path)
            self._send_page(request)
        else:
            await self._respond(request)

    def _send_page(self, request: UpstreamRequest) -> None:
        pages = self.get_pages()
        if not self.is_healthy:
            request.send_page(503, self.build_error(503, "shutting down"))
        elif request.path not in pages:
            request.send_page(404, {"error": {"message": "no such path"}})
        else:
            request.send_page(200, pages[request.path])

    async def _respond(self, request: UpstreamRequest) -> None:
        if request.path == "/tokenize" and self.token_ids is not None:
            request.send_json(self.tokenize_status, {"tokens": self.token_ids})
        elif request.path.endswith("/load_lora_adapter") and self.adapters is not None:
            self.adapter_loads += 1
            self.adapters[request.body["lora_name"]] = request.body["lora_path"]
            request.send_page(200, "Success")
        elif request.path.endswith("/unload_lora_adapter") and self.adapters is not None:
            self.adapters.pop(request.body["lora_name"], None)
            request.send_page(200, "Success")
        elif request.path not in GENERATION_PATHS:
            request.send_json(404, {"error": {"message": "no such path"}})
        elif unknown := self.unknown_fields & _field_names(request.body):
            request.send_json(400, {"error": {"message": f"unknown: {unknown}"}})
        elif self.separates_probes and request.body.get("max_tokens") == 1:
            await self.probe_script(request)
        else:
            self.requests.append(request)
            self._num_running += 1
            self.max_concurrent = max(self.max_concurrent, self._num_running)
            try:
                await self.script(request)
            finally:
                self._num_running -= 1


def _field_names(body: Json) -> set[str]:
    options = body.get("stream_options")
    return {*body, *(options if isinstance(options, dict) else {})}


@contextlib.asynccontextmanager
async def listening(
    *upstreams: FakeUpstream, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[None]:
    """Let upstreams listen, by default each on a free port."""
    started: list[FakeUpstream] = []
    try:
        for upstream in upstreams:
            await upstream.listen(host, port)
            started.append(upstream)
        yield
    finally:
        for upstream in started:
            await upstream.close()


@contextlib.asynccontextmanager
async def fake_upstream(
    script: UpstreamScript = respond_with_tokens, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[FakeUpstream]:
    """Run one upstream with this script."""
    upstream = FakeUpstream(script)
    async with listening(upstream, host=host, port=port):
        yield upstream
