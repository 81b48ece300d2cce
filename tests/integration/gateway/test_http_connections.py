"""Connections as clients of every kind find them: answered in order, bounded, and closed when they must be."""

from __future__ import annotations

import asyncio
import contextlib
import math
import select
import socket
import tracemalloc
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Mount, Route
from structlog.testing import capture_logs
from tests.support.waiting import until

from argosy.gateway.config import GatewayConfig
from argosy.http_server import (
    AsgiApp,
    HttpExchange,
    HttpServer,
    Receive,
    Scope,
    Send,
    bind_tcp,
    listen_url,
    run_handler,
    server,
)
from argosy.http_server import connection as connections
from argosy.http_server.http_exchange import TRANSPORT_KEY
from argosy.http_server.server import IDLE_TIMEOUT_S
from argosy.protocol import ApiError

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(await request.body())


async def early(request: Request) -> PlainTextResponse:
    """Answers before the body has come."""
    return PlainTextResponse("no", status_code=413, headers={"x-path": request.url.path})


async def counting(_request: Request) -> StreamingResponse:
    async def numbers() -> AsyncIterator[str]:
        for number in range(3):
            yield f"{number};"

    return StreamingResponse(numbers())


async def broken(_request: Request) -> PlainTextResponse:
    raise ValueError("a fault of ours")


async def closing(_request: Request) -> PlainTextResponse:
    return PlainTextResponse("bye", headers={"connection": "close"})


async def names(request: Request) -> PlainTextResponse:
    await request.body()
    return PlainTextResponse(",".join(request.headers.keys()))


async def hold(scope: Scope, receive: Receive, send: Send) -> None:
    """Takes the whole body at once, as the gateway does, and says how long it is."""
    exchange = HttpExchange(scope, receive, send, GatewayConfig(models=[]))

    async def length() -> None:
        await exchange.send_response(200, str(len(await exchange.read_body())).encode())

    await run_handler(exchange, length())


APP = Starlette(
    routes=[
        Mount("/hold", hold),
        Route("/names", names, methods=["POST"]),
        Route("/echo", echo, methods=["GET", "HEAD", "POST"]),
        Route("/early", early, methods=["POST"]),
        Route("/counting", counting),
        Route("/broken", broken),
        Route("/closing", closing),
    ]
)


@contextlib.asynccontextmanager
async def listening(
    app: AsgiApp, age_s: float = math.inf, idle_s: float = IDLE_TIMEOUT_S
) -> AsyncIterator[int]:
    """The port that `app` listens on."""
    listener, bound = (
        HttpServer(app, max_connection_age_s=age_s, idle_timeout_s=idle_s),
        bind_tcp("127.0.0.1", 0),
    )
    port = int(listen_url(bound).rsplit(":", 1)[1])
    running = asyncio.create_task(listener.serve(sockets=[bound]))
    try:
        yield port
    finally:
        listener.force_exit = True
        listener.stop()
        await running


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[Connection]:
    """A connection to there."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def talking(app: AsgiApp = APP, idle_s: float = IDLE_TIMEOUT_S) -> AsyncIterator[Connection]:
    """A connection to `app`."""
    async with listening(app, idle_s=idle_s) as port, connected(port) as connection:
        yield connection


async def talk(port: int, sent: bytes) -> bytes:
    """All that comes back for `sent` until the server closes."""
    async with connected(port) as (reader, writer):
        writer.write(sent)
        return await reader.read()


async def answer_to(sent: bytes, age_s: float = math.inf) -> bytes:
    """The same, of `APP`."""
    async with listening(APP, age_s) as port:
        return await talk(port, sent)


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers, "", "")
    return "\r\n".join(lines).encode() + body


COUNT = b"GET /counting HTTP/1.1\r\nhost: x\r\n\r\n"
LAST = b"GET /closing HTTP/1.1\r\nhost: x\r\n\r\n"


async def test_pipelined_requests_are_answered_in_order() -> None:
    asked = b"".join(post("/echo", b"<%d>" % number) for number in range(20))
    answer = await answer_to(asked + LAST)
    found = [answer.index(b"<%d>" % number) for number in range(20)]
    assert found == sorted(found)
    assert answer.count(b"HTTP/1.1 200 OK") == 21
    assert answer.endswith(b"bye")


async def test_of_very_many_pipelined_requests_the_first_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others were never taken in: each would cost much more than its few bytes."""
    monkeypatch.setattr(connections, "MAX_PIPELINED_REQUESTS", 5)
    async with talking() as (reader, writer):
        asked = [post("/echo", b"<%d>" % number) for number in range(5000)]
        writer.write(b"".join(asked))
        answer = await reader.read()
    bodies = [one.partition(b"\r\n\r\n")[2] for one in answer.split(b"HTTP/1.1 200 OK")[1:]]
    assert bodies == [b"<%d>" % number for number in range(6)]
    assert answer.count(b"connection: close") == 1


async def test_of_pipelined_requests_with_many_headers_fewer_are_taken_in() -> None:
    many = b"GET /counting HTTP/1.1\r\nhost: x\r\n" + b"a:\r\n" * 999 + b"\r\n"
    async with talking() as (reader, writer):
        writer.write(post("/echo", b"first") + many * 40)
        answer = await reader.read()
    assert answer.count(b"HTTP/1.1 200 OK") == 6
    assert answer.count(b"connection: close") == 1


async def test_a_head_of_very_many_headers_is_refused() -> None:
    some = b"GET /counting HTTP/1.1\r\nhost: x\r\n" + b"a:\r\n" * 1000 + b"\r\n"
    many = b"GET /counting HTTP/1.1\r\nhost: x\r\n" + b"a:\r\n" * 3000 + b"\r\n"
    answer = await answer_to(some + many)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.count(b"HTTP/1.1 400 Bad Request") == 1
    assert b"bad_http" in answer


async def test_an_old_connection_ends_with_a_whole_answer() -> None:
    stream = await answer_to(COUNT, age_s=0.0)
    piece = await answer_to(post("/echo", b"asked"), age_s=0.0)
    for answer, end in ((stream, b"2;\r\n0\r\n\r\n"), (piece, b"asked")):
        assert b"connection: close\r\n" in answer
        assert answer.endswith(end)


async def test_a_young_connection_is_kept() -> None:
    answer = await answer_to(post("/echo", b"one") + post("/echo", b"two") + LAST, age_s=3600)
    assert answer.index(b"one") < answer.index(b"two") < answer.index(b"bye")
    assert answer.index(b"connection: close") > answer.index(b"two")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /echo HTTP/1.1\r\n", b"400 Bad Request"),
        (b"GET /echo HTTP/1.1\r\nhost: a\r\nHost: b\r\n", b"400 Bad Request"),
        (b"GET /echo HTTP/1.0\r\nhost: a\r\nhost: a\r\n", b"400 Bad Request"),
        (b"GET /closing HTTP/1.1\r\nhost: a\r\n", b"200 OK"),
        (b"GET /closing HTTP/1.0\r\n", b"200 OK"),
    ],
)
async def test_a_request_says_once_whom_it_is_for(head: bytes, status: bytes) -> None:
    answer = await answer_to(head + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 " + status)


async def test_a_stream_without_a_length_is_chunked_and_http_1_0_ends_with_the_connection() -> None:
    chunked = await answer_to(COUNT + LAST)
    plain = await answer_to(b"GET /counting HTTP/1.0\r\n\r\n")
    assert b"transfer-encoding: chunked" in chunked
    assert b"2\r\n0;\r\n2\r\n1;\r\n2\r\n2;\r\n0\r\n\r\nHTTP/1.1 200 OK" in chunked
    assert b"transfer-encoding" not in plain
    assert plain.endswith(b"\r\n\r\n0;1;2;")


async def test_head_has_the_length_and_no_body() -> None:
    answer = await answer_to(b"HEAD /closing HTTP/1.1\r\nhost: x\r\n\r\n")
    assert b"content-length: 3" in answer
    assert answer.endswith(b"\r\n\r\n")


CHUNKED = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begun", "more"),
    [
        (b"", b"\r\n"),
        (b"GET /", b"x"),
        (b"GET /echo HTTP/1.1\r\nhost: x\r\na: ", b"x"),
        (b"GET /echo HTTP/1.1\r\nhost: x\r\n", b"x"),
        (CHUNKED + b"1;", b"x"),
        (CHUNKED + b"1\r\nx\r\n0\r\na: ", b"x"),
    ],
    ids=["nothing", "path", "value", "name", "chunk extension", "trailer"],
)
async def test_what_is_no_body_does_not_go_on_for_ever(begun: bytes, more: bytes) -> None:
    async with talking() as (reader, writer):
        sent = 0
        with contextlib.suppress(ConnectionError):
            writer.write(begun)
            while not reader.at_eof() and sent < 64 << 20:
                writer.write(more * (65536 // len(more)))
                sent += 65536
                await writer.drain()
    assert sent < 32 << 20, "sockets hold some of that"


async def test_a_body_in_tiny_chunks_takes_no_more_than_it_has() -> None:
    """A chunk of two bytes that is kept as it came takes 20 times as much."""
    tiny = b"2\r\nxx\r\n" * 200_000
    async with talking() as (reader, writer):
        writer.write(b"POST /hold/ HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        tracemalloc.start()
        try:
            writer.write(tiny + b"0\r\n\r\n" + LAST)
            answer = await reader.read()
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert b"\r\n\r\n400000HTTP/1.1" in answer
    assert most < 3 * len(tiny)


async def test_bodies_that_are_never_whole_take_so_much_together_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "MAX_UNREAD_BODY_BYTES", 1 << 20)
    begun = b"POST /hold/ HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    async with listening(APP) as port:
        for _ in range(3):  # what was kept is given back, however it ended
            slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
            for _, writer in slow:
                writer.write(begun % (1 << 20) + bytes(300_000))
            answers = [asyncio.create_task(reader.read()) for reader, _ in slow]
            done, _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
            assert all(b" 503 " in answer.result().partition(b"\r\n")[0] for answer in done)
            for _, writer in slow:
                writer.close()
            await asyncio.gather(*answers, return_exceptions=True)
            whole = await talk(port, post("/hold/", bytes(900_000), "connection: close"))
            assert whole.endswith(b"900000")


async def test_there_is_room_for_small_bodies_whoever_sends_large_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who sent large ones slowly kept all others out, but for those whose request came in one packet."""
    came = 0

    def keep(self: connections.HttpConnection, count: int) -> bool:
        nonlocal came
        came += max(0, count)
        return keeps(self, count)

    keeps = connections.HttpConnection.add_unread_bytes
    monkeypatch.setattr(connections.HttpConnection, "add_unread_bytes", keep)
    monkeypatch.setattr(connections, "MAX_UNREAD_BODY_BYTES", 1 << 20)
    large, small = (
        post("/hold/", bytes(1 << 21)),
        post("/hold/", bytes(50_000), "connection: close"),
    )
    async with listening(APP) as port, connected(port) as (_, slow), connected(port) as new:
        slow.write(large[: 1 << 20])
        await until(lambda: came > 1_000_000)
        before, (reader, writer) = came, new
        writer.write(small[:40_000])
        await until(lambda: came > before)
        writer.write(small[40_000:])
        assert (await reader.read()).endswith(b"50000")


async def test_of_a_request_whose_connection_was_lost_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though it waited for its turn: what is kept of bodies is counted."""
    kept, may = 0, asyncio.Event()

    def keep(self: connections.HttpConnection, count: int) -> bool:
        nonlocal kept
        kept += count
        return keeps(self, count)

    async def fails(_scope: Scope, _receive: Receive, send: Send) -> None:
        await may.wait()
        await send({"type": "http.response.start", "status": 200})
        raise ValueError("a fault of ours")

    keeps = connections.HttpConnection.add_unread_bytes
    monkeypatch.setattr(connections.HttpConnection, "keep", keep)
    async with talking(fails) as (_, writer):
        writer.write(COUNT + post("/echo", b"hello"))
        await until(lambda: kept == len(b"hello"))
        may.set()
        await until(lambda: kept == 0)


async def test_continue_is_sent_when_the_body_is_wanted() -> None:
    async with talking() as (reader, writer):
        asked = post("/echo", b"hello", "Expect: 100-Continue", "connection: close")
        writer.write(asked[:-5])
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hello")
        assert (await reader.read()).endswith(b"hello")


async def test_an_older_client_is_not_told_to_continue() -> None:
    async with talking() as (reader, writer):
        asked = post("/echo", b"hello", "expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/1.0")
        writer.write(asked[:-5])
        await writer.drain()
        with pytest.raises(TimeoutError):  # it knows no interim answers
            async with asyncio.timeout(0.1):
                await reader.read(1)
        writer.write(b"hello")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")


async def test_a_body_that_was_never_called_for_is_not_waited_for() -> None:
    """Its client may send the next request instead."""
    asked = post("/early", b"x" * 100, "expect: 100-continue")
    answer = await answer_to(asked[:-100] + LAST)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer
    assert answer.count(b"HTTP/1.1 ") == 1


async def test_who_sends_a_large_body_and_wants_the_connection_closed_gets_the_answer() -> None:
    """Closing while it still sends would take the answer from it."""
    async with listening(APP) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            post("/early", b"", "connection: close").replace(b"length: 0", b"length: 9999999")
        )
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(99):
            writer.write(b"x" * 100_000)
            await writer.drain()
        assert await reader.read() == b"no"
        writer.close()
        await writer.wait_closed()


async def test_what_was_answered_early_is_read_over() -> None:
    answer = await answer_to(post("/early", b"x" * 3_000_000) + post("/echo", b"next") + LAST)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"next" in answer
    assert answer.endswith(b"bye")


async def test_a_large_body_comes_whole() -> None:
    body = bytes(range(256)) * 20_000
    answer = await answer_to(post("/echo", body, "connection: close"))
    assert answer.endswith(body)


async def test_chunked_bodies_come_whole() -> None:
    answer = await answer_to(CHUNKED + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n" + LAST)
    assert b"\r\n\r\nabcde" in answer


async def test_what_comes_behind_a_body_is_no_header() -> None:
    head = b"POST /names HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = await answer_to(head + b"1\r\na\r\n0\r\nauthorization: Bearer x\r\n\r\n" + LAST)
    assert b"\r\n\r\nhost,transfer-encoding" in answer
    assert b"authorization" not in answer


H2C = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAARAAAAA")
"""What some clients, Java's own among them, ask with each request."""


@pytest.mark.parametrize("cut", [1, 60, 150, None])
async def test_an_upgrade_is_not_taken_up(cut: int | None) -> None:
    """The request is answered as if it had not been asked for, and so is the next."""
    asked = post("/echo", b"<body>", *H2C)
    chunked = asked.replace(b"content-length: 6", b"transfer-encoding: chunked")
    chunked = chunked.replace(b"<body>", b"3\r\n<ch\r\n5\r\nunks>\r\n0\r\n\r\n")
    async with talking() as (reader, writer):
        writer.write((asked + chunked)[:cut])
        if cut is not None:
            await writer.drain()
            await asyncio.sleep(0)
            writer.write((asked + chunked)[cut:])
        writer.write(post("/names", b"", *H2C) + LAST)
        answer = await reader.read()
    assert answer.count(b"HTTP/1.1 200 OK") == 4
    assert b"\r\n\r\n<body>HTTP/1.1" in answer
    assert b"\r\n\r\n<chunks>HTTP/1.1" in answer
    assert b"host,content-length,connection,http2-settings" in answer
    assert answer.endswith(b"bye")


async def test_a_tunnel_is_refused() -> None:
    answer = await answer_to(b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n" + LAST)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1


async def test_nonsense_after_a_request_is_refused_after_its_answer() -> None:
    answer = await answer_to(post("/echo", b"good") + b"\x00 no HTTP at all\r\n\r\n")
    first, second = answer.split(b"HTTP/1.1 400 Bad Request")
    assert first.startswith(b"HTTP/1.1 200 OK")
    assert first.endswith(b"good")
    assert b'"code":"bad_http"' in second


@pytest.mark.parametrize(
    ("came", "remedy"),
    [
        (b"PROXY TCP4 10.0.0.1 10.0.0.2 5000 80\r\n" + LAST, "X-Forwarded-For"),
        (b"\r\n\r\n\x00\r\nQUIT\n\x20\x00\x00\x00" + LAST, "X-Forwarded-For"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "use HTTP/1.1"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "http://"),
    ],
    ids=["proxy-1", "proxy-2", "http-2", "tls"],
)
async def test_what_proxies_may_speak_instead_is_told_and_logged(came: bytes, remedy: str) -> None:
    """An operator sees all requests fail, and what to change about the proxy."""
    with capture_logs() as logs:
        answer = await answer_to(came)
    assert answer.count(b"HTTP/1.1 400 ") == 1
    assert remedy.encode() in answer
    (told,) = [line for line in logs if line["event"] == "bad_protocol"]
    assert remedy in told["reason"]
    assert told["address"] == "127.0.0.1"


async def test_nothing_is_read_after_a_request_that_closes() -> None:
    answer = await answer_to(post("/echo", b"one", "connection: close") + LAST)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.endswith(b"one")


@pytest.mark.parametrize(
    "head",
    [
        b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ncontent-length: 5\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked, identity\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /echo HTTP/1.1\r\nhost: x\r\n folded: header\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nhost : x\r\n\r\n",
    ],
    ids=["both lengths", "two lengths", "chunked not last", "chunk size", "folded", "space"],
)
async def test_what_two_servers_could_read_in_two_ways_is_refused(head: bytes) -> None:
    answer = await answer_to(head + b"abc" + LAST)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1


async def test_a_fault_of_ours_is_500_and_the_connection_lives() -> None:
    answer = await answer_to(b"GET /broken HTTP/1.1\r\nhost: x\r\n\r\n" + LAST)
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert answer.endswith(b"bye")


@pytest.mark.parametrize("fails", [False, True])
async def test_an_application_that_answers_nothing_is_answered_for(fails: bool) -> None:
    async def nothing(_scope: Scope, _receive: Receive, _send: Send) -> None:
        if fails:
            raise ValueError("a fault of ours")

    async with talking(nothing) as (reader, writer):
        for _ in range(2):
            writer.write(COUNT)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 500 ")


@pytest.mark.parametrize("wait_s", [60.0, 3600.0])
async def test_only_who_need_not_wait_for_long_is_to_send_it_again(wait_s: float) -> None:
    """SDKs wait in the middle of a call for as long as they are told: hours, until a budget's next day."""

    async def full() -> None:
        raise ApiError(429, "rate_limit_exceeded", "There is no room.", retry_after_s=wait_s)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(scope, receive, send, GatewayConfig(models=[]))
        await run_handler(exchange, full())

    async with listening(app) as port:
        head = await talk(port, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert b"\r\nretry-after: %d\r\n" % wait_s in head
    assert (b"\r\nx-should-retry: false\r\n" in head) == (wait_s > 60)


async def test_a_client_that_leaves_in_the_middle_of_its_body_ends_the_request() -> None:
    ended = asyncio.Event()

    async def wait(request: Request) -> PlainTextResponse:
        try:
            return PlainTextResponse(await request.body())
        finally:
            ended.set()

    async with listening(Starlette(routes=[Route("/", wait, methods=["POST"])])) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post("/", b"x" * 100)[:-1])
        await writer.drain()
        writer.close()
        await ended.wait()


async def test_a_connection_that_nobody_uses_is_closed() -> None:
    async with talking(idle_s=0.5) as (reader, writer):
        writer.write(post("/echo", b"hello"))
        assert (await reader.read()).endswith(b"hello")


async def test_who_is_being_answered_is_not_idle() -> None:
    """Though its request began to come while the one before was being answered."""
    may = asyncio.Event()

    async def wait(_request: Request) -> PlainTextResponse:
        await may.wait()
        return PlainTextResponse("first")

    async def take_long(_request: Request) -> PlainTextResponse:
        await asyncio.sleep(0.5)
        return PlainTextResponse("second")

    app = Starlette(routes=[Route("/1", wait), Route("/2", take_long)])
    async with talking(app, idle_s=0.1) as (reader, writer):
        begun, rest = b"GET /2 HTTP/1.1\r\n", b"host: x\r\n\r\n"
        writer.write(b"GET /1 HTTP/1.1\r\nhost: x\r\n\r\n" + begun)
        may.set()
        await reader.readuntil(b"first")
        writer.write(rest)
        await reader.readuntil(b"second")


BEGUN = b"GET /echo HTTP/1.1\r\nx: "


@pytest.mark.parametrize("begun", [b"", BEGUN, post("/echo", b"hi") + BEGUN])
async def test_a_head_that_comes_drop_by_drop_has_no_longer_than_others(
    begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor has who says nothing, or goes on with one after an answer."""
    monkeypatch.setattr(server, "HEADER_TIMEOUT_S", 0.2)
    async with talking() as (reader, writer):
        reading = asyncio.create_task(reader.read())
        async with asyncio.timeout(10):
            while not reading.done():
                writer.write(begun)
                begun = b"x" if begun else b""
                await asyncio.wait([reading], timeout=0.02)
        with contextlib.suppress(ConnectionResetError):
            await reading


async def test_a_head_may_come_slowly_while_the_request_before_it_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "HEADER_TIMEOUT_S", 0.5)

    async def take_long(request: Request) -> PlainTextResponse:
        await asyncio.sleep(0.7)
        return PlainTextResponse(request.url.path)

    async with talking(Starlette(routes=[Route("/{any}", take_long)])) as (reader, writer):
        writer.write(b"GET /1 HTTP/1.1\r\nhost: x\r\n\r\nGET /2 HTTP/1.1\r\n")
        await reader.readuntil(b"/1")
        writer.write(b"host: x\r\n\r\n")
        await reader.readuntil(b"/2")


async def test_a_request_that_is_there_when_its_connection_has_been_idle_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It came while the loop did something else, which learns first what the time is."""
    made: list[connections.HttpConnection] = []

    class Noted(connections.HttpConnection):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)  # type: ignore[arg-type] # it is one
            made.append(self)

    monkeypatch.setattr(server, "Connection", Noted)
    async with listening(APP) as port:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(post("/echo", b"first"))
            assert (await asyncio.to_thread(client.recv, 65536)).endswith(b"first")
            client.sendall(LAST)
            made[0].on_idle_timeout()
            answer = await asyncio.to_thread(client.makefile("rb").read)
    assert answer.endswith(b"bye")


# --- clients that say that they have said all ------------------------------------------------------


async def say_all(port: int, sent: bytes) -> bytes:
    """As `talk`, with the sending direction closed."""
    async with connected(port) as (reader, writer):
        writer.write(sent)
        writer.write_eof()
        return await reader.read()


class Slow:
    """An application whose answer waits."""

    def __init__(self) -> None:
        self.asked, self.may, self.is_disconnected = (
            asyncio.Event(),
            asyncio.Event(),
            asyncio.Event(),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        scope["state"][TRANSPORT_KEY].watch(self)
        self.asked.set()
        if scope["path"] == "/stream":
            await send({"type": "http.response.start", "status": 200})
            await send({"type": "http.response.body", "body": b"once ", "more_body": True})
        await self.may.wait()
        if scope["path"] != "/stream":
            await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"upon"})

    def on_backpressure(self) -> None:
        """See `Watcher`."""

    def on_writable(self) -> None:
        """See `Watcher`."""

    def on_half_close(self) -> None:
        """See `Watcher`."""

    def on_disconnect(self) -> None:
        """See `Watcher`."""
        self.is_disconnected.set()
        self.may.set()


async def test_who_has_said_all_gets_all_answers() -> None:
    async with listening(APP) as port:
        asked = post("/echo", b"one") + post("/echo", b"two") + COUNT
        answer = await say_all(port, asked)
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.index(b"connection: close") > answer.index(b"two")
    assert answer.endswith(b"2;\r\n0\r\n\r\n")


@pytest.mark.parametrize("path", ["/whole", "/stream"])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_who_has_said_all_may_wait(path: str, version: bytes) -> None:
    slow = Slow()
    async with listening(slow) as port:
        asked = post(path, b"").replace(b"1.1", version)
        answering = asyncio.create_task(say_all(port, asked))
        await slow.asked.wait()
        slow.may.set()
        answer = await answering
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"upon" in answer
    assert not slow.is_disconnected.is_set()


async def test_who_has_said_all_is_asked_whether_it_waits() -> None:
    slow = Slow()
    async with talking(slow) as (reader, writer):
        writer.write(post("/whole", b""))
        writer.write_eof()
        for _ in range(2):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        slow.may.set()
        assert (await reader.read()).endswith(b"upon\r\n0\r\n\r\n")


async def test_an_older_client_is_asked_with_what_all_answers_begin_with() -> None:
    slow = Slow()
    async with talking(slow) as (reader, writer):
        writer.write(post("/whole", b"").replace(b"1.1", b"1.0"))
        writer.write_eof()
        assert await reader.readexactly(2) == b"HT"
        slow.may.set()
        answer = await reader.read()
    assert answer.startswith(b"TP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\nupon")


async def test_half_a_request_is_none() -> None:
    async with listening(APP) as port:
        for half in (post("/echo", b"one")[:-1], post("/echo", b"one")[:20], b""):
            assert await say_all(port, half) == b""


@pytest.mark.parametrize("end", ["close", "say all, then close"])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_who_has_left_is_missed_before_there_is_an_answer(end: str, version: bytes) -> None:
    slow = Slow()
    async with listening(slow) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post("/whole", b"").replace(b"1.1", version))
        await slow.asked.wait()
        if end != "close":
            writer.write_eof()
            await reader.readexactly(1)
        writer.close()
        await slow.is_disconnected.wait()


@pytest.mark.parametrize("ending", [b"", b"connection: close\r\n"])
async def test_who_takes_nothing_of_a_whole_answer_is_not_kept_for_ever(ending: bytes) -> None:
    async def much(_request: Request) -> PlainTextResponse:
        return PlainTextResponse(b"x" * 50_000_000)

    async with listening(Starlette(routes=[Route("/", much)]), idle_s=0.1) as port:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n" + ending + b"\r\n")
            poll = select.poll()
            poll.register(client, 0)  # errors are told unasked
            await until(lambda: poll.poll(0))


async def test_who_takes_whole_answers_slowly_gets_them() -> None:
    size = 30_000_000

    async def much(_request: Request) -> PlainTextResponse:
        return PlainTextResponse(b"x" * size)

    app = Starlette(routes=[Route("/", much)])
    async with talking(app, idle_s=0.2) as (reader, writer):
        asked = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
        writer.write(asked)
        for _ in range(2):
            await reader.readuntil(b"\r\n\r\n")
            for part in range(15):
                await reader.readexactly(size // 15)
                await asyncio.sleep(0.05)  # it takes its time
                if part == 10:
                    writer.write(asked)
