"""TLS on both sides of the gateway: who is trusted, what is shown, and HTTP over it in every form."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import msgspec
import openai
import pytest
from tests.support.backend_formats import Vllm
from tests.support.byte_server import CHUNKED, OK, Kept, ask, read_request, serving
from tests.support.certificates import Authority, Pair
from tests.support.fake_backend import WHOLE, Fault, running
from tests.support.fake_engine import FakeEngine
from tests.support.gateway_client import BODIES, COMPLETION, QUICK, stream
from tests.support.replica_servers import CONFIG, MODEL, serve
from tests.support.waiting import still

from argosy.gateway import GatewayConfig, GatewayServer, ModelConfig, ReplicaConfig, UpstreamTls
from argosy.http_server import (
    AsgiApp,
    CertificateWatcher,
    HttpServer,
    Receive,
    Scope,
    Send,
    TlsConfig,
    bind_tcp,
)
from argosy.process import handle_signals


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def server_pair(authority: Authority) -> Pair:
    return authority.pair("server", "127.0.0.1", "gateway.test")


def config(pair: Pair, client_ca: str | None = None) -> TlsConfig:
    return TlsConfig(certificate=pair.certificate, key=pair.key, client_ca=client_ca)


def trust(authority: Authority, mine: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.ca)
    if mine is not None:
        context.load_cert_chain(mine.certificate, mine.key)
    return context


@contextlib.asynccontextmanager
async def gateway(
    *replicas: ReplicaConfig, tls: TlsConfig | None = None
) -> AsyncIterator[tuple[GatewayServer, str]]:
    """A gateway, and its URL."""
    model = ModelConfig(name="big", routing="round-robin", replicas=list(replicas))
    settings = GatewayConfig(port=0, models=[model], timeouts=QUICK, tls=tls)
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = GatewayServer(settings, url.set_result)
    task = asyncio.create_task(server.run())
    try:
        yield server, await url
    finally:
        server.stop()
        await task


@contextlib.asynccontextmanager
async def terminated(double: Vllm, context: ssl.SSLContext) -> AsyncIterator[int]:
    """The port of a server that speaks TLS in front of a double's handler."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(asyncio.CancelledError, ssl.SSLError):
            await double.serve(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def server_context(pair: Pair, client_ca: str | None = None) -> ssl.SSLContext:
    """A server's that is none of ours."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=client_ca)
    context.load_cert_chain(pair.certificate, pair.key)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


# --- listening -----------------------------------------------------------------------------------


async def test_clients_reach_the_gateway_over_tls(authority: Authority, server_pair: Pair) -> None:
    double = Vllm()
    async with running(double):
        replica = ReplicaConfig(url=double.url, model="cat")
        async with gateway(replica, tls=config(server_pair)) as (_, url):
            assert url.startswith("https://127.0.0.1:")
            client = httpx2.AsyncClient(base_url=url, verify=trust(authority), timeout=30)
            async with client:
                double.faults.append(Fault("die", 3))
                assert (await stream(client, COMPLETION)).text == WHOLE
            with pytest.raises(httpx2.ConnectError):
                async with httpx2.AsyncClient(base_url=url) as stranger:
                    await stranger.get("/health")
            http = httpx2.AsyncClient(verify=trust(authority))
            sdk = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http)
            async with sdk:
                answer = await sdk.completions.create(model="big", prompt="Tell me", max_tokens=12)
                assert answer.choices[0].text == WHOLE


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("chat", "Tell me"), WHOLE),
        (("explain", "some-id"), "has no record of the request"),
        (("bench", "--requests", "1"), "Serving Benchmark Result"),
    ],
)
async def test_commands_trust_whom_ssl_cert_file_names(
    authority: Authority, server_pair: Pair, command: tuple[str, ...], expected: str
) -> None:
    async def said(url: str, **environment: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "argosy.cli", *command, "--url", url),
            env=os.environ | environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        return (await process.communicate())[0].decode()

    double = Vllm()
    async with running(double):
        replica = ReplicaConfig(url=double.url, model="cat")
        async with gateway(replica, tls=config(server_pair)) as (_, url):
            assert "have ssl_cert_file name" in (await said(url)).lower()
            assert expected in await said(url, SSL_CERT_FILE=authority.ca)


async def test_clients_without_a_certificate_are_refused_where_one_is_asked_for(
    authority: Authority, server_pair: Pair
) -> None:
    mine = authority.pair("client")
    double = Vllm()
    async with running(double):
        replica = ReplicaConfig(url=double.url, model="cat")
        async with gateway(replica, tls=config(server_pair, authority.ca)) as (_, url):
            async with httpx2.AsyncClient(base_url=url, verify=trust(authority, mine)) as client:
                assert (await client.get("/health")).status_code == 200
            with pytest.raises(httpx2.TransportError):
                async with httpx2.AsyncClient(base_url=url, verify=trust(authority)) as client:
                    await client.get("/health")


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    """Says the path that it was asked for."""
    assert scope["scheme"] in {"http", "https"}
    while (await receive()).get("more_body"):
        pass
    body = scope["path"].encode()
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def listening(
    app: AsgiApp, certificates: CertificateWatcher | None
) -> AsyncIterator[tuple[HttpServer, int]]:
    bound = bind_tcp("127.0.0.1", 0)
    listener = HttpServer(app, certificates)
    task = asyncio.create_task(listener.serve(sockets=[bound]))
    while not listener.started:  # noqa: ASYNC110 - that is all it shows
        await asyncio.sleep(0)
    try:
        yield listener, bound.getsockname()[1]
    finally:
        listener.stop()
        await task


async def test_keep_alive_pipelining_and_http_1_0_over_tls(
    authority: Authority, server_pair: Pair
) -> None:
    async with listening(hello, CertificateWatcher(config(server_pair))) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust(authority))
        for path in (b"/a", b"/b"):  # one after the other on one connection
            writer.write(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(2) == path
        writer.write(b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % n for n in range(5)))
        for number in range(5):  # and five at once, answered in order
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(2) == b"/%d" % number
        writer.write(b"GET /old HTTP/1.0\r\n\r\n")
        old = await reader.read()  # to the end: it closes with TLS's own goodbye
        assert old.endswith(b"\r\n\r\n/old")
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
async def test_small_answers_are_not_held_back(
    authority: Authority, server_pair: Pair, tls: bool
) -> None:
    certificates = CertificateWatcher(config(server_pair)) if tls else None
    async with listening(hello, certificates) as (listener, port):
        context = trust(authority) if tls else None
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        while not listener.server_state.connections:  # noqa: ASYNC110 - that is all it shows
            await asyncio.sleep(0)
        (connection,) = listener.server_state.connections
        peer = connection.transport.get_extra_info("socket")
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        await writer.wait_closed()


async def test_new_certificates_are_shown_without_a_restart(
    authority: Authority, server_pair: Pair, tmp_path: Path
) -> None:
    certificates = CertificateWatcher(config(server_pair))
    assert not certificates.reload_if_changed()
    async with listening(hello, certificates) as (_, port):
        first = await shown(port)
        authority.pair("server", "127.0.0.1")
        touch(server_pair, 10)
        assert certificates.reload_if_changed()
        second = await shown(port)
        assert first != second
        spoil(server_pair)
        touch(server_pair, 20)
        assert not certificates.reload_if_changed()  # and the old one stays in use
        assert await shown(port) == second


async def test_sighup_takes_new_certificates_in_at_once(
    authority: Authority, server_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.http_server.tls.CERTIFICATE_CHECK_INTERVAL_S", 3600.0)
    double = Vllm()
    async with (
        running(double),
        gateway(ReplicaConfig(url=double.url, model="cat"), tls=config(server_pair)) as (one, url),
    ):
        port = int(url.rsplit(":", 1)[1])
        with handle_signals(one.stop, one.reload):
            first = await shown(port)
            authority.pair("server", "127.0.0.1")
            os.kill(os.getpid(), signal.SIGHUP)
            while (second := await shown(port)) == first:
                pass
            spoil(server_pair)
            os.kill(os.getpid(), signal.SIGHUP)
            assert await shown(port) == second


async def test_an_authority_that_is_withdrawn_opens_nothing(
    authority: Authority, server_pair: Pair, tmp_path: Path
) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    of_old, of_new = old.pair("of-old"), new.pair("of-new")
    trusted = tmp_path / "trusted.pem"
    shutil.copy(old.ca, trusted)
    certificates = CertificateWatcher(config(server_pair, str(trusted)))
    async with listening(hello, certificates) as (_, port):
        url = f"https://127.0.0.1:{port}"

        async def opens(mine: Pair) -> bool:
            async with httpx2.AsyncClient(base_url=url, verify=trust(authority, mine)) as client:
                try:
                    return (await client.get("/in")).text == "/in"
                except httpx2.TransportError:
                    return False

        assert await opens(of_old)
        assert not await opens(of_new)
        shutil.copy(new.ca, trusted)
        assert certificates.reload()
        assert not await opens(of_old)
        assert await opens(of_new)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_session_does_not_outlast_the_authority_that_vouched_for_it(
    authority: Authority, server_pair: Pair, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    trusted = tmp_path / "trusted.pem"
    shutil.copy(old.ca, trusted)
    certificates = CertificateWatcher(config(server_pair, str(trusted)))
    context = trust(authority, old.pair("of-old"))
    context.minimum_version = context.maximum_version = version

    def visit(port: int, session: ssl.SSLSession | None) -> ssl.SSLSession | None:
        """The session of a connection that was answered."""
        with (
            socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as sealed,
        ):
            sealed.sendall(b"GET /in HTTP/1.1\r\nhost: x\r\n\r\n")
            if not sealed.recv(1000).startswith(b"HTTP/1.1 200"):
                raise ConnectionError
            return sealed.session

    async with listening(hello, certificates) as (_, port):
        session = await asyncio.to_thread(visit, port, None)
        assert await asyncio.to_thread(visit, port, session)
        shutil.copy(new.ca, trusted)
        assert certificates.reload()
        with pytest.raises(OSError):  # noqa: PT011 - TLS's alert, or the end of the connection
            await asyncio.to_thread(visit, port, session)


async def shown(port: int) -> bytes:
    """The certificate that a client is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    certificate: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return certificate


def spoil(pair: Pair) -> None:
    Path(pair.key).write_text("half a key")


def touch(pair: Pair, seconds: int) -> None:
    for path in (pair.certificate, pair.key):
        at = Path(path).stat().st_mtime + seconds
        os.utime(path, (at, at))


def test_files_that_cannot_be_used_are_refused_by_name(
    authority: Authority, server_pair: Pair, tmp_path: Path
) -> None:
    other = authority.pair("other")
    with pytest.raises(ValueError, match="give PEM files that belong together"):
        CertificateWatcher(TlsConfig(certificate=server_pair.certificate, key=other.key))
    with pytest.raises(ValueError, match="missing"):
        CertificateWatcher(TlsConfig(certificate=str(tmp_path / "missing"), key=other.key))
    with pytest.raises(ValueError, match="authority's certificate"):
        CertificateWatcher(config(server_pair, other.key))


# --- towards replicas ----------------------------------------------------------------------------


async def test_replicas_are_reached_over_tls_and_carried_on(
    authority: Authority, server_pair: Pair
) -> None:
    one, two = Vllm(), Vllm()
    context = server_context(server_pair)
    async with terminated(one, context) as first, terminated(two, context) as second:
        replicas = [
            ReplicaConfig(
                url=f"https://127.0.0.1:{port}", model="cat", tls=UpstreamTls(ca=authority.ca)
            )
            for port in (first, second)
        ]
        async with gateway(*replicas) as (server, url):
            assert {replica.kind for replica in server.replicas} == {"vllm"}
            two.faults = one.faults
            async with httpx2.AsyncClient(base_url=url, timeout=30) as client:
                for count in (0, 3, 7):
                    one.faults.append(Fault("die", count))
                    assert (await stream(client, COMPLETION)).text == WHOLE


async def test_our_own_replica_listens_over_tls_too(
    authority: Authority, server_pair: Pair, engine: FakeEngine
) -> None:
    settings = msgspec.structs.replace(CONFIG, tls=config(server_pair))
    async with serve(engine, settings) as served:
        assert served.url.startswith("https://")
        replica = ReplicaConfig(url=served.url, model=MODEL, tls=UpstreamTls(ca=authority.ca))
        async with (
            gateway(replica) as (server, url),
            httpx2.AsyncClient(base_url=url, timeout=30) as client,
        ):
            assert server.replicas[0].kind == "argosy"
            assert (await stream(client, COMPLETION)).done == 1


async def test_a_replica_that_nobody_vouches_for_gets_nothing(
    authority: Authority, server_pair: Pair, tmp_path: Path
) -> None:
    double, stranger = Vllm(), Authority(tmp_path, "stranger")
    async with terminated(double, server_context(server_pair)) as port:
        for tls in (
            UpstreamTls(),
            UpstreamTls(ca=stranger.ca),
            UpstreamTls(ca=authority.ca, server_name="elsewhere.test"),
        ):
            replica = ReplicaConfig(url=f"https://127.0.0.1:{port}", kind="vllm", tls=tls)
            async with (
                gateway(replica) as (_, url),
                httpx2.AsyncClient(base_url=url, timeout=30) as client,
            ):
                answer = await client.post(COMPLETION, json=BODIES[COMPLETION])
                assert answer.status_code in {502, 503}
                assert "ertificate" not in answer.text
    assert not double.asked
    assert not double.got


async def test_the_gateway_shows_its_certificate_and_asks_for_the_name_it_was_told(
    authority: Authority, server_pair: Pair
) -> None:
    mine, names, double = authority.pair("client"), list[str | None](), Vllm()
    context = server_context(server_pair, authority.ca)
    context.sni_callback = lambda _, name, __: names.append(name)
    tls = UpstreamTls(
        ca=authority.ca,
        certificate=mine.certificate,
        key=mine.key,
        server_name="gateway.test",
    )
    async with terminated(double, context) as port:
        replica = ReplicaConfig(url=f"https://127.0.0.1:{port}", model="cat", tls=tls)
        async with (
            gateway(replica) as (_, url),
            httpx2.AsyncClient(base_url=url, timeout=30) as client,
        ):
            answer = await client.post(COMPLETION, json=BODIES[COMPLETION])
            assert answer.json()["choices"][0]["text"] == WHOLE
    assert set(names) == {"gateway.test"}
    assert json.dumps(double.asked[0].body)


@pytest.mark.parametrize("file", ["ca", "certificate"])
async def test_upstream_files_that_cannot_be_used_are_refused(tmp_path: Path, file: str) -> None:
    tls = UpstreamTls(**{file: str(tmp_path / "missing")})
    replica = ReplicaConfig(url="https://127.0.0.1:1", tls=tls)
    with pytest.raises(ValueError, match="PEM file"):
        GatewayServer(
            GatewayConfig(models=[ModelConfig(name="big", replicas=[replica])]), lambda _: None
        )


async def test_connections_are_kept_and_slow_sinks_hold_the_replica_back_over_tls(
    authority: Authority, server_pair: Pair
) -> None:
    piece, sent, connections, goodbye = b"x" * 65536, 0, 0, asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent, connections
        connections += 1
        await read_request(reader)
        writer.write(OK)
        await read_request(reader)
        writer.write(CHUNKED)
        for _ in range(1000):
            writer.write(b"10000\r\n" + piece + b"\r\n")
            await writer.drain()
            sent += len(piece)
        writer.write(b"0\r\n\r\n")
        assert await reader.read() == b""
        goodbye.set()

    context = server_context(server_pair)
    async with serving(handler, tls=context, trust=trust(authority)) as upstream:
        first = Kept()
        await ask(upstream, first)
        await first.ended.wait()
        assert first.body == b"ok"
        sink = Kept()
        connection = await ask(upstream, sink)
        await sink.begun.wait()
        connection.pause_reading()
        assert await still(lambda: sent) < 1000 * len(piece)
        assert len(sink.body) < 2 << 20
        connection.resume_reading()
        await sink.ended.wait()
        assert len(sink.body) == 1000 * len(piece)
        assert connections == 1
        kept = upstream.take_idle_connection()
        assert kept is connection
        connection.close()
        await goodbye.wait()


async def test_what_is_cut_over_tls_is_a_failure(authority: Authority, server_pair: Pair) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED + b"3\r\nabc\r\n")
        await writer.drain()
        writer.transport.abort()

    context = server_context(server_pair)
    async with serving(handler, tls=context, trust=trust(authority)) as upstream:
        sink = Kept()
        await ask(upstream, sink)
        await sink.ended.wait()
        assert sink.error is not None
        assert sink.body == b"abc"
