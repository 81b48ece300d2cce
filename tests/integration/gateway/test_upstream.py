"""HTTP client towards replicas, tested with correct, broken and hostile servers."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import socket
import ssl
import struct
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.byte_server import (
    CHUNKED,
    OK,
    ResponseRecorder,
    answer,
    connected_upstream,
    read_request,
    send_and_wait,
    send_request,
    serve_handler,
)
from tests.support.certificates import Authority
from tests.support.waiting import stable_value, until

from argosy.deployment import ReplicaConfig, find_replica_proxy
from argosy.gateway.upstream import (
    Upstream,
    UpstreamError,
    UpstreamResponse,
    resolve_addresses,
    upstream_response,
)
from argosy.gateway.upstream import connection as upstream_connection
from argosy.gateway.upstream.connection import UpstreamConnection
from argosy.gateway.upstream.upstream import CONNECTION_ATTEMPT_DELAY_S
from argosy.policy import AttemptOutcome
from argosy.protocol import parse_endpoint
from argosy.proxies import Proxy, direct_mounts


async def test_request_is_sent_complete_and_connection_reused() -> None:
    requests, connections = [], 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            requests.append(await read_request(reader))
            writer.write(OK)

    async with connected_upstream(handler) as upstream:
        for _ in range(3):
            recorder = await send_and_wait(upstream, b'{"a": 1}')
            assert (recorder.status, recorder.body, recorder.error) == (200, b"ok", None)
    assert connections == 1
    assert requests[0].startswith(b"POST /v1/x HTTP/1.1\r\nhost: 127.0.0.1:")
    assert requests[0].endswith(b'\r\n\r\n{"a": 1}')


@pytest.mark.parametrize(
    ("response", "body"),
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
    ids=["chunked", "length", "until-close", "http-1.0", "interim", "interim-with-length"],
)
async def test_response_framing_is_parsed_byte_by_byte(response: bytes, body: bytes) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for at in range(len(response)):
            writer.write(response[at : at + 1])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async with connected_upstream(handler) as upstream:
        recorder = await send_and_wait(upstream)
        assert (recorder.status, recorder.body, recorder.error) == (200, body, None)


@pytest.mark.parametrize(
    ("response", "before_response"),
    [
        (b"", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", False),
        (CHUNKED + b"3\r\nabc\r\n", False),
        (b"SSH-2.0-OpenSSH_9.2\r\n", True),
        (CHUNKED + b"zz\r\n", False),
        (CHUNKED + b"ffffffffffffffffffff\r\n", False),
        (CHUNKED + b"-1\r\n", False),
        (CHUNKED + b"2\r\nabc\r\n", False),
        (CHUNKED[:-2] + b"content-length: 2\r\n\r\n0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999999\r\n\r\nx", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nabc", True),
        (b"HTTP/1.1 101 X\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\nx", True),
        (b"HTTP/9.9 200 OK\r\n\r\n", True),
        (b"HTTP/1.1 999999 OK\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\na b: c\r\n\r\n", True),
        (b"\x16\x03\x01\x02\x00" * 10, True),
        (b"\r\n" * 40_000, True),
    ],
    ids=lambda value: repr(value)[-40:],
)
async def test_incomplete_or_invalid_response_is_failure(
    response: bytes, before_response: bool
) -> None:
    """A response that is invalid already is not awaited."""
    is_incomplete = response in {b"", CHUNKED + b"3\r\nabc\r\n"} or response.endswith(
        b": 9\r\n\r\nabc"
    )
    async with connected_upstream(answer(response, closes=is_incomplete)) as upstream:
        recorder = await send_and_wait(upstream)
        assert recorder.error is not None
        assert recorder.error.before_response == before_response
        assert upstream.take_idle_connection() is None


async def test_unrequested_second_response_is_not_used_for_next_request() -> None:
    async with connected_upstream(answer(OK + OK.replace(b"ok", b"no"))) as upstream:
        for _ in range(3):
            recorder = await send_and_wait(upstream)
            assert (recorder.body, recorder.error) == (b"ok", None)


async def test_refused_connection_is_failure() -> None:
    with socket.socket() as unlistening:  # reserves a port that does not listen
        unlistening.bind(("127.0.0.1", 0))
        upstream = Upstream(parse_endpoint(f"http://127.0.0.1:{unlistening.getsockname()[1]}"))
        with pytest.raises(UpstreamError, match="no connection") as caught:
            await upstream.connect()
    assert caught.value.before_response


async def test_late_name_resolution_is_failure_without_side_effects() -> None:
    loop, reported = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _, context: reported.append(context))
    impatient = Upstream(parse_endpoint("http://nowhere.invalid"), connect_timeout_s=0.0001)
    for _ in range(8):
        with pytest.raises(UpstreamError, match="no connection"):
            await impatient.connect()
    with pytest.raises(OSError, match=r"[Nn]ame"):
        await resolve_addresses("nowhere.invalid")
    await until(lambda: not any(thread.name == "blocking-call" for thread in threading.enumerate()))
    gc.collect()
    assert not reported


class FakeResolver:
    """Replacement of `getaddrinfo`. Names with the prefix `hang` are not resolved before `answers` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *addresses: str, hang: str = "") -> None:
        self.addresses = list(addresses)
        self.release = threading.Event()
        self.asked: list[str] = []
        self._hang = hang
        self._system: Callable[..., list[Any]] = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._getaddrinfo)

    def _getaddrinfo(self, host: str, *args: object, **kwargs: object) -> list[Any]:
        if not host.endswith(".test") or kwargs:
            return self._system(host, *args, **kwargs)
        self.asked.append(host)
        if self._hang and host.startswith(self._hang):
            self.release.wait()
        return [(0, 0, 0, "", (address, 0)) for address in self.addresses]


async def test_unanswered_names_do_not_delay_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolver = FakeResolver(monkeypatch, "127.0.0.1", hang="hangs")
    try:
        async with connected_upstream(accept_and_wait) as upstream:
            port = upstream.endpoint.port
            hanging = [Upstream(parse_endpoint(f"http://hangs{i}.test:{port}")) for i in range(40)]
            tasks = [
                asyncio.create_task(hanging_upstream.connect()) for hanging_upstream in hanging
            ]
            await until(lambda: len(resolver.asked) == len(hanging))
            resolvable = Upstream(parse_endpoint(f"http://a.test:{port}"), connect_timeout_s=60)
            (await resolvable.connect()).abort()
            resolver.release.set()
            for connection in await asyncio.gather(*tasks):
                connection.abort()
    finally:
        resolver.release.set()


async def test_name_is_resolved_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = FakeResolver(monkeypatch, "127.0.0.1", hang="hangs")
    try:
        async with connected_upstream(accept_and_wait) as upstream:
            endpoint = parse_endpoint(f"http://hangs.test:{upstream.endpoint.port}")
            named = Upstream(endpoint, connect_timeout_s=0.01)
            for _ in range(8):
                with pytest.raises(UpstreamError, match="no connection within"):
                    await named.connect()
            assert resolver.asked == ["hangs.test"]
            resolver.release.set()
            await until(
                lambda: not any(thread.name == "blocking-call" for thread in threading.enumerate())
            )
            named = Upstream(endpoint)
            (await named.connect()).abort()
    finally:
        resolver.release.set()


async def accept_and_wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def test_all_addresses_of_name_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing listens at the first address.
    resolver = FakeResolver(monkeypatch, "127.0.0.9", "127.0.0.1")
    async with connected_upstream(answer(OK)) as upstream:
        named = Upstream(parse_endpoint(f"http://a.test:{upstream.endpoint.port}"))
        recorder = await send_and_wait(named)
        assert (recorder.status, recorder.error) == (200, None)
        named.close()
        while resolver.addresses:
            resolver.addresses.pop()
            with pytest.raises(UpstreamError, match="no connection"):
                await named.connect()


@pytest.mark.parametrize("host", ["127.0.0.1", "a.test"])
async def test_connection_closed_on_accept_is_failure(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """Forwarders whose server is down behave like this, and no callback would follow."""
    connection_made = UpstreamConnection.connection_made
    FakeResolver(monkeypatch, "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as forwarder:

        def accept_and_close(self: UpstreamConnection, transport: asyncio.BaseTransport) -> None:
            connection_made(self, transport)
            forwarder.accept()[0].close()

        monkeypatch.setattr(UpstreamConnection, "connection_made", accept_and_close)
        upstream = Upstream(parse_endpoint(f"http://{host}:{forwarder.getsockname()[1]}"))
        response = UpstreamResponse(time.monotonic)

        async def send() -> None:
            await response.send(upstream, upstream.build_request(b"GET", b"/", b"", []))
            await response.status

        with pytest.raises(UpstreamError):
            await send()


async def test_unresponsive_address_delays_only_first_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeResolver(monkeypatch, "127.0.0.9", "127.0.0.1")
    async with connected_upstream(accept_and_wait) as upstream:
        port = upstream.endpoint.port
        with unresponsive_listener("127.0.0.9", port):
            named = Upstream(parse_endpoint(f"http://a.test:{port}"), connect_timeout_s=10)
            waits = []
            for _ in range(3):
                started_at = time.monotonic()
                (await named.connect()).abort()
                waits.append(time.monotonic() - started_at)
    assert CONNECTION_ATTEMPT_DELAY_S <= waits[0] < 10
    assert min(waits[1:]) < CONNECTION_ATTEMPT_DELAY_S  # any of them may be late on a busy machine


@contextlib.contextmanager
def unresponsive_listener(host: str, port: int) -> Iterator[None]:
    """Listen with a full backlog, so that no new connection is answered."""
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


@pytest.fixture(params=["plain", "tls"])
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Contexts of the server and of its client."""
    if request.param == "plain":
        return {}
    authority = Authority(tmp_path)
    pair = authority.pair("server", "127.0.0.1")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    return {"tls": context, "trust": ssl.create_default_context(cafile=authority.ca)}


async def test_pause_reading_limits_memory_and_pauses_server(
    transport: dict[str, Any],
) -> None:
    sent, chunk, is_closed = 0, b"x" * 65536, asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(OK)
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (1000 * len(chunk)))
        for _ in range(1000):
            writer.write(chunk)
            await writer.drain()
            sent += len(chunk)
        assert await reader.read() == b""
        is_closed.set()

    async with connected_upstream(handler, **transport) as upstream:
        assert (await send_and_wait(upstream)).body == b"ok"
        recorder = ResponseRecorder()
        connection = await send_request(upstream, recorder)
        await recorder.body_started.wait()
        connection.pause_reading()
        assert await stable_value(lambda: sent) < 1000 * len(chunk)
        assert len(recorder.body) < 2 << 20
        connection.resume_reading()
        await recorder.ended.wait()
        assert len(recorder.body) == 1000 * len(chunk)
        assert upstream.take_idle_connection() is connection
        connection.close()
        await is_closed.wait()


async def test_cut_response_is_failure(transport: dict[str, Any]) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED + b"3\r\nabc\r\n")
        await writer.drain()
        writer.transport.abort()

    async with connected_upstream(handler, **transport) as upstream:
        recorder = await send_and_wait(upstream)
        assert recorder.error is not None
        assert recorder.body == b"abc"


@pytest.mark.parametrize(
    ("long_pause_s", "outcome"),
    [(0.0, None), (60.0, AttemptOutcome.FAILURE)],
    ids=["long-pause", "short-pause"],
)
async def test_server_may_close_after_long_pause(
    long_pause_s: float, outcome: AttemptOutcome | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers disconnect clients that do not read. A pause of the gateway says nothing about the replica."""
    monkeypatch.setattr(upstream_connection, "LONG_PAUSE_S", long_pause_s)
    paused = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED + b"3\r\nabc\r\n")
        await paused.wait()
        writer.transport.abort()

    async with connected_upstream(handler) as upstream:
        recorder = ResponseRecorder()
        connection = await send_request(upstream, recorder)
        await recorder.body_started.wait()
        connection.pause_reading()
        connection.pause_reading()
        connection.resume_reading()
        paused.set()
        await recorder.ended.wait()
        assert recorder.error is not None
        assert recorder.error.outcome is outcome


async def test_pause_at_end_of_response_keeps_connection_usable() -> None:
    class PausingRecorder(ResponseRecorder):
        """A recorder that pauses reading when the last bytes arrive."""

        connection: UpstreamConnection

        def on_body(self, body: bytes) -> None:
            super().on_body(body)
            self.connection.pause_reading()

    async with connected_upstream(answer(OK)) as upstream:
        recorder = PausingRecorder()
        recorder.connection = await send_request(upstream, recorder)
        await recorder.ended.wait()
        idle = upstream.take_idle_connection()
        assert idle is recorder.connection
        next_recorder = ResponseRecorder()
        idle.send_request(upstream.build_request(b"POST", b"/x", b"", []), next_recorder)
        async with asyncio.timeout(30.0):
            await next_recorder.ended.wait()
        assert (next_recorder.body, next_recorder.error) == (b"ok", None)


async def test_aborted_request_is_not_sent_again() -> None:
    request_count, second_received = 0, asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal request_count
        while True:
            await read_request(reader)
            request_count += 1
            if request_count == 1:
                writer.write(OK)
            else:
                second_received.set()  # and no response follows

    async with connected_upstream(handler) as upstream:
        request, clock = upstream.build_request(b"POST", b"/v1/x", b"{}", []), time.monotonic
        first = UpstreamResponse(clock)
        await first.send(upstream, request)
        assert await first.read_body() == b"ok"
        second = UpstreamResponse(clock)
        sending = asyncio.create_task(second.send(upstream, request))
        await second_received.wait()
        second.abort("too late")
        with pytest.raises(UpstreamError, match="too late"):
            await sending
    assert request_count == 2


@pytest.mark.parametrize(("after_s", "retried"), [(0.5, True), (1.5, False)])
async def test_reused_connection_closed_late_has_received_request(
    after_s: float, retried: bool
) -> None:
    request_count, now = 0, 0.0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal request_count, now
        await read_request(reader)
        writer.write(OK)
        await read_request(reader)
        request_count += 1
        now += after_s

    async with connected_upstream(handler) as upstream:
        request = upstream.build_request(b"POST", b"/v1/x", b"{}", [])
        first, second = UpstreamResponse(lambda: now), UpstreamResponse(lambda: now)
        await first.send(upstream, request)
        assert await first.read_body() == b"ok"
        if retried:
            await second.send(upstream, request)
            assert await second.read_body() == b"ok"
        else:
            with pytest.raises(UpstreamError, match="closed"):
                await second.send(upstream, request)
    assert request_count == 1


async def test_abort_is_noticed_by_server_immediately() -> None:
    disconnected = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED + b"3\r\nabc\r\n")
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        disconnected.set()

    async with connected_upstream(handler) as upstream:
        recorder = ResponseRecorder()
        connection = await send_request(upstream, recorder)
        await recorder.body_started.wait()
        connection.abort()
        await disconnected.wait()
        assert not recorder.ended.is_set()


async def test_small_requests_are_sent_immediately() -> None:
    async with connected_upstream(accept_and_wait) as upstream:
        connection = await upstream.connect()
        assert connection.transport is not None
        client_socket = connection.transport.get_extra_info("socket")
        assert client_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        connection.abort()


def drop_packets(client_socket: socket.socket) -> None:
    """Make the peer's machine drop all packets from now on, as after a power failure."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0
    program = struct.pack("HL", 1, ctypes.addressof(drop_all))
    client_socket.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such timeouts")
@pytest.mark.parametrize("has_started", [False, True])
async def test_lost_machine_is_noticed(monkeypatch: pytest.MonkeyPatch, has_started: bool) -> None:
    """Applies before the request was received, and in the middle of a response."""
    monkeypatch.setattr(upstream_connection, "TCP_USER_TIMEOUT_S", 1)
    silent = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if has_started:
            await read_request(reader)
            writer.write(CHUNKED + b"3\r\nabc\r\n")
            await silent.wait()
        drop_packets(writer.get_extra_info("socket"))
        silent.set()
        await reader.read()

    async with connected_upstream(handler) as upstream:
        connection, recorder = await upstream.connect(), ResponseRecorder()
        if not has_started:
            await silent.wait()
        connection.send_request(upstream.build_request(b"POST", b"/v1/x", b"{}", []), recorder)
        if has_started:
            await recorder.body_started.wait()
            silent.set()
        await recorder.ended.wait()
    assert recorder.error is not None
    assert "timed out" in str(recorder.error).lower()


async def test_request_over_unix_socket(tmp_path: Path) -> None:
    async with connected_upstream(answer(OK), tmp_path / "replica.sock") as upstream:
        assert (await send_and_wait(upstream)).body == b"ok"


# --- hostile replicas, each of which costs one attempt -------------------------------------------


@pytest.mark.parametrize(
    ("start", "repeated"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"x-a: " + b"a" * 1000 + b"\r\n"),
        (b"HTTP/1.1 200 OK\r\nx-a: ", b"a" * 1000),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 40),
        (b"HTTP/1.1 200 ", b"O" * 1000),
        (CHUNKED + b"3;x=", b"a" * 1000),
        (CHUNKED + b"0\r\n", b"x-a: " + b"a" * 1000 + b"\r\n"),
    ],
    ids=["headers", "header", "interim-responses", "reason", "chunk-extension", "trailers"],
)
async def test_endless_head_or_trailer_is_failure(start: bytes, repeated: bytes) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(start)
        while not writer.is_closing():
            writer.write(repeated)
            await writer.drain()

    async with connected_upstream(handler) as upstream:
        recorder = await send_and_wait(upstream)
        assert recorder.error is not None
        assert upstream.take_idle_connection() is None
        assert len(recorder.body) <= 3


async def test_unrequested_bytes_close_connection() -> None:
    send_more, closed = asyncio.Event(), asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)
        await send_more.wait()
        writer.write(OK)
        assert await reader.read() == b""
        closed.set()

    async with connected_upstream(handler) as upstream:
        recorder = await send_and_wait(upstream)
        assert recorder.error is None
        send_more.set()
        await closed.wait()
        assert upstream.take_idle_connection() is None


async def test_buffered_response_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream_response, "MAX_BUFFERED_BYTES", 1 << 20)

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED)
        while not writer.is_closing():
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()

    async with connected_upstream(handler) as upstream:
        response = UpstreamResponse(asyncio.get_running_loop().time)
        await response.send(upstream, upstream.build_request(b"POST", b"/v1/x", b"{}", []))
        assert await response.status == 200
        with pytest.raises(UpstreamError, match="larger than"):
            await response.read_body()


# --- proxies -------------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without proxies."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


async def test_plain_requests_are_sent_to_a_proxy_with_the_whole_url() -> None:
    requests = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            requests.append(await read_request(reader))
            writer.write(OK)

    async with serve_handler(serve) as url:
        proxy = Proxy("127.0.0.1", parse_endpoint(url).port, b"Basic abc")
        upstream = Upstream(parse_endpoint("http://api.example.com/v1"), proxy=proxy)
        assert (await send_and_wait(upstream)).body == b"ok"
        upstream.close()
    head = b"POST http://api.example.com/v1/x HTTP/1.1\r\nhost: api.example.com\r\n"
    assert requests[0].startswith(head + b"proxy-authorization: Basic abc\r\n")


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "requires other credentials"),
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "does not connect to api.example.com:443 (status 403"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\n", "sent no complete response"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"x" * 20_000, "sent no complete response"),
        (b"HTTP/1.1 200 OK\r\n\r\nmore", "sent more than its response"),
        (None, "Connection refused"),
    ],
    ids=["407", "403", "ssh", "short", "large", "more", "down"],
)
async def test_error_of_a_proxy_names_the_proxy(response: bytes | None, message: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response or b"")

    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(serve_handler(serve))
        if response is None:
            await stack.aclose()
        proxy = Proxy("127.0.0.1", parse_endpoint(url).port, b"Basic secret")
        upstream = Upstream(parse_endpoint("https://api.example.com"), proxy=proxy)
        with pytest.raises(UpstreamError) as failed:
            await upstream.connect()
    assert f"proxy {proxy.name}" in str(failed.value)
    assert message in str(failed.value)


@pytest.mark.parametrize(
    ("url", "settings", "is_proxied"),
    [
        ("https://api.example.com", {}, True),
        ("http://api.example.com:8000", {"kind": "openai"}, True),
        ("https://8.8.8.8", {}, True),
        ("https://api.example.com", {"proxy": False}, False),
        ("https://api.example.com", {"kind": "vllm"}, False),
        ("https://api.example.com", {"kind": "vllm", "proxy": True}, True),
        ("http://api.example.com", {"discover": "dns"}, False),
        ("https://other.except.com", {}, False),
        ("https://gpu-7", {}, False),
        ("http://chat.pools.svc.cluster.local:8000", {}, False),
        ("http://10.1.2.3:8000", {}, False),
        ("http://100.64.0.1", {}, False),
        ("http://[::1]:8000", {}, False),
        ("http://[fd00::7]:8000", {}, False),
        ("http://localhost:8000", {"kind": "openai"}, False),
        ("unix:///run/a.sock", {"proxy": True}, False),
    ],
)
def test_proxy_of_the_environment_is_for_servers_outside(
    url: str, settings: dict[str, Any], is_proxied: bool, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("ALL_PROXY", "http://me:secret@proxy.corp:3128")
    environment.setenv("no_proxy", ".except.com, another.com")
    found = find_replica_proxy(ReplicaConfig(url=url, **settings), parse_endpoint(url))
    credentials = b"Basic " + b64encode(b"me:secret")
    assert found == (Proxy("proxy.corp", 3128, credentials) if is_proxied else None)
    assert bool(direct_mounts(url)) or is_proxied or bool(settings) or "except" in url


def test_proxy_that_cannot_be_used_is_refused_without_its_password(
    environment: pytest.MonkeyPatch,
) -> None:
    replica = ReplicaConfig(url="https://api.example.com", proxy=True)
    endpoint = parse_endpoint(replica.url)
    with pytest.raises(ValueError, match="Set HTTPS_PROXY"):
        find_replica_proxy(replica, endpoint)
    for url in ("socks5://me:secret@proxy:1", "http://me:secret@proxy:port", "http://"):
        environment.setenv("HTTPS_PROXY", url)
        with pytest.raises(ValueError, match=r"HTTPS_PROXY: .*HOST:PORT") as refused:
            find_replica_proxy(replica, endpoint)
        assert "secret" not in str(refused.value)
