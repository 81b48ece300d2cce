"""The client towards replicas, against servers that behave well, badly and in pieces."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import itertools
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.byte_server import CHUNKED, OK, Kept, ask, read_request, serving
from tests.support.waiting import still, until

from argosy.gateway.upstream import connection as upstream_connection
from argosy.gateway.upstream import upstream_response as attempts
from argosy.gateway.upstream.connection import UpstreamConnection, UpstreamError
from argosy.gateway.upstream.name_resolution import resolve_addresses
from argosy.gateway.upstream.upstream import CONNECTION_ATTEMPT_DELAY_S, Upstream
from argosy.gateway.upstream.upstream_response import UpstreamResponse
from argosy.policy import AttemptOutcome
from argosy.protocol import parse_endpoint


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
        (
            b"HTTP/1.1 103 Early Hints\r\ncontent-length: 9\r\n\r\nHTTP/1.1 200 OK\r\n\r\nto the end",
            b"to the end",
        ),
    ],
    ids=["chunked", "length", "until the end", "HTTP/1.0", "interim", "interim with a length"],
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
        assert sink.error.before_response == untouched
        assert upstream.take_idle_connection() is None


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
    with socket.socket() as deaf:  # its port is nobody else's, and it does not listen
        deaf.bind(("127.0.0.1", 0))
        upstream = Upstream(parse_endpoint(f"http://127.0.0.1:{deaf.getsockname()[1]}"))
        with pytest.raises(UpstreamError, match="no connection") as caught:
            await upstream.connect()
    assert caught.value.before_response


async def test_a_name_that_is_found_too_late_is_a_failure_and_no_more() -> None:
    loop, reported = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _, context: reported.append(context))
    late = Upstream(parse_endpoint("http://nowhere.invalid"), connect_timeout_s=0.0001)
    for _ in range(8):
        with pytest.raises(UpstreamError, match="no connection"):
            await late.connect()
    with pytest.raises(OSError, match=r"[Nn]ame"):
        await resolve_addresses("nowhere.invalid")
    await until(lambda: not any(thread.name == "blocking-call" for thread in threading.enumerate()))
    gc.collect()
    assert not reported


class Names:
    """What the system says of names: those of `hang` are not answered before `answers` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *addresses: str, hang: str = "") -> None:
        self.addresses = list(addresses)
        self.answers = threading.Event()
        self.asked: list[str] = []
        self._hang = hang
        self._system: Callable[..., list[Any]] = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._find)

    def _find(self, host: str, *given: object, **more: object) -> list[Any]:
        if not host.endswith(".test") or more:
            return self._system(host, *given, **more)
        self.asked.append(host)
        if self._hang and host.startswith(self._hang):
            self.answers.wait()
        return [(0, 0, 0, "", (address, 0)) for address in self.addresses]


async def test_names_that_nobody_answers_for_keep_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = Names(monkeypatch, "127.0.0.1", hang="hangs")
    try:
        async with serving(_nothing) as upstream:
            port = upstream.endpoint.port
            others = [Upstream(parse_endpoint(f"http://hangs{i}.test:{port}")) for i in range(40)]
            waiting = [asyncio.create_task(other.connect()) for other in others]
            await until(lambda: len(names.asked) == len(others))
            well = Upstream(parse_endpoint(f"http://a.test:{port}"), connect_timeout_s=60)
            (await well.connect()).abort()
            names.answers.set()
            for made in await asyncio.gather(*waiting):
                made.abort()
    finally:
        names.answers.set()


async def test_a_name_is_asked_for_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch, "127.0.0.1", hang="hangs")
    try:
        async with serving(_nothing) as upstream:
            endpoint = parse_endpoint(f"http://hangs.test:{upstream.endpoint.port}")
            named = Upstream(endpoint, connect_timeout_s=0.01)
            for _ in range(8):
                with pytest.raises(UpstreamError, match="no connection within"):
                    await named.connect()
            assert names.asked == ["hangs.test"]
            names.answers.set()
            await until(lambda: not any(one.name == "blocking-call" for one in threading.enumerate()))
            named = Upstream(endpoint)
            (await named.connect()).abort()
    finally:
        names.answers.set()


async def _nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def test_every_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)

    names = Names(monkeypatch, "127.0.0.9", "127.0.0.1")  # nobody listens at the first
    async with serving(handler) as upstream:
        named, sink = Upstream(parse_endpoint(f"http://a.test:{upstream.endpoint.port}")), Kept()
        await ask(named, sink, b"{}")
        await sink.ended.wait()
        assert (sink.status, sink.error) == (200, None)
        named.close()
        while names.addresses:
            names.addresses.pop()
            with pytest.raises(UpstreamError, match="no connection"):
                await named.connect()


@pytest.mark.parametrize("host", ["127.0.0.1", "a.test"])
async def test_what_accepts_and_closes_is_no_connection(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """As forwarders do whose server is away: nothing can be asked there, and nobody would be called back."""
    made = UpstreamConnection.connection_made
    Names(monkeypatch, "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as forwarder:

        def made_and_closed(self: UpstreamConnection, transport: asyncio.BaseTransport) -> None:
            made(self, transport)
            forwarder.accept()[0].close()

        monkeypatch.setattr(UpstreamConnection, "connection_made", made_and_closed)
        upstream = Upstream(parse_endpoint(f"http://{host}:{forwarder.getsockname()[1]}"))
        attempt = UpstreamResponse(time.monotonic)

        async def asked() -> None:
            await attempt.send(upstream, upstream.build_request(b"GET", b"/", b"", []))
            await attempt.status

        with pytest.raises(UpstreamError):
            await asked()


async def test_an_address_that_never_answers_costs_a_moment_and_no_more_than_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Names(monkeypatch, "127.0.0.9", "127.0.0.1")
    async with serving(_nothing) as upstream:
        port = upstream.endpoint.port
        with full_socket("127.0.0.9", port):
            named = Upstream(parse_endpoint(f"http://a.test:{port}"), connect_timeout_s=10)
            waits = []
            for _ in range(3):
                begun = time.monotonic()
                (await named.connect()).abort()
                waits.append(time.monotonic() - begun)
    assert CONNECTION_ATTEMPT_DELAY_S <= waits[0] < 10
    assert max(waits[1:]) < CONNECTION_ATTEMPT_DELAY_S


@contextlib.contextmanager
def full_socket(host: str, port: int) -> Iterator[None]:
    """A place that answers nobody who connects: as many wait there as may."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((host, port))
        listener.listen(0)
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect((host, port))
        yield


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
        connection.pause_reading()
        assert await still(lambda: sent) < 4000 * len(piece)
        assert len(sink.body) < 1 << 20
        connection.resume_reading()
        await sink.ended.wait()
        assert len(sink.body) == 4000 * len(piece)


@pytest.mark.parametrize(
    ("held_s", "outcome"), [(0.0, None), (60.0, AttemptOutcome.FAILURE)], ids=["long", "a moment"]
)
async def test_a_server_that_was_held_back_for_long_may_give_up(
    held_s: float, outcome: AttemptOutcome | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cuts off clients that take nothing; what ours does not take says nothing about it."""
    monkeypatch.setattr(upstream_connection, "LONG_PAUSE_S", held_s)
    paused = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED + b"3\r\nabc\r\n")
        await paused.wait()
        writer.transport.abort()

    async with serving(handler) as upstream:
        sink = Kept()
        connection = await ask(upstream, sink)
        await sink.begun.wait()
        connection.pause_reading()
        connection.pause_reading()
        connection.resume_reading()
        paused.set()
        await sink.ended.wait()
        assert sink.error is not None
        assert sink.error.outcome is outcome


async def test_a_sink_that_paused_at_an_answers_end_leaves_a_connection_that_works() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(OK)

    class Behind(Kept):
        """A client that is behind when the answer's last bytes come."""

        connection: UpstreamConnection

        def on_body(self, body: bytes) -> None:
            super().on_body(body)
            self.connection.pause_reading()

    async with serving(handler) as upstream:
        sink = Behind()
        sink.connection = await ask(upstream, sink)
        await sink.ended.wait()
        kept = upstream.take_idle_connection()
        assert kept is sink.connection
        then = Kept()
        kept.send_request(upstream.build_request(b"POST", b"/x", b"", []), then)
        async with asyncio.timeout(5.0):
            await then.ended.wait()
        assert (then.body, then.error) == (b"ok", None)


async def test_what_was_abandoned_on_a_kept_connection_is_not_asked_again() -> None:
    asked, taken = 0, asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        while True:
            await read_request(reader)
            asked += 1
            if asked == 1:
                writer.write(OK)
            else:
                taken.set()  # and it says nothing any more

    async with serving(handler) as upstream:
        request, clock = upstream.build_request(b"POST", b"/v1/x", b"{}", []), time.monotonic
        first = UpstreamResponse(clock)
        await first.send(upstream, request)
        assert await first.read_body() == b"ok"
        second = UpstreamResponse(clock)
        sending = asyncio.create_task(second.send(upstream, request))
        await taken.wait()
        second.abort("too late")
        with pytest.raises(UpstreamError, match="too late"):
            await sending
    assert asked == 2


@pytest.mark.parametrize(("after_s", "again"), [(0.5, True), (1.5, False)])
async def test_a_kept_connection_that_was_cut_late_had_taken_the_request(
    after_s: float, again: bool
) -> None:
    asked, now = 0, 0.0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked, now
        await read_request(reader)
        writer.write(OK)
        await read_request(reader)
        asked += 1
        now += after_s

    async with serving(handler) as upstream:
        request = upstream.build_request(b"POST", b"/v1/x", b"{}", [])
        first, second = UpstreamResponse(lambda: now), UpstreamResponse(lambda: now)
        await first.send(upstream, request)
        assert await first.read_body() == b"ok"
        if again:
            await second.send(upstream, request)
            assert await second.read_body() == b"ok"
        else:
            with pytest.raises(UpstreamError, match="closed"):
                await second.send(upstream, request)
    assert asked == 1


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


def falls_silent(peer: socket.socket) -> None:
    """From now on its machine drops whatever comes for it, as if it had lost its power."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0
    program = struct.pack("HL", 1, ctypes.addressof(drop_all))
    peer.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER


@pytest.mark.skipif(sys.platform != "linux", reason="others have no such timeouts")
@pytest.mark.parametrize("begun", [False, True])
async def test_a_machine_that_vanishes_is_missed(
    monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """Before it has taken a request, and in the middle of its answer."""
    monkeypatch.setattr(upstream_connection, "TCP_USER_TIMEOUT_S", 1)
    gone = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if begun:
            await read_request(reader)
            writer.write(CHUNKED + b"3\r\nabc\r\n")
            await gone.wait()
        falls_silent(writer.get_extra_info("socket"))
        gone.set()
        await reader.read()

    async with serving(handler) as upstream:
        connection, sink = await upstream.connect(), Kept()
        if not begun:
            await gone.wait()
        connection.send_request(upstream.build_request(b"POST", b"/v1/x", b"{}", []), sink)
        if begun:
            await sink.begun.wait()
            gone.set()
        await sink.ended.wait()
    assert sink.error is not None
    assert "timed out" in str(sink.error).lower()


async def test_unix_sockets(tmp_path: Path) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)

    async with serving(handler, tmp_path / "replica.sock") as upstream:
        sink = Kept()
        await ask(upstream, sink)
        await sink.ended.wait()
        assert sink.body == b"ok"


# --- hostile replicas: each costs an attempt, and no more ----------------------------------------


async def flood(upstream: Upstream) -> Kept:
    """Ask, and wait for how that ends."""
    sink = Kept()
    await ask(upstream, sink)
    await sink.ended.wait()
    return sink


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"x-a: " + b"a" * 1000 + b"\r\n"),
        (b"HTTP/1.1 200 OK\r\nx-a: ", b"a" * 1000),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 40),
        (b"HTTP/1.1 200 ", b"O" * 1000),
        (CHUNKED + b"3;x=", b"a" * 1000),
        (CHUNKED + b"0\r\n", b"x-a: " + b"a" * 1000 + b"\r\n"),
    ],
    ids=["headers", "a header", "interim answers", "reason", "chunk extension", "trailers"],
)
async def test_what_is_no_body_may_not_go_on_for_ever(begin: bytes, piece: bytes) -> None:
    sent = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(begin)
        while not writer.is_closing():
            writer.write(piece)
            await writer.drain()
            sent += len(piece)

    async with serving(handler) as upstream:
        sink = await flood(upstream)
        assert sink.error is not None
        assert upstream.take_idle_connection() is None
        assert len(sink.body) <= 3


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999999\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nabc",
        CHUNKED + b"ffffffffffffffffffff\r\n",
        CHUNKED + b"-1\r\n",
        CHUNKED + b"2\r\nabc\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\nx",
        b"HTTP/9.9 200 OK\r\n\r\n",
        b"HTTP/1.1 999999 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na b: c\r\n\r\n",
        b"\x16\x03\x01\x02\x00" * 10,
        b"\r\n" * 40_000,
    ],
)
async def test_what_makes_no_sense_is_a_failure(answer: bytes) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)
        await reader.read()

    async with serving(handler) as upstream:
        sink = await flood(upstream)
        assert sink.error is not None
        assert upstream.take_idle_connection() is None


async def test_bytes_that_nobody_asked_for_close_the_connection() -> None:
    more, sent = asyncio.Event(), asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)
        await more.wait()
        writer.write(OK)
        assert await reader.read() == b""
        sent.set()

    async with serving(handler) as upstream:
        sink = await flood(upstream)
        assert sink.error is None
        more.set()
        await sent.wait()
        assert upstream.take_idle_connection() is None


async def test_an_answer_that_nobody_takes_is_not_kept_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempts, "MAX_BUFFERED_BYTES", 1 << 20)

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED)
        while not writer.is_closing():
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()

    async with serving(handler) as upstream:
        attempt = UpstreamResponse(asyncio.get_running_loop().time)
        await attempt.send(upstream, upstream.build_request(b"POST", b"/v1/x", b"{}", []))
        assert await attempt.status == 200
        with pytest.raises(UpstreamError, match="larger than"):
            await attempt.read_body()


@given(
    answer=st.binary(max_size=300)
    | st.lists(
        st.sampled_from(
            [
                b"HTTP/1.1 200 OK\r\n",
                b"HTTP/1.1 100 \r\n\r\n",
                b"content-length: 3\r\n",
                b"transfer-encoding: chunked\r\n",
                b"connection: close\r\n",
                b"\r\n",
                b"3\r\nabc\r\n",
                b"0\r\n\r\n",
                b"abc",
                b"\x00",
            ]
        ),
        max_size=12,
    ).map(b"".join),
    cuts=st.lists(st.integers(0, 300), max_size=5),
)
@example(answer=b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 3\r\n\r\nabcabc", cuts=[])
def test_no_bytes_whatsoever_do_more_than_end_an_attempt(answer: bytes, cuts: list[int]) -> None:
    sink, kept = Kept(), list[UpstreamConnection]()
    connection = UpstreamConnection(kept.append)
    connection.connection_made(Wire())
    connection.send_request(b"", sink)
    edges = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    for begin, end in itertools.pairwise(edges):
        if not connection.closed:
            connection.data_received(answer[begin:end])
    connection.connection_lost(None)
    assert sink.ended.is_set()
    assert (sink.error is None) == (sink.status >= 200 and bool(kept))


class Wire(asyncio.Transport):
    """A transport of which only the end is seen."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def abort(self) -> None:
        pass

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default


# --- addresses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["", "host", "ftp://x", "http://", "http://x:y", "unix:relative"])
def test_what_is_no_address_is_refused_with_the_remedy(url: str) -> None:
    with pytest.raises(ValueError, match="write http://HOST:PORT"):
        parse_endpoint(url)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://a", "a"),
        ("http://a:8000/v1/", "a:8000"),
        ("https://a:443/x/v1", "a"),
        ("http://[::1]:8000", "[::1]:8000"),
        ("unix:/a b.sock", "unix:/a b.sock"),
        ("unix:///a.sock", "unix:/a.sock"),
        ("http+unix://%2Fa.sock/v1", "unix:/a.sock"),
    ],
)
def test_addresses(url: str, name: str) -> None:
    endpoint = parse_endpoint(url)
    assert endpoint.display_name == name
    assert endpoint.path_prefix == ("/x" if "/x" in url else "")
    assert endpoint.tls == url.startswith("https")
