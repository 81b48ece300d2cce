"""The client towards replicas, against servers that behave well, badly and in pieces."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from argosy.gateway.upstream import Connection, Upstream, UpstreamError, parse_endpoint

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Kept:
    """A sink that keeps the answer."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.pieces: list[bytes] = []
        self.error: UpstreamError | None = None
        self.ended = asyncio.Event()
        self.begun = asyncio.Event()

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status, self.headers = status, dict(headers)

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)
        self.begun.set()

    def on_end(self) -> None:
        self.ended.set()

    def on_failure(self, error: UpstreamError) -> None:
        self.error = error
        self.ended.set()

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)


@contextlib.asynccontextmanager
async def serving(handler: Handler, unix: Path | None = None) -> AsyncIterator[Upstream]:
    """A client of a server whose connections `handler` serves, one task each."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(
            asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError
        ):
            await handler(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    if unix is None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    else:
        server = await asyncio.start_unix_server(serve, unix)
        url = f"unix:{unix}"
    upstream = Upstream(parse_endpoint(url))
    try:
        yield upstream
    finally:
        upstream.close()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def ask(upstream: Upstream, sink: Kept, body: bytes = b"{}") -> Connection:
    connection = upstream.kept() or await upstream.connect()
    headers = [(b"content-type", b"application/json")]
    connection.ask(upstream.request(b"POST", b"/v1/x", body, headers), sink)
    return connection


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head + await reader.readexactly(length)


async def test_a_request_goes_out_whole_and_the_connection_is_kept() -> None:
    requests, connections = [], 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            requests.append(await read_request(reader))
            writer.write(OK)

    async with serving(handler) as upstream:
        for _ in range(3):
            sink = Kept()
            await ask(upstream, sink, b'{"a": 1}')
            await sink.ended.wait()
            assert (sink.status, sink.body, sink.error) == (200, b"ok", None)
    assert connections == 1
    assert requests[0].startswith(b"POST /v1/x HTTP/1.1\r\nhost: 127.0.0.1:")
    assert requests[0].endswith(b'\r\n\r\n{"a": 1}')


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (CHUNKED + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", b"abcde"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabcde", b"abcde"),
        (b"HTTP/1.1 200 OK\r\n\r\nabcde", b"abcde"),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK, b"ok"),
    ],
    ids=["chunked", "length", "until the end", "HTTP/1.0", "interim"],
)
async def test_answers_of_every_framing_come_whole_in_any_pieces(
    answer: bytes, body: bytes
) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for at in range(len(answer)):
            writer.write(answer[at : at + 1])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async with serving(handler) as upstream:
        sink = Kept()
        await ask(upstream, sink)
        await sink.ended.wait()
        assert (sink.status, sink.body, sink.error) == (200, body, None)


@pytest.mark.parametrize(
    ("answer", "untouched"),
    [
        (b"", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", False),
        (CHUNKED + b"3\r\nabc\r\n", False),
        (b"SSH-2.0-OpenSSH_9.2\r\n", True),
        (CHUNKED + b"zz\r\n", False),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            True,
        ),
    ],
    ids=["nothing", "short", "cut", "no HTTP", "bad chunk", "two framings"],
)
async def test_what_does_not_come_whole_is_a_failure(answer: bytes, untouched: bool) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)
        writer.close()

    async with serving(handler) as upstream:
        sink = Kept()
        await ask(upstream, sink)
        await sink.ended.wait()
        assert sink.error is not None
        assert sink.error.untouched == untouched
        assert upstream.kept() is None


async def test_a_second_answer_to_one_request_is_never_taken_for_the_next() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(OK + OK.replace(b"ok", b"no"))

    async with serving(handler) as upstream:
        for _ in range(3):
            sink = Kept()
            await ask(upstream, sink)
            await sink.ended.wait()
            assert (sink.body, sink.error) == (b"ok", None)


async def test_no_server_is_a_failure_that_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    upstream = Upstream(parse_endpoint(f"http://127.0.0.1:{port}"))
    with pytest.raises(UpstreamError, match="no connection") as caught:
        await upstream.connect()
    assert caught.value.untouched


async def test_a_paused_sink_holds_the_server_back_and_memory_stays_bounded() -> None:
    sent, piece = 0, b"x" * 65536

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (4000 * len(piece)))
        for _ in range(4000):
            writer.write(piece)
            await writer.drain()
            sent += len(piece)

    async with serving(handler) as upstream:
        sink = Kept()
        connection = await ask(upstream, sink)
        await sink.begun.wait()
        connection.pause()
        before = -1
        while sent != before:  # until the server can send no more
            before = sent
            await asyncio.sleep(0.2)
        assert sent < 4000 * len(piece)
        assert len(sink.body) < 1 << 20
        connection.resume()
        await sink.ended.wait()
        assert len(sink.body) == 4000 * len(piece)


async def test_aborting_tells_the_server_at_once() -> None:
    gone = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED + b"3\r\nabc\r\n")
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        gone.set()

    async with serving(handler) as upstream:
        sink = Kept()
        connection = await ask(upstream, sink)
        await sink.begun.wait()
        connection.abort()
        await gone.wait()
        assert not sink.ended.is_set()


async def test_small_writes_are_not_held_back() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del writer
        await reader.read()

    async with serving(handler) as upstream:
        connection = await upstream.connect()
        assert connection.transport is not None
        peer = connection.transport.get_extra_info("socket")
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        connection.abort()


async def test_unix_sockets(tmp_path: Path) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)

    async with serving(handler, tmp_path / "replica.sock") as upstream:
        sink = Kept()
        await ask(upstream, sink)
        await sink.ended.wait()
        assert sink.body == b"ok"


@pytest.mark.parametrize("url", ["", "host", "ftp://x", "http://", "http://x:y", "unix:relative"])
def test_what_is_no_address_is_refused_with_the_remedy(url: str) -> None:
    with pytest.raises(ValueError, match="write http://HOST:PORT"):
        parse_endpoint(url)
