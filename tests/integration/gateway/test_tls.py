"""TLS towards clients and replicas: trust, certificates, and HTTP over TLS in every form."""

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
from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import msgspec
import openai
import pytest
import websockets
from tests.support.backend_formats import Vllm
from tests.support.byte_server import ForwardProxy, serve_handler
from tests.support.certificates import Authority, Pair
from tests.support.fake_backend import ANSWER_TEXT, Fault, serve_backends
from tests.support.fake_engine import FakeEngine
from tests.support.gateway_client import BODIES, COMPLETION, QUICK_TIMEOUTS, serve_gateway, stream
from tests.support.http_serving import run_server
from tests.support.replica_servers import CONFIG, MODEL, serve

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig, UpstreamTls
from argosy.gateway import GatewayServer
from argosy.http_server import (
    CertificateWatcher,
    HttpRequest,
    TlsConfig,
)
from argosy.process import handle_signals


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def server_pair(authority: Authority) -> Pair:
    return authority.pair("server", "127.0.0.1", "gateway.test")


def make_tls_config(pair: Pair, client_ca: str | None = None) -> TlsConfig:
    return TlsConfig(certificate=pair.certificate, key=pair.key, client_ca=client_ca)


def make_client_context(authority: Authority, client_pair: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.ca)
    if client_pair is not None:
        context.load_cert_chain(client_pair.certificate, client_pair.key)
    return context


@contextlib.asynccontextmanager
async def run_gateway(
    *replicas: ReplicaConfig, tls: TlsConfig | None = None
) -> AsyncIterator[tuple[GatewayServer, str]]:
    """Run a gateway and yield it with its URL."""
    model = ModelConfig(name="big", routing="round-robin", replicas=list(replicas))
    settings = GatewayConfig(port=0, models=[model], timeouts=QUICK_TIMEOUTS, tls=tls)
    async with serve_gateway(settings) as server_and_url:
        yield server_and_url


@contextlib.asynccontextmanager
async def serve_behind_tls(backend: Vllm, context: ssl.SSLContext) -> AsyncIterator[int]:
    """Yield the port of a server that terminates TLS in front of a backend."""
    async with serve_handler(backend.serve, tls=context) as url:
        yield int(url.rpartition(":")[2])


def server_context(pair: Pair, client_ca: str | None = None) -> ssl.SSLContext:
    """Return the context of a TLS server other than the gateway."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=client_ca)
    context.load_cert_chain(pair.certificate, pair.key)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


# --- listening -----------------------------------------------------------------------------------


async def test_clients_connect_over_tls(authority: Authority, server_pair: Pair) -> None:
    backend = Vllm()
    async with serve_backends(backend):
        replica = ReplicaConfig(url=backend.url, model="cat")
        async with run_gateway(replica, tls=make_tls_config(server_pair)) as (_, url):
            assert url.startswith("https://127.0.0.1:")
            client = httpx2.AsyncClient(
                base_url=url, verify=make_client_context(authority), timeout=30
            )
            async with client:
                backend.faults.append(Fault("disconnect", 3))
                assert (await stream(client, COMPLETION)).text == ANSWER_TEXT
            with pytest.raises(httpx2.ConnectError):
                async with httpx2.AsyncClient(base_url=url) as stranger:
                    await stranger.get("/health")
            http = httpx2.AsyncClient(verify=make_client_context(authority))
            sdk = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http)
            async with sdk:
                response = await sdk.completions.create(
                    model="big", prompt="Tell me", max_tokens=12
                )
                assert response.choices[0].text == ANSWER_TEXT


async def test_websocket_works_over_tls(authority: Authority, server_pair: Pair) -> None:
    async with (
        run_gateway(tls=make_tls_config(server_pair)) as (_, url),
        websockets.connect(
            url.replace("https", "wss") + "/v1/responses", ssl=make_client_context(authority)
        ) as connection,
    ):
        await connection.send("{" + " " * 200_000)
        assert json.loads(await connection.recv())["error"]["code"] == "invalid_json"
        await connection.close()
        assert connection.close_code == 1000


async def test_commands_trust_ssl_cert_file(authority: Authority, server_pair: Pair) -> None:
    async def run_command(*command: str, **environment: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "argosy.cli", *command),
            env=os.environ | environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        return (await process.communicate())[0].decode()

    backend = Vllm()
    async with serve_backends(backend):
        replica = ReplicaConfig(url=backend.url, model="cat")
        async with run_gateway(replica, tls=make_tls_config(server_pair)) as (_, url):
            chat, bench = ("chat", "Tell me"), ("bench", "--requests", "1")
            assert "ssl_cert_file" in (await run_command(*chat, "--url", url)).lower()
            for command, expected in ((chat, ANSWER_TEXT), (bench, "Serving Benchmark Result")):
                printed = await run_command(*command, "--url", url, SSL_CERT_FILE=authority.ca)
                assert expected in printed


async def echo_path(request: HttpRequest) -> None:
    """Respond with the path of the request, after its body."""
    await request.transport.read_body(1 << 20)
    body = request.path.encode()
    request.transport.send_response(200, [(b"content-length", b"%d" % len(body))], body)


async def test_keep_alive_pipelining_and_http_1_0_work_over_tls(
    authority: Authority, server_pair: Pair
) -> None:
    async with run_server(echo_path, CertificateWatcher(make_tls_config(server_pair))) as (_, port):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=make_client_context(authority)
        )
        writer.write(b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % n for n in range(5)))
        for number in range(5):  # five at once, answered in order
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(2) == b"/%d" % number
        writer.write(b"GET /old HTTP/1.0\r\n\r\n")
        last = await reader.read()  # to the end, which is TLS's own close_notify
        assert last.endswith(b"\r\n\r\n/old")
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_small_responses_are_sent_immediately(
    authority: Authority, server_pair: Pair, tls: bool
) -> None:
    certificates = CertificateWatcher(make_tls_config(server_pair)) if tls else None
    async with run_server(echo_path, certificates) as (server, port):
        context = make_client_context(authority) if tls else None
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        while not server.connections.open:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
        (connection,) = server.connections.open
        peer = connection.transport.get_extra_info("socket")
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        await writer.wait_closed()


async def test_new_certificates_are_loaded_without_restart(
    authority: Authority, server_pair: Pair, tmp_path: Path
) -> None:
    certificates = CertificateWatcher(make_tls_config(server_pair))
    assert not certificates.reload_if_changed()
    async with run_server(echo_path, certificates) as (_, port):
        first = await fetch_certificate(port)
        authority.pair("server", "127.0.0.1")
        advance_mtime(server_pair, 10)
        assert certificates.reload_if_changed()
        second = await fetch_certificate(port)
        assert first != second
        break_key(server_pair)
        advance_mtime(server_pair, 20)
        assert not certificates.reload_if_changed()  # the old one stays in use
        assert await fetch_certificate(port) == second


async def test_sighup_reloads_certificates_immediately(
    authority: Authority, server_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.http_server.tls.CERTIFICATE_CHECK_INTERVAL_S", 3600.0)
    backend = Vllm()
    async with (
        serve_backends(backend),
        run_gateway(
            ReplicaConfig(url=backend.url, model="cat"), tls=make_tls_config(server_pair)
        ) as (gateway, url),
    ):
        port = int(url.rsplit(":", 1)[1])
        with handle_signals(gateway.stop, gateway.reload):
            first = await fetch_certificate(port)
            authority.pair("server", "127.0.0.1")
            os.kill(os.getpid(), signal.SIGHUP)
            while (second := await fetch_certificate(port)) == first:
                pass
            break_key(server_pair)
            os.kill(os.getpid(), signal.SIGHUP)
            assert await fetch_certificate(port) == second


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_removed_client_ca_and_its_sessions_are_no_longer_trusted(
    authority: Authority, server_pair: Pair, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    client_ca = tmp_path / "trusted.pem"
    shutil.copy(old.ca, client_ca)
    certificates = CertificateWatcher(make_tls_config(server_pair, str(client_ca)))
    context = make_client_context(authority, old.pair("of-old"))
    context.minimum_version = context.maximum_version = version

    def request_with_session(port: int, session: ssl.SSLSession | None) -> ssl.SSLSession | None:
        """Send a request with the session of an earlier connection, and return the new session."""
        with (
            socket.create_connection(("127.0.0.1", port), timeout=30) as raw_socket,
            context.wrap_socket(
                raw_socket, server_hostname="127.0.0.1", session=session
            ) as tls_socket,
        ):
            tls_socket.sendall(b"GET /in HTTP/1.1\r\nhost: x\r\n\r\n")
            if not tls_socket.recv(1000).startswith(b"HTTP/1.1 200"):
                raise ConnectionError
            return tls_socket.session

    async with run_server(echo_path, certificates) as (_, port):
        session = await asyncio.to_thread(request_with_session, port, None)
        assert await asyncio.to_thread(request_with_session, port, session)
        shutil.copy(new.ca, client_ca)
        assert certificates.reload()
        for used in (session, None):
            with pytest.raises(OSError):  # noqa: PT011 - TLS's alert, or the end of the connection
                await asyncio.to_thread(request_with_session, port, used)
        context = make_client_context(authority)
        with pytest.raises(OSError):  # noqa: PT011 - the same for a client without a certificate
            await asyncio.to_thread(request_with_session, port, None)
        context = make_client_context(authority, new.pair("of-new"))
        assert await asyncio.to_thread(request_with_session, port, None)


async def fetch_certificate(port: int) -> bytes:
    """Return the certificate that the server presents."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    certificate: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return certificate


def break_key(pair: Pair) -> None:
    Path(pair.key).write_text("half a key")


def advance_mtime(pair: Pair, seconds: int) -> None:
    for path in (pair.certificate, pair.key):
        at = Path(path).stat().st_mtime + seconds
        os.utime(path, (at, at))


def test_unusable_certificate_files_are_rejected_by_name(
    authority: Authority, server_pair: Pair, tmp_path: Path
) -> None:
    other = authority.pair("other")
    with pytest.raises(ValueError, match="give PEM files that belong together"):
        CertificateWatcher(TlsConfig(certificate=server_pair.certificate, key=other.key))
    with pytest.raises(ValueError, match="missing"):
        CertificateWatcher(TlsConfig(certificate=str(tmp_path / "missing"), key=other.key))
    with pytest.raises(ValueError, match="authority's certificate"):
        CertificateWatcher(make_tls_config(server_pair, other.key))


# --- towards replicas ----------------------------------------------------------------------------


async def test_replicas_are_reached_over_tls_and_streams_resumed(
    authority: Authority, server_pair: Pair
) -> None:
    first_backend, second_backend = Vllm(), Vllm()
    context = server_context(server_pair)
    async with (
        serve_behind_tls(first_backend, context) as first_port,
        serve_behind_tls(second_backend, context) as second_port,
    ):
        replicas = [
            ReplicaConfig(
                url=f"https://127.0.0.1:{port}", model="cat", tls=UpstreamTls(ca=authority.ca)
            )
            for port in (first_port, second_port)
        ]
        async with run_gateway(*replicas) as (server, url):
            assert {replica.kind for replica in server.replicas} == {"vllm"}
            second_backend.faults = first_backend.faults
            async with httpx2.AsyncClient(base_url=url, timeout=30) as client:
                for count in (0, 3, 7):
                    first_backend.faults.append(Fault("disconnect", count))
                    assert (await stream(client, COMPLETION)).text == ANSWER_TEXT


async def test_servers_outside_are_reached_through_the_proxy_of_the_environment(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hosted, local, proxy = Vllm(), Vllm(), ForwardProxy()
    context = server_context(authority.pair("api.example.com"))
    async with (
        serve_behind_tls(hosted, context) as port,
        serve_handler(local.serve) as local_url,
        serve_handler(proxy.serve) as proxy_url,
    ):
        with_password = proxy_url.replace("http://", "http://me:s%40fe@")
        for name in ("https_proxy", "http_proxy"):  # win over the names in upper case
            monkeypatch.setenv(name, with_password)
        tls = UpstreamTls(ca=authority.ca)
        outside = ReplicaConfig(
            url=f"https://api.example.com:{port}", kind="openai", model="cat", tls=tls
        )
        inside = ReplicaConfig(url=local_url, kind="openai", model="cat")
        async with (
            run_gateway(outside, inside) as (_, url),
            httpx2.AsyncClient(base_url=url, timeout=30, trust_env=False) as client,
        ):
            for _ in range(4):
                assert (await stream(client, COMPLETION)).text == ANSWER_TEXT
        assert len(hosted.requests) == len(local.requests) == 2
        assert proxy.heads
        for head in proxy.heads:
            assert head.startswith(f"CONNECT api.example.com:{port} HTTP/1.1\r\n")
            assert f"proxy-authorization: Basic {b64encode(b'me:s@fe').decode()}\r\n" in head
        assert all("proxy-authorization" not in each.headers for each in hosted.requests)
    assert "s@fe" not in (output := "".join(capsys.readouterr()))
    assert "s%40fe" not in output


async def test_argosy_replica_listens_over_tls(
    authority: Authority, server_pair: Pair, engine: FakeEngine
) -> None:
    settings = msgspec.structs.replace(CONFIG, tls=make_tls_config(server_pair))
    async with serve(engine, settings) as served:
        assert served.url.startswith("https://")
        replica = ReplicaConfig(url=served.url, model=MODEL, tls=UpstreamTls(ca=authority.ca))
        async with (
            run_gateway(replica) as (server, url),
            httpx2.AsyncClient(base_url=url, timeout=30) as client,
        ):
            assert server.replicas[0].kind == "argosy"
            assert (await stream(client, COMPLETION)).done_count == 1


async def test_replica_with_untrusted_certificate_gets_no_request(
    authority: Authority, server_pair: Pair, tmp_path: Path
) -> None:
    backend, stranger = Vllm(), Authority(tmp_path, "stranger")
    async with serve_behind_tls(backend, server_context(server_pair)) as port:
        for tls in (
            UpstreamTls(),
            UpstreamTls(ca=stranger.ca),
            UpstreamTls(ca=authority.ca, server_name="elsewhere.test"),
        ):
            replica = ReplicaConfig(url=f"https://127.0.0.1:{port}", kind="vllm", tls=tls)
            async with (
                run_gateway(replica) as (_, url),
                httpx2.AsyncClient(base_url=url, timeout=30) as client,
            ):
                response = await client.post(COMPLETION, json=BODIES[COMPLETION])
                assert response.status_code in {502, 503}
                assert "ertificate" not in response.text
    assert not backend.requests
    assert not backend.fetched_paths


async def test_gateway_presents_its_certificate_and_configured_server_name(
    authority: Authority, server_pair: Pair
) -> None:
    client_pair, server_names, backend = authority.pair("client"), list[str | None](), Vllm()
    context = server_context(server_pair, authority.ca)
    context.sni_callback = lambda _, name, __: server_names.append(name)
    tls = UpstreamTls(
        ca=authority.ca,
        certificate=client_pair.certificate,
        key=client_pair.key,
        server_name="gateway.test",
    )
    async with serve_behind_tls(backend, context) as port:
        replica = ReplicaConfig(url=f"https://127.0.0.1:{port}", model="cat", tls=tls)
        async with (
            run_gateway(replica) as (_, url),
            httpx2.AsyncClient(base_url=url, timeout=30) as client,
        ):
            response = await client.post(COMPLETION, json=BODIES[COMPLETION])
            assert response.json()["choices"][0]["text"] == ANSWER_TEXT
    assert set(server_names) == {"gateway.test"}
    assert json.dumps(backend.requests[0].body)


@pytest.mark.parametrize("field", ["ca", "certificate"])
async def test_unusable_upstream_files_are_rejected(tmp_path: Path, field: str) -> None:
    tls = UpstreamTls(**{field: str(tmp_path / "missing")})
    replica = ReplicaConfig(url="https://127.0.0.1:1", tls=tls)
    with pytest.raises(ValueError, match="PEM file"):
        GatewayServer(
            GatewayConfig(models=[ModelConfig(name="big", replicas=[replica])]), lambda _: None
        )
