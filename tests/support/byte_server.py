"""Servers scripted per connection, and an `Upstream` that is their client, for tests of the HTTP client itself."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from argosy.gateway.upstream import Upstream, UpstreamError
from argosy.gateway.upstream.connection import UpstreamConnection
from argosy.protocol import parse_endpoint

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class ResponseRecorder:
    """Sink that records a response."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.pieces: list[bytes] = []
        self.error: UpstreamError | None = None
        self.ended = asyncio.Event()
        self.body_started = asyncio.Event()

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status, self.headers = status, dict(headers)

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)
        self.body_started.set()

    def on_end(self) -> None:
        self.ended.set()

    def on_failure(self, error: UpstreamError) -> None:
        self.error = error
        self.ended.set()

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)


@contextlib.asynccontextmanager
async def serve_handler(
    handler: Handler, unix: Path | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """Run a server whose connections `handler` serves, and yield its URL. Handlers are cancelled at the end."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
            await handler(reader, writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    if unix is None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
        scheme = "http" if tls is None else "https"
        url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    else:
        server = await asyncio.start_unix_server(serve, unix)
        url = f"unix:{unix}"
    try:
        yield url
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def connected_upstream(
    handler: Handler,
    unix: Path | None = None,
    *,
    tls: ssl.SSLContext | None = None,
    trust: ssl.SSLContext | None = None,
) -> AsyncIterator[Upstream]:
    """Run a server whose connections `handler` serves, and yield a client of it."""
    async with serve_handler(handler, unix, tls) as url:
        upstream = Upstream(parse_endpoint(url if unix else f"{url}/v1"), tls=trust)
        try:
            yield upstream
        finally:
            upstream.close()


class ForwardProxy:
    """Handler of an HTTP proxy that finds all hosts on this machine, and records the heads of its requests."""

    def __init__(self) -> None:
        self.heads: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection: a tunnel (CONNECT) to the port that is asked for."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        port = int(head.split()[1].rpartition(":")[2])
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HTTP/1.1 200 Connection established\r\nx-proxy: test\r\n\r\n")
        copies = asyncio.gather(_copy(reader, server_writer), _copy(server_reader, writer))
        try:
            await copies
        finally:
            server_writer.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(65536):
        target.write(data)
        await target.drain()
    target.close()


async def send_request(
    upstream: Upstream, sink: ResponseRecorder, body: bytes = b"{}"
) -> UpstreamConnection:
    connection = upstream.take_idle_connection() or await upstream.connect()
    headers = [(b"content-type", b"application/json")]
    connection.send_request(upstream.build_request(b"POST", b"/v1/x", body, headers), sink)
    return connection


async def send_and_wait(upstream: Upstream, body: bytes = b"{}") -> ResponseRecorder:
    """Send a request and wait for the end of its response."""
    recorder = ResponseRecorder()
    await send_request(upstream, recorder, body)
    await recorder.ended.wait()
    return recorder


def answer(response: bytes, *, closes: bool = False) -> Handler:
    """Return a handler that answers each request with these bytes, or the first one before it closes."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(response)
            if closes:
                return

    return handler


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head + await reader.readexactly(length)
