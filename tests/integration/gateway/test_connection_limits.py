"""Limits on client connections: idle connections close for new clients, and an address cannot take all of them."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from ipaddress import ip_address
from pathlib import Path

import pytest
from tests.support.certificates import Authority
from tests.support.gateway_client import gateway
from tests.support.http_serving import run_server
from tests.support.waiting import until

from argosy.deployment import AuthConfig, ReplicaConfig
from argosy.http_server import (
    CertificateWatcher,
    HttpRequest,
    HttpServer,
    TlsConfig,
    connection_limiter,
)
from argosy.http_server import server as server_module

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
STARTS = (b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: x\r\nx-slow: ", REQUEST)
"""Data that idle clients have sent: nothing, parts of a head, or a request that is answered."""
PROXY = ip_address("127.0.0.9")

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class LimitedServer:
    """A server with at most 4 connections, which answers `GET /held` when `release` is set."""

    server: HttpServer

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.started: list[str] = []
        self.refusals = 0
        self.evictions = Counter[str]()
        self._connections: list[Connection] = []

    def _count_refusal(self) -> None:
        self.refusals += 1

    async def _answer(self, request: HttpRequest) -> None:
        self.started.append(request.path)
        if request.path == "/held":
            await self.release.wait()
        request.transport.send_response(200, [(b"content-length", b"5")], b"hello")

    @contextlib.asynccontextmanager
    async def run(
        self,
        certificates: CertificateWatcher | None = None,
        max_connections_per_address: int | None = None,
    ) -> AsyncIterator[LimitedServer]:
        async with run_server(
            self._answer,
            certificates,
            is_trusted_proxy=PROXY.__eq__,
            on_connection_refused=self._count_refusal,
            on_connection_evicted=lambda reason: self.evictions.update([reason]),
            max_connections_per_address=max_connections_per_address,
        ) as (self.server, self.port):
            try:
                yield self
            finally:
                self.release.set()
                for _, writer in self._connections:
                    writer.close()

    async def connect(self, address: str = "127.0.0.1", data: bytes = b"") -> Connection:
        """Connect from a loopback address, send data, and wait until the server has the connection."""
        before = self._connection_events()
        connection = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0))
        self._connections.append(connection)
        connection[1].write(data)
        await until(lambda: self._connection_events() != before)
        return connection

    def _connection_events(self) -> tuple[int, int, int]:
        """Return numbers of which each accepted or refused connection changes one."""
        return self.server.connection_count, self.refusals, sum(self.evictions.values())

    async def hold(self, address: str = "127.0.0.1") -> Connection:
        """Connect and send a request that runs until `release`."""
        count = len(self.started)
        connection = await self.connect(address, b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: len(self.started) > count)
        return connection


async def read_response(connection: Connection) -> bytes:
    """Return a response of 5 bytes with its head."""
    reader, writer = connection
    async with asyncio.timeout(30):
        writer.write(REQUEST)
        return await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(5)


async def read_end(connection: Connection) -> bytes:
    """Return what the server sends before it closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(30):
            while part := await connection[0].read(4096):
                received += part
    return received


@pytest.fixture(autouse=True)
def few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "max_clients", lambda _: 4)
    monkeypatch.setattr(connection_limiter, "MIN_IDLE_S", 0.0)


@pytest.mark.parametrize("start", STARTS)
async def test_new_client_gets_in_while_others_hold_all_connections_idle(start: bytes) -> None:
    """About 4,000 idle connections kept new clients out until the header timeout of 30 s."""
    async with LimitedServer().run() as limited:
        held = await limited.hold("127.0.0.2")
        idle = [await limited.connect("127.0.0.3", start) for _ in range(3)]
        if start == REQUEST:
            await until(lambda: limited.started.count("/") == 3)
        for number in range(5):
            new_client = await limited.connect(f"127.0.0.{4 + number}")
            assert (await read_response(new_client)).endswith(b"hello")
        for connection in idle:
            await read_end(connection)
        assert limited.evictions == {"connection_limit": 5}
        assert limited.server.connection_count == 4
        limited.release.set()
        assert (await held[0].readuntil(b"hello")).startswith(b"HTTP/1.1 200")


async def test_clients_that_never_finish_a_tls_handshake_make_room(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.pair("127.0.0.1")
    certificates = CertificateWatcher(TlsConfig(certificate=pair.certificate, key=pair.key))
    context = ssl.create_default_context(cafile=authority.ca)
    async with LimitedServer().run(certificates) as limited:
        silent = [
            await limited.connect("127.0.0.3", data) for data in (b"", b"\x16", b"", b"\x16\x03")
        ]
        new_client = await asyncio.open_connection("127.0.0.1", limited.port, ssl=context)
        assert (await read_response(new_client)).endswith(b"hello")
        new_client[1].close()
        assert await read_end(silent[0]) == b""
        assert limited.evictions == {"connection_limit": 1}


async def test_address_is_limited_and_others_are_not() -> None:
    async with LimitedServer().run(max_connections_per_address=2) as limited:
        idle = [await limited.connect("127.0.0.2") for _ in range(3)]
        assert await read_end(idle[0]) == b""
        assert limited.evictions == {"address_limit": 1}
        for connection in idle[1:]:
            connection[1].close()
        await until(lambda: limited.server.connection_count == 0)
        for _ in range(2):
            await limited.hold("127.0.0.2")
        refused = await read_end(await limited.connect("127.0.0.2"))
        assert refused.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
        assert b'"code":"too_many_connections"' in refused
        assert limited.refusals == 1
        for _ in range(2):
            assert (await read_response(await limited.connect("127.0.0.3"))).endswith(b"hello")


async def test_trusted_proxy_and_this_machine_may_have_all_connections() -> None:
    for address, max_connections in ((str(PROXY), 2), ("127.0.0.2", None)):
        async with LimitedServer().run(max_connections_per_address=max_connections) as limited:
            for _ in range(4):
                await limited.hold(address)
            assert not limited.evictions
            assert not limited.refusals


async def test_gateway_reports_connections_in_metrics() -> None:
    auth = AuthConfig(trusted_proxies=("10.0.0.0/8",))
    async with gateway(ReplicaConfig(url="http://127.0.0.1:1", kind="openai"), auth=auth) as (
        _,
        client,
    ):
        await client.get("/health")
        url = client.base_url
        idle = [await asyncio.open_connection(url.host, url.port) for _ in range(5)]
        await until(lambda: idle[0][0].at_eof() or idle[0][0].exception() is not None)
        text = (await client.get("/metrics")).text
        for _, writer in idle:
            writer.close()
    assert "argosy_gateway_connections 4.0" in text
    evicted = 'argosy_gateway_connections_evicted_total{reason="connection_limit"}'
    (count,) = [line.split()[1] for line in text.splitlines() if line.startswith(evicted)]
    assert float(count) >= 2
    assert "argosy_gateway_connections_refused_total 0.0" in text
