"""Closed connections and finished requests leave no reference cycles."""

from __future__ import annotations

import asyncio
import gc
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.byte_server import (
    OK,
    ResponseRecorder,
    connected_upstream,
    read_request,
    send_request,
)
from tests.support.certificates import Authority
from tests.support.fake_engine import FakeEngine, Script
from tests.support.fake_upstream import UpstreamRequest, fake_upstream
from tests.support.gateway_client import BODIES, CHAT, gateway
from tests.support.http_serving import run_server
from tests.support.replica_servers import MODEL, serve
from tests.support.waiting import stable_value, until

from argosy.deployment import ReplicaConfig
from argosy.engine.serving.text import Tokenizer
from argosy.gateway.proxy.response_relay import ResponseRelay
from argosy.gateway.request_fields import RequestFields
from argosy.gateway.upstream import UpstreamResponse
from argosy.gateway.upstream import connection as upstream_connection
from argosy.http_server import (
    CertificateWatcher,
    HttpExchange,
    HttpRequest,
    TlsConfig,
)
from argosy.http_server import connection as http_connection

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
pytestmark = pytest.mark.exhaustive


@pytest.fixture(autouse=True)
def _without_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def count_objects(cls: type) -> int:
    """Return the number of existing objects of a class."""
    return sum(type(each) is cls for each in gc.get_objects())


async def respond(request: HttpRequest) -> None:
    request.transport.send_response(200, [(b"content-length", b"5")], b"hello")


@pytest.mark.parametrize("protocol", ["http", "tls", "http-to-tls"])
async def test_closed_client_connections_are_freed(tmp_path: Path, protocol: str) -> None:
    before, authority, certificates, trust = (
        count_objects(http_connection.HttpConnection),
        Authority(tmp_path),
        None,
        None,
    )
    if protocol != "http":
        pair = authority.pair("server", "127.0.0.1")
        certificates = CertificateWatcher(TlsConfig(certificate=pair.certificate, key=pair.key))
    if protocol == "tls":
        trust = ssl.create_default_context(cafile=authority.ca)
    async with run_server(respond, certificates) as (server, port):
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
            writer.write(REQUEST)
            if protocol == "http-to-tls":
                assert not await reader.read()
            else:
                assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200 OK")
            writer.transport.abort()
        await until(lambda: not server.connection_count)
    assert await stable_value(lambda: count_objects(http_connection.HttpConnection)) <= before


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_closed_upstream_connections_are_freed(tmp_path: Path, tls: bool) -> None:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)
        await reader.read()

    before, authority, server_context, trust = (
        count_objects(upstream_connection.UpstreamConnection),
        Authority(tmp_path),
        None,
        None,
    )
    if tls:
        pair = authority.pair("server", "127.0.0.1")
        server_context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        server_context.load_cert_chain(pair.certificate, pair.key)
        trust = ssl.create_default_context(cafile=authority.ca)
    async with connected_upstream(respond, tls=server_context, trust=trust) as request:
        for _ in range(3):
            recorder = ResponseRecorder()
            connection = await send_request(request, recorder)
            await recorder.ended.wait()
            connection.abort()
    del connection
    assert (
        await stable_value(lambda: count_objects(upstream_connection.UpstreamConnection)) <= before
    )


async def test_spliced_streams_are_freed(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer, lambda _: Script(list(range(100, 160)), finish="length"))
    before = count_objects(ResponseRelay)
    async with (
        serve(engine) as served,
        gateway(ReplicaConfig(url=served.url, model=MODEL)) as (_, client),
    ):
        for _ in range(5):
            await client.post(CHAT, json=BODIES[CHAT] | {"stream": True, "max_tokens": 60})
        await until(lambda: count_objects(ResponseRelay) <= before)


@pytest.mark.parametrize(
    "ending", ["whole", "stream", "disconnect", "rejected", "failed", "broken", "admin"]
)
async def test_finished_requests_are_freed(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests and responses may have megabytes."""
    release, checked, check_timeouts = (
        asyncio.Event(),
        asyncio.Event(),
        ResponseRelay.check_timeouts,
    )

    def check_and_signal(relay: ResponseRelay, now: float) -> None:
        check_timeouts(relay, now)
        checked.set()

    monkeypatch.setattr(ResponseRelay, "check_timeouts", check_and_signal)

    async def script(request: UpstreamRequest) -> None:
        if ending == "rejected":
            request.send_json(400, {"error": {"message": "no"}})
        elif ending == "failed":
            request.send_json(500, {"error": {"message": "no"}})
        elif ending == "broken":
            request.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort")
            request.writer.close()
        elif ending == "whole":
            request.send_json(
                200, {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}
            )
        else:
            request.start_stream()
            request.send_text("a", "stop" if ending == "stream" else None)
            if ending == "disconnect":
                await release.wait()
            request.end_stream()

    body = BODIES[CHAT] | {"stream": ending in {"stream", "disconnect"}}
    classes = HttpExchange, RequestFields, UpstreamResponse
    before = sum(map(count_objects, classes))  # other tests may have left some
    async with (
        fake_upstream(script) as upstream,
        gateway(ReplicaConfig(url=upstream.url, kind="openai")) as (_, client),
    ):
        for _ in range(3):
            if ending == "admin":
                assert (await client.get("/admin/openapi.json")).status_code == 200
            elif ending == "disconnect":
                async with client.stream("POST", CHAT, json=body) as response:
                    chunks = response.aiter_raw()
                    assert await anext(chunks)
                    await checked.wait()
            else:
                status = {"rejected": 400, "failed": 502, "broken": 502}.get(ending, 200)
                assert (await client.post(CHAT, json=body)).status_code == status
                if status == 502:
                    break  # the replica gets no requests for a while
        release.set()
        await until(lambda: sum(map(count_objects, classes)) <= before)
