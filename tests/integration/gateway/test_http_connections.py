"""HTTP connections of clients: pipelining, framing, bounds, timeouts, half-close and disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import re
import select
import socket
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tests.support.http_serving import answer_with, run_server
from tests.support.waiting import until

from argosy.http_server import (
    ClientListener,
    HttpExchange,
    HttpRequest,
    RequestHandler,
    client_connection,
    paced_protocol,
    server,
)
from argosy.http_server import connection as http_connection
from argosy.http_server.server import IDLE_TIMEOUT_S
from argosy.protocol import ApiError

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def echo(exchange: HttpExchange) -> None:
    await exchange.send_response(200, await exchange.read_body())


async def reject_early(exchange: HttpExchange) -> None:
    """Respond before the body has arrived."""
    await exchange.send_response(413, b"no")


async def stream_numbers(exchange: HttpExchange) -> None:
    await asyncio.sleep(0.02)  # a client's half-close arrives before the response begins
    await exchange.start_stream()
    for number in range(3):
        await exchange.write(b"%d;" % number)
    await exchange.end_stream()


async def raise_error(_exchange: HttpExchange) -> None:
    raise ValueError("a bug")


async def say_goodbye(exchange: HttpExchange) -> None:
    await exchange.send_response(200, b"bye")


async def list_headers(exchange: HttpExchange) -> None:
    await exchange.read_body()
    await exchange.send_response(200, b",".join(exchange.headers))


async def count_body(exchange: HttpExchange) -> None:
    exchange.tenant = exchange.get_header(b"x-tenant") or None
    await exchange.send_response(200, b"%d" % len(await exchange.read_body()))


APP = answer_with(
    {
        "/hold/": count_body,
        "/names": list_headers,
        "/echo": echo,
        "/early": reject_early,
        "/counting": stream_numbers,
        "/broken": raise_error,
        "/closing": say_goodbye,
    }
)


@contextlib.asynccontextmanager
async def listen(
    handler: RequestHandler, age_s: float = math.inf, idle_s: float = IDLE_TIMEOUT_S
) -> AsyncIterator[int]:
    """Yield the port of a server."""
    async with run_server(handler, max_connection_age_s=age_s, idle_timeout_s=idle_s) as (_, port):
        yield port


@contextlib.asynccontextmanager
async def connect(port: int) -> AsyncIterator[Connection]:
    """Open a connection to the port."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def connect_to_app(
    app: RequestHandler = APP, idle_s: float = IDLE_TIMEOUT_S
) -> AsyncIterator[Connection]:
    """Open a connection to `app`."""
    async with listen(app, idle_s=idle_s) as port, connect(port) as connection:
        yield connection


async def exchange_bytes(port: int, request_bytes: bytes) -> bytes:
    """Send bytes and return all bytes that the server sends before it closes the connection."""
    async with connect(port) as (reader, writer):
        writer.write(request_bytes)
        return await reader.read()


async def exchange_with_app(request_bytes: bytes, age_s: float = math.inf) -> bytes:
    """Send bytes to `APP` and return all bytes that it sends."""
    async with listen(APP, age_s) as port:
        return await exchange_bytes(port, request_bytes)


def make_post(path: str, body: bytes, *headers: str) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers, "", "")
    return "\r\n".join(lines).encode() + body


GET_STREAM = b"GET /counting HTTP/1.1\r\nhost: x\r\n\r\n"
GET_LAST = b"GET /closing HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


async def test_request_id_does_not_follow_from_earlier_random_numbers() -> None:
    ids = set()
    for _ in range(2):
        random.seed(1)
        response = await exchange_with_app(GET_LAST)
        ids.add(re.search(rb"x-request-id: (\S+)", response)[1])  # type: ignore[index]
    assert len(ids) == 2


async def test_pipelined_requests_are_answered_in_order() -> None:
    requests = b"".join(make_post("/echo", b"<%d>" % number) for number in range(20))
    response = await exchange_with_app(requests + GET_LAST)
    positions = [response.index(b"<%d>" % number) for number in range(20)]
    assert positions == sorted(positions)
    assert response.count(b"HTTP/1.1 200 OK") == 21
    assert response.endswith(b"bye")


async def test_pipelined_requests_over_limit_are_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each queued request would take much more memory than its few bytes."""
    monkeypatch.setattr(http_connection, "MAX_PIPELINED_REQUESTS", 5)
    async with connect_to_app() as (reader, writer):
        requests = [make_post("/echo", b"<%d>" % number) for number in range(5000)]
        writer.write(b"".join(requests))
        response = await reader.read()
    bodies = [part.partition(b"\r\n\r\n")[2] for part in response.split(b"HTTP/1.1 200 OK")[1:]]
    assert bodies == [b"<%d>" % number for number in range(6)]
    assert response.count(b"connection: close") == 1


async def test_pipelined_requests_with_many_headers_have_lower_limit() -> None:
    large = b"GET /counting HTTP/1.1\r\nhost: x\r\n" + b"a:\r\n" * 999 + b"\r\n"
    async with connect_to_app() as (reader, writer):
        writer.write(make_post("/echo", b"first") + large * 40)
        response = await reader.read()
    assert response.count(b"HTTP/1.1 200 OK") == 6
    assert response.count(b"connection: close") == 1


async def test_old_connection_closes_after_complete_response() -> None:
    stream = await exchange_with_app(GET_STREAM, age_s=0.0)
    whole_response = await exchange_with_app(make_post("/echo", b"asked"), age_s=0.0)
    for response, end in ((stream, b"2;\r\n0\r\n\r\n"), (whole_response, b"asked")):
        assert b"connection: close\r\n" in response
        assert response.endswith(end)


async def test_young_connection_is_kept_open() -> None:
    response = await exchange_with_app(
        make_post("/echo", b"one") + make_post("/echo", b"two") + GET_LAST, age_s=3600
    )
    assert response.index(b"one") < response.index(b"two") < response.index(b"bye")
    assert response.index(b"connection: close") > response.index(b"two")


@dataclass(frozen=True)
class Exchange:
    """Bytes that a client sends on one connection, and what it receives until the connection closes."""

    sent: bytes
    statuses: str
    """Statuses of the responses."""
    end: bytes = b""
    contains: bytes = b""


HOST = b" HTTP/1.1\r\nhost: x\r\n"
GET_ECHO, POST_ECHO = b"GET /echo" + HOST, b"POST /echo" + HOST
CHUNKED = POST_ECHO + b"transfer-encoding: chunked\r\n\r\n"
GET_10 = b"GET /counting HTTP/1.0\r\n"
BODY = b"4\r\nbody\r\n0\r\n\r\n"
MANY_HEADERS = b"GET /counting" + HOST + b"a:\r\n" * 1000
LARGE = bytes(range(256)) * 20_000
ENCODING = POST_ECHO + b"transfer-encoding: %b\r\n\r\n" + BODY
REJECTED = {
    # Exactly one Host header, but for HTTP/1.0.
    "no-host": b"GET /echo HTTP/1.1\r\n\r\n",
    "two-hosts": GET_ECHO + b"Host: b\r\n\r\n",
    "equal-hosts": GET_10 + b"host: a\r\nhost: a\r\n\r\n",
    # A proxy in front that decodes the body differently would see another end of the request.
    "gzip": ENCODING % b"gzip, chunked",
    "gzip-line": ENCODING % b"gzip\r\ntransfer-encoding: chunked",
    "chunked-twice": ENCODING % b"chunked\r\ntransfer-encoding: chunked",
    "chunked-not-last": ENCODING % b"chunked, identity",
    "identity": ENCODING % b"identity",
    "chunked-1.0": CHUNKED.replace(b"1.1", b"1.0") + BODY,
    "both-lengths": CHUNKED[:-2] + b"content-length: 3\r\n\r\nabc",
    "two-lengths": POST_ECHO + b"content-length: 3\r\ncontent-length: 5\r\n\r\nabc",
    "negative-length": POST_ECHO + b"content-length: -5\r\n\r\n",
    "chunk-size": CHUNKED + b"zz\r\nabc",
    "folded": GET_ECHO + b" folded: header\r\n\r\n",
    "space": b"GET /echo HTTP/1.1\r\nhost : x\r\n\r\n",
    "version": b"GET / HTTP/9.9\r\n\r\n",
    "path": b"GET /\xff\xfe" + HOST + b"\r\n",
    "connect": b"CONNECT x:443" + HOST + b"\r\n",
    "too-many-headers": MANY_HEADERS + b"a:\r\n" * 2000 + b"\r\n",
    "junk": b"\x00 no HTTP at all\r\n\r\n",
}
ACCEPTED = {
    "no-host-1.0": Exchange(GET_10 + b"\r\n", "200", b"\r\n\r\n0;1;2;"),
    "chunked": Exchange(CHUNKED + BODY + GET_LAST, "200 200", contains=b"\r\n\r\nbodyHTTP"),
    "chunked-in-spaces": Exchange(ENCODING % b" Chunked " + GET_LAST, "200 200"),
    "many-headers": Exchange(MANY_HEADERS + b"\r\n" + GET_LAST, "200 200"),
    "after-close": Exchange(make_post("/echo", b"1", "connection: close") + GET_LAST, "200", b"1"),
    "stream": Exchange(
        GET_STREAM + GET_LAST,
        "200 200",
        contains=b"2\r\n0;\r\n2\r\n1;\r\n2\r\n2;\r\n0\r\n\r\nHTTP/1.1 200 OK",
    ),
    "head": Exchange(GET_LAST.replace(b"GET", b"HEAD"), "200", b"\r\n\r\n", b"length: 3"),
    "trailers": Exchange(
        CHUNKED.replace(b"echo", b"names") + BODY[:-2] + b"authorization: x\r\n\r\n" + GET_LAST,
        "200 200",
        contains=b"\r\n\r\nhost,transfer-encodingHTTP/1.1 ",
    ),
    # The client may send the next request instead of the body.
    "unread-body-with-expect": Exchange(
        make_post("/early", b"x" * 100, "expect: 100-continue")[:-100] + GET_LAST,
        "413",
        contains=b"connection: close",
    ),
    "unread-body": Exchange(
        make_post("/early", b"x" * 3_000_000) + make_post("/echo", b"next") + GET_LAST,
        "413 200 200",
        contains=b"next",
    ),
    "large-body": Exchange(make_post("/echo", LARGE) + GET_LAST, "200 200", contains=LARGE),
    "handler-error": Exchange(b"GET /broken" + HOST + b"\r\n" + GET_LAST, "500 200", b"bye"),
}


@pytest.mark.parametrize("name", REJECTED)
async def test_invalid_request_is_rejected_after_earlier_ones_are_answered(name: str) -> None:
    response = await exchange_with_app(make_post("/echo", b"good") + REJECTED[name] + GET_LAST)
    first, second = response.split(b"HTTP/1.1 400 Bad Request")
    assert first.startswith(b"HTTP/1.1 200 OK")
    assert first.endswith(b"good")
    assert b'"code":"bad_http"' in second
    assert b"HTTP/1.1 " not in second
    assert b"Transfer-Encoding" in second or not name.startswith("gzip")


@pytest.mark.parametrize("name", ACCEPTED)
async def test_valid_request_is_answered(name: str) -> None:
    exchange = ACCEPTED[name]
    response = await exchange_with_app(exchange.sent)
    statuses = [part[:3].decode() for part in response.split(b"HTTP/1.1 ")[1:]]
    assert statuses == exchange.statuses.split()
    assert response.endswith(exchange.end)
    assert exchange.contains in response


@pytest.mark.parametrize(
    ("start", "repeated"),
    [
        (b"", b"\r\n"),
        (b"GET /", b"x"),
        (b"GET /echo HTTP/1.1\r\nhost: x\r\na: ", b"x"),
        (b"GET /echo HTTP/1.1\r\nhost: x\r\n", b"x"),
        (CHUNKED + b"1;", b"x"),
        (CHUNKED + b"1\r\nx\r\n0\r\na: ", b"x"),
    ],
    ids=["nothing", "path", "value", "name", "chunk-extension", "trailer"],
)
async def test_request_without_body_cannot_continue_forever(start: bytes, repeated: bytes) -> None:
    async with connect_to_app() as (reader, writer):
        sent_bytes = 0
        with contextlib.suppress(ConnectionError):
            writer.write(start)
            while not reader.at_eof() and sent_bytes < 64 << 20:
                writer.write(repeated * (65536 // len(repeated)))
                sent_bytes += 65536
                await writer.drain()
    assert sent_bytes < 32 << 20, "socket buffers hold some of it"


async def test_body_in_tiny_chunks_uses_little_memory() -> None:
    """A chunk of two bytes that is stored as received takes 20 times as much memory."""
    tiny = b"2\r\nxx\r\n" * 200_000
    async with connect_to_app() as (reader, writer):
        writer.write(b"POST /hold/ HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        tracemalloc.start()
        try:
            writer.write(tiny + b"0\r\n\r\n" + GET_LAST)
            response = await reader.read()
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert b"\r\n\r\n400000HTTP/1.1" in response
    assert peak_bytes < 3 * len(tiny)


async def test_incomplete_bodies_share_memory_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_connection, "MAX_UNREAD_BODY_BYTES", 1 << 20)
    start = b"POST /hold/ HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    async with listen(APP) as port:
        for _ in range(3):  # the memory is released, however the request ended
            slow_connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
            for _, writer in slow_connections:
                writer.write(start % (1 << 20) + bytes(300_000))
            responses = [asyncio.create_task(reader.read()) for reader, _ in slow_connections]
            done, _ = await asyncio.wait(responses, return_when=asyncio.FIRST_COMPLETED)
            assert all(b" 503 " in response.result().partition(b"\r\n")[0] for response in done)
            for _, writer in slow_connections:
                writer.close()
            await asyncio.gather(*responses, return_exceptions=True)
            response = await exchange_bytes(
                port, make_post("/hold/", bytes(900_000), "connection: close")
            )
            assert response.endswith(b"900000")


async def test_large_bodies_of_one_tenant_leave_memory_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_connection, "MAX_UNREAD_BODY_BYTES", 1 << 20)
    start = b"POST /hold/ HTTP/1.1\r\nhost: x\r\nx-tenant: a\r\ncontent-length: 1000000\r\n\r\n"
    own, other = (
        make_post("/hold/", bytes(200_000), f"x-tenant: {name}", "connection: close")
        for name in "ab"
    )
    async with listen(APP) as port:
        async with connect(port) as (_, slow_writer):
            slow_writer.write(start + bytes(400_000))
            while b" 503 " not in await exchange_bytes(port, own):
                pass  # the server has not read the other body yet
            assert (await exchange_bytes(port, other)).endswith(b"200000")
        while b" 503 " in await exchange_bytes(port, own):
            pass  # the server has not noticed the disconnect yet


async def test_small_bodies_are_accepted_while_large_ones_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients that sent large bodies slowly blocked all others whose request did not fit in one packet."""
    received = 0

    def count_bytes(
        self: client_connection.HttpServerState, count: int, tenant: str | None = None
    ) -> bool:
        nonlocal received
        received += max(0, count)
        return add_unread_bytes(self, count, tenant)

    add_unread_bytes = client_connection.HttpServerState.add_unread_bytes
    monkeypatch.setattr(client_connection.HttpServerState, "add_unread_bytes", count_bytes)
    monkeypatch.setattr(client_connection, "MAX_UNREAD_BODY_BYTES", 1 << 20)
    large, small = (
        make_post("/hold/", bytes(1 << 21)),
        make_post("/hold/", bytes(50_000), "connection: close"),
    )
    async with (
        listen(APP) as port,
        connect(port) as (_, slow_writer),
        connect(port) as new_connection,
    ):
        slow_writer.write(large[: 1 << 20])
        await until(lambda: received > 1_000_000)
        before, (reader, writer) = received, new_connection
        writer.write(small[:40_000])
        await until(lambda: received > before)
        writer.write(small[40_000:])
        assert (await reader.read()).endswith(b"50000")


async def test_large_input_of_all_clients_shares_budget_of_each_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sixty clients with bodies of 15 MB held up the event loop for 750 ms."""
    received_by_turn, turn = Counter[int](), 0

    def count_bytes(
        self: client_connection.HttpServerState, count: int, tenant: str | None = None
    ) -> bool:
        received_by_turn[turn] += max(0, count)
        return add_unread_bytes(self, count, tenant)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    add_unread_bytes = client_connection.HttpServerState.add_unread_bytes
    monkeypatch.setattr(client_connection.HttpServerState, "add_unread_bytes", count_bytes)
    post = make_post("/hold/", bytes(1 << 20), "connection: close")
    async with listen(APP) as port:
        turns = asyncio.create_task(count_turns())
        responses = await asyncio.gather(*(exchange_bytes(port, post) for _ in range(16)))
        turns.cancel()
    assert all(response.endswith(b"%d" % (1 << 20)) for response in responses)
    assert max(received_by_turn.values()) <= 2 * paced_protocol.MAX_BYTES_PER_TURN


async def test_lost_connection_releases_unread_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Applies to a pipelined request that waited, since the memory of unread bodies is limited."""
    unread_bytes, release = 0, asyncio.Event()

    def count_bytes(
        self: client_connection.HttpServerState, count: int, tenant: str | None = None
    ) -> bool:
        nonlocal unread_bytes
        unread_bytes += count
        return add_unread_bytes(self, count, tenant)

    async def fail_later(request: HttpRequest) -> None:
        await release.wait()
        request.transport.start_response(200, [])
        raise ValueError("a bug")

    add_unread_bytes = client_connection.HttpServerState.add_unread_bytes
    monkeypatch.setattr(client_connection.HttpServerState, "add_unread_bytes", count_bytes)
    async with connect_to_app(fail_later) as (_, writer):
        writer.write(GET_STREAM + make_post("/echo", b"hello"))
        await until(lambda: unread_bytes == len(b"hello"))
        release.set()
        await until(lambda: unread_bytes == 0)


async def test_continue_is_sent_when_body_is_read() -> None:
    async with connect_to_app() as (reader, writer):
        requests = make_post("/echo", b"hello", "Expect: 100-Continue", "connection: close")
        writer.write(requests[:-5])
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hello")
        assert (await reader.read()).endswith(b"hello")


async def test_http_1_0_client_gets_no_continue_response() -> None:
    async with connect_to_app() as (reader, writer):
        requests = make_post("/echo", b"hello", "expect: 100-continue").replace(
            b"HTTP/1.1", b"HTTP/1.0"
        )
        writer.write(requests[:-5])
        await writer.drain()
        with pytest.raises(TimeoutError):  # HTTP/1.0 has no interim responses
            async with asyncio.timeout(0.1):
                await reader.read(1)
        writer.write(b"hello")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")


async def test_client_that_sends_large_body_and_closes_gets_response() -> None:
    """Closing the connection while the client still sends would discard the response."""
    async with listen(APP) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            make_post("/early", b"", "connection: close").replace(b"length: 0", b"length: 9999999")
        )
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(99):
            writer.write(b"x" * 100_000)
            await writer.drain()
        assert await reader.read() == b"no"
        writer.close()
        await writer.wait_closed()


H2C = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAARAAAAA")
"""Headers that some clients send with each request, such as Java's own client."""


@pytest.mark.parametrize("cut", [1, 60, 150, None])
async def test_upgrade_request_is_ignored(cut: int | None) -> None:
    """The request is answered as if it had no upgrade headers, and so is the next one."""
    requests = make_post("/echo", b"<body>", *H2C)
    chunked = requests.replace(b"content-length: 6", b"transfer-encoding: chunked")
    chunked = chunked.replace(b"<body>", b"3\r\n<ch\r\n5\r\nunks>\r\n0\r\n\r\n")
    async with connect_to_app() as (reader, writer):
        writer.write((requests + chunked)[:cut])
        if cut is not None:
            await writer.drain()
            await asyncio.sleep(0)
            writer.write((requests + chunked)[cut:])
        writer.write(make_post("/names", b"", *H2C) + GET_LAST)
        response = await reader.read()
    assert response.count(b"HTTP/1.1 200 OK") == 4
    assert b"\r\n\r\n<body>HTTP/1.1" in response
    assert b"\r\n\r\n<chunks>HTTP/1.1" in response
    assert b"host,content-length,connection,http2-settings" in response
    assert response.endswith(b"bye")


@pytest.mark.parametrize(
    ("received", "remedy"),
    [
        (b"PROXY TCP4 10.0.0.1 10.0.0.2 5000 80\r\n" + GET_LAST, "X-Forwarded-For"),
        (b"\r\n\r\n\x00\r\nQUIT\n\x20\x00\x00\x00" + GET_LAST, "X-Forwarded-For"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "use HTTP/1.1"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "http://"),
    ],
    ids=["proxy-1", "proxy-2", "http-2", "tls"],
)
async def test_other_protocols_are_rejected_and_logged_with_remedy(
    received: bytes, remedy: str
) -> None:
    """The operator sees all requests fail and needs to know what to change in the proxy."""
    with capture_logs() as logs:
        response = await exchange_with_app(received)
    assert response.count(b"HTTP/1.1 400 ") == 1
    assert remedy.encode() in response
    (entry,) = [line for line in logs if line["event"] == "bad_protocol"]
    assert remedy in entry["reason"]
    assert entry["address"] == "127.0.0.1"


@pytest.mark.parametrize("fails", [False, True])
async def test_app_without_response_gets_500(fails: bool) -> None:
    async def send_nothing(_request: HttpRequest) -> None:
        if fails:
            raise ValueError("a bug")

    async with connect_to_app(send_nothing) as (reader, writer):
        for _ in range(2):
            writer.write(GET_STREAM)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 500 ")


@pytest.mark.parametrize("wait_s", [60.0, 3600.0])
async def test_retry_is_discouraged_after_long_retry_after(wait_s: float) -> None:
    """SDKs sleep within a call for as long as `retry-after` says, which may be hours for a daily budget."""

    async def reject(_exchange: HttpExchange) -> None:
        raise ApiError(429, "rate_limit_exceeded", "There is no room.", retry_after_s=wait_s)

    async with listen(answer_with(reject)) as port:
        head = await exchange_bytes(port, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert b"\r\nretry-after: %d\r\n" % wait_s in head
    assert (b"\r\nx-should-retry: false\r\n" in head) == (wait_s > 60)


async def test_disconnect_within_body_ends_request() -> None:
    ended = asyncio.Event()

    async def wait(exchange: HttpExchange) -> None:
        try:
            await exchange.read_body()
        finally:
            ended.set()

    async with listen(answer_with(wait)) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(make_post("/", b"x" * 100)[:-1])
        await writer.drain()
        writer.close()
        await ended.wait()


async def test_idle_connection_is_closed() -> None:
    async with connect_to_app(idle_s=0.5) as (reader, writer):
        writer.write(make_post("/echo", b"hello"))
        assert (await reader.read()).endswith(b"hello")


async def test_connection_with_running_request_is_not_idle() -> None:
    """Applies although its request started to arrive while the previous one was still running."""
    release = asyncio.Event()

    async def wait_for_release(exchange: HttpExchange) -> None:
        await release.wait()
        await exchange.send_response(200, b"first")

    async def respond_late(exchange: HttpExchange) -> None:
        await asyncio.sleep(0.5)
        await exchange.send_response(200, b"second")

    app = answer_with({"/1": wait_for_release, "/2": respond_late})
    async with connect_to_app(app, idle_s=0.1) as (reader, writer):
        start, rest = b"GET /2 HTTP/1.1\r\n", b"host: x\r\n\r\n"
        writer.write(b"GET /1 HTTP/1.1\r\nhost: x\r\n\r\n" + start)
        release.set()
        await reader.readuntil(b"first")
        writer.write(rest)
        await reader.readuntil(b"second")


PARTIAL_HEAD = b"GET /echo HTTP/1.1\r\nx: "


@pytest.mark.parametrize("start", [b"", PARTIAL_HEAD, make_post("/echo", b"hi") + PARTIAL_HEAD])
async def test_slow_head_has_header_timeout(start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Applies to a silent client and to a second request on the connection, too."""
    monkeypatch.setattr(http_connection, "HEADER_TIMEOUT_S", 0.2)
    async with connect_to_app() as (reader, writer):
        reading = asyncio.create_task(reader.read())
        async with asyncio.timeout(10):
            while not reading.done():
                writer.write(start)
                start = b"x" if start else b""
                await asyncio.wait([reading], timeout=0.02)
        with contextlib.suppress(ConnectionResetError):
            await reading


async def test_head_may_arrive_slowly_while_previous_request_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_connection, "HEADER_TIMEOUT_S", 0.5)

    async def respond_late(exchange: HttpExchange) -> None:
        await asyncio.sleep(0.7)
        await exchange.send_response(200, exchange.path.encode())

    async with connect_to_app(answer_with(respond_late)) as (reader, writer):
        writer.write(b"GET /1 HTTP/1.1\r\nhost: x\r\n\r\nGET /2 HTTP/1.1\r\n")
        await reader.readuntil(b"/1")
        writer.write(b"host: x\r\n\r\n")
        await reader.readuntil(b"/2")


async def test_request_that_arrives_at_idle_timeout_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request arrived while the loop was busy, and the timer is handled before the socket."""
    created: list[http_connection.HttpConnection] = []

    class RecordedConnection(http_connection.HttpConnection):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)  # type: ignore[arg-type] # it is one
            created.append(self)

    monkeypatch.setattr(server, "HttpConnection", RecordedConnection)
    async with listen(APP) as port:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(make_post("/echo", b"first"))
            assert (await asyncio.to_thread(client.recv, 65536)).endswith(b"first")
            client.sendall(GET_LAST)
            created[0].on_idle_timeout()
            response = await asyncio.to_thread(client.makefile("rb").read)
    assert response.endswith(b"bye")


# --- half-closed connections -----------------------------------------------------------------------


async def exchange_and_half_close(port: int, request_bytes: bytes) -> bytes:
    """Send bytes, close the sending direction, and return all bytes that the server sends."""
    async with connect(port) as (reader, writer):
        writer.write(request_bytes)
        writer.write_eof()
        return await reader.read()


class WaitingApp(ClientListener):
    """An application that responds once `release` is set."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.release = asyncio.Event()
        self.is_disconnected = asyncio.Event()

    async def __call__(self, request: HttpRequest) -> None:
        transport, is_stream = request.transport, request.path == "/stream"
        await transport.read_body(1000)
        transport.set_listener(self)
        self.started.set()
        if is_stream:
            transport.start_response(200, [])
            transport.write_nowait(b"once ")
        await self.release.wait()
        if not is_stream:
            transport.start_response(200, [])
        transport.write_nowait(b"upon")
        transport.end_response()

    def on_disconnect(self) -> None:
        self.is_disconnected.set()
        self.release.set()


async def test_half_closed_client_gets_all_responses() -> None:
    async with listen(APP) as port:
        requests = make_post("/echo", b"one") + make_post("/echo", b"two") + GET_STREAM
        response = await exchange_and_half_close(port, requests)
    assert response.count(b"HTTP/1.1 200 OK") == 3
    assert response.index(b"connection: close") > response.index(b"two")
    assert response.endswith(b"2;\r\n0\r\n\r\n")


@pytest.mark.parametrize("path", ["/whole", "/stream"])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_half_closed_client_may_wait_for_response(path: str, version: bytes) -> None:
    app = WaitingApp()
    async with listen(app) as port:
        requests = make_post(path, b"").replace(b"1.1", version)
        answering = asyncio.create_task(exchange_and_half_close(port, requests))
        await app.started.wait()
        app.release.set()
        response = await answering
    assert b"HTTP/1.1 200 OK" in response  # after a probe, if it took a second
    assert b"upon" in response
    assert not app.is_disconnected.is_set()


@pytest.mark.parametrize(
    ("version", "probes", "end"),
    [
        (b"1.1", b"HTTP/1.1 100 Continue\r\n\r\n" * 2, b"upon\r\n0\r\n\r\n"),
        (b"1.0", b"HT", b"\r\n\r\nupon"),  # it knows no interim response
    ],
)
async def test_half_closed_client_is_probed(version: bytes, probes: bytes, end: bytes) -> None:
    app = WaitingApp()
    async with connect_to_app(app) as (reader, writer):
        writer.write(make_post("/whole", b"").replace(b"1.1", version))
        writer.write_eof()
        assert await reader.readexactly(len(probes)) == probes
        app.release.set()
        response = await reader.read()
    assert (probes + response).count(b"HTTP/1.1 200 OK\r\n") == 1
    assert response.endswith(end)


async def test_half_request_gets_no_response() -> None:
    async with listen(APP) as port:
        for half in (make_post("/echo", b"one")[:-1], make_post("/echo", b"one")[:20], b""):
            assert await exchange_and_half_close(port, half) == b""


@pytest.mark.parametrize("end", ["close", "half-close-then-close"])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_disconnect_is_noticed_before_response(end: str, version: bytes) -> None:
    app = WaitingApp()
    async with listen(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(make_post("/whole", b"").replace(b"1.1", version))
        await app.started.wait()
        if end != "close":
            writer.write_eof()
            await reader.readexactly(1)
        writer.close()
        await app.is_disconnected.wait()


@pytest.mark.parametrize("header", [b"", b"connection: close\r\n"])
async def test_client_that_reads_nothing_is_disconnected(header: bytes) -> None:
    async def send_large(request: HttpRequest) -> None:
        body = b"x" * 50_000_000
        request.transport.send_response(200, [(b"content-length", b"%d" % len(body))], body)

    async with listen(send_large, idle_s=0.1) as port:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n" + header + b"\r\n")
            poll = select.poll()
            poll.register(client, 0)  # errors are always reported
            await until(lambda: poll.poll(0))


async def test_slow_reader_of_large_response_gets_it() -> None:
    size = 30_000_000

    async def send_large(request: HttpRequest) -> None:
        request.transport.send_response(200, [(b"content-length", b"%d" % size)], b"x" * size)

    async with connect_to_app(send_large, idle_s=0.2) as (reader, writer):
        requests = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
        writer.write(requests)
        for _ in range(2):
            await reader.readuntil(b"\r\n\r\n")
            for part in range(15):
                await reader.readexactly(size // 15)
                await asyncio.sleep(0.05)  # the client reads slowly
                if part == 10:
                    writer.write(requests)


async def describe_request(request: HttpRequest) -> None:
    """Respond with the request's method, path, headers and body."""
    headers = [(name.decode(), value.decode()) for name, value in request.headers]
    received = (await request.transport.read_body(1 << 20)).decode("latin-1")
    body = json.dumps([request.method, request.path, headers, received]).encode()
    request.transport.send_response(200, [(b"content-length", b"%d" % len(body))], body)


LENGTHS = ("content-length: {}", "Content-Length: {}", "content-length:{}", "Content-Length:  {}")
SEEN_BODIES = st.sampled_from(
    (b"", b"{}", b'{"a":1}', b"x" * 1000, b"a\r\n\r\nPOST /seen HTTP/1.1\r\n\r\n")
)
HEADERS = st.lists(
    st.sampled_from(("x-a: 1", "x-a: 2", "X-B:", "connection: keep-alive", "accept: */*")),
    max_size=3,
    unique=True,
)


@st.composite
def make_requests(draw: st.DrawFn) -> bytes:
    """A request as clients write it, with a length or in chunks."""
    body, before, after = draw(SEEN_BODIES), draw(HEADERS), draw(HEADERS)
    length = draw(st.sampled_from((*LENGTHS, "content-length: 00{}", "transfer-encoding: chunked")))
    head = ("POST /seen HTTP/1.1", "host: x", *before, length.format(len(body)), *after, "", "")
    if "chunked" in length:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
    return "\r\n".join(head).encode() + body


REPEATED_REQUESTS = st.lists(make_requests(), min_size=1, max_size=3).flatmap(
    lambda distinct: st.lists(st.sampled_from(distinct), min_size=2, max_size=8)
)
"""Few distinct requests, repeated."""


async def read_description(reader: asyncio.StreamReader) -> list[object]:
    """Return what the application received: method, path, headers and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
    seen: list[object] = json.loads(await reader.readexactly(length))
    return seen


async def exchange_in_order(port: int, requests_sent: list[bytes], cut: int) -> list[list[object]]:
    """Send requests one after another on one connection, the last one in two segments."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    descriptions = []
    for request in requests_sent[:-1]:
        writer.write(request)
        descriptions.append(await read_description(reader))
    writer.write(requests_sent[-1][:cut])
    await writer.drain()
    writer.write(requests_sent[-1][cut:])
    descriptions.append(await read_description(reader))
    writer.close()
    return descriptions


@settings(max_examples=60, deadline=None)
@given(REPEATED_REQUESTS, st.integers(0, 200))
def test_earlier_requests_do_not_affect_parsing(requests_sent: list[bytes], cut: int) -> None:
    async def exchange_both_ways() -> tuple[list[list[object]], list[list[object]]]:
        async with listen(describe_request) as port:
            separate = [
                (await exchange_in_order(port, [request], 0))[0] for request in requests_sent
            ]
            return await exchange_in_order(port, requests_sent, cut), separate

    together, separate = asyncio.run(exchange_both_ways())
    assert together == separate
