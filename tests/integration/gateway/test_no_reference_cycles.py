"""Connections that have ended leave nothing that only the garbage collector finds.

It looks through old objects once in tens of thousands of connections; until then each of them would be kept, over TLS
with hundreds of kilobytes.
"""

from __future__ import annotations

import asyncio
import gc
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.byte_server import OK, Kept, ask, read_request, serving
from tests.support.certificates import Authority
from tests.support.gateway_client import BODIES, CHAT, gateway
from tests.support.scripted_server import Asked, rough_server
from tests.support.waiting import still, until

from argosy.gateway import ReplicaConfig
from argosy.gateway.proxy.response_relay import ResponseRelay, StreamTimeouts
from argosy.gateway.request_fields import RequestFields
from argosy.gateway.upstream import UpstreamResponse
from argosy.gateway.upstream import connection as upstream
from argosy.http_server import (
    CertificateWatcher,
    HttpExchange,
    HttpServer,
    Receive,
    Scope,
    Send,
    TlsConfig,
    bind_tcp,
)
from argosy.http_server import connection as web

ASKED = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(autouse=True)
def _uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def left(kind: type) -> int:
    """How many there are."""
    return sum(type(each) is kind for each in gc.get_objects())


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    headers = [(b"content-length", b"5")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"hello"})


@pytest.mark.parametrize("spoken", ["HTTP", "TLS", "HTTP to TLS"])
async def test_of_clients(tmp_path: Path, spoken: str) -> None:
    before, authority, certificates, trust = (
        left(web.HttpConnection),
        Authority(tmp_path),
        None,
        None,
    )
    if spoken != "HTTP":
        pair = authority.pair("server", "127.0.0.1")
        certificates = CertificateWatcher(TlsConfig(certificate=pair.certificate, key=pair.key))
    if spoken == "TLS":
        trust = ssl.create_default_context(cafile=authority.ca)
    listener, bound = HttpServer(hello, certificates), bind_tcp("127.0.0.1", 0)
    running = asyncio.create_task(listener.serve(sockets=[bound]))
    for _ in range(3):
        reader, writer = await asyncio.open_connection(*bound.getsockname(), ssl=trust)
        writer.write(ASKED)
        if spoken == "HTTP to TLS":
            assert not await reader.read()
        else:
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200 OK")
        writer.transport.abort()
    await until(lambda: not listener.server_state.connections)
    listener.stop()
    await running
    assert await still(lambda: left(web.HttpConnection)) <= before


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
async def test_of_replicas(tmp_path: Path, tls: bool) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)
        await reader.read()

    before, authority, mine, trust = (
        left(upstream.UpstreamConnection),
        Authority(tmp_path),
        None,
        None,
    )
    if tls:
        pair = authority.pair("server", "127.0.0.1")
        mine = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        mine.load_cert_chain(pair.certificate, pair.key)
        trust = ssl.create_default_context(cafile=authority.ca)
    async with serving(answer, tls=mine, trust=trust) as asked:
        for _ in range(3):
            sink = Kept()
            connection = await ask(asked, sink)
            await sink.ended.wait()
            connection.abort()
    del connection
    assert await still(lambda: left(upstream.UpstreamConnection)) <= before


@pytest.mark.parametrize(
    "how", ["whole", "stream", "left", "refused", "failed", "broken", "administered"]
)
async def test_of_requests(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked may be megabytes, and so may be what was answered."""
    waiting, tended, tend = asyncio.Event(), asyncio.Event(), ResponseRelay.check_timeouts

    def tell(stream: ResponseRelay, now: float, limits: StreamTimeouts) -> None:
        tend(stream, now, limits)
        tended.set()

    monkeypatch.setattr(ResponseRelay, "check_timeouts", tell)

    async def script(asked: Asked) -> None:
        if how == "refused":
            asked.json(400, {"error": {"message": "no"}})
        elif how == "failed":
            asked.json(500, {"error": {"message": "no"}})
        elif how == "broken":
            asked.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort")
            asked.writer.close()
        elif how == "whole":
            asked.json(200, {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]})
        else:
            asked.stream()
            asked.say("a", "stop" if how == "stream" else None)
            if how == "left":
                await waiting.wait()
            asked.end()

    body = BODIES[CHAT] | {"stream": how in {"stream", "left"}}
    kinds = HttpExchange, RequestFields, UpstreamResponse
    before = sum(map(left, kinds))  # other tests may have kept some
    async with (
        rough_server(script) as rough,
        gateway(ReplicaConfig(url=rough.url, kind="openai")) as (_, client),
    ):
        for _ in range(3):
            if how == "administered":
                assert (await client.get("/admin/openapi.json")).status_code == 200
            elif how == "left":
                async with client.stream("POST", CHAT, json=body) as answer:
                    pieces = answer.aiter_raw()
                    assert await anext(pieces)
                    await tended.wait()
            else:
                status = {"refused": 400, "failed": 502, "broken": 502}.get(how, 200)
                assert (await client.post(CHAT, json=body)).status_code == status
                if status == 502:
                    break  # it is left alone for a while
        waiting.set()
        await until(lambda: sum(map(left, kinds)) <= before)
