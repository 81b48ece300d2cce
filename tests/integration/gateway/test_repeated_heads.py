"""Requests with the same head as the previous one are parsed as if each had its own connection."""

from __future__ import annotations

import asyncio
import json

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.integration.gateway.test_http_connections import listen

from argosy.http_server import HttpRequest


async def describe_request(request: HttpRequest) -> None:
    """Respond with the request's method, path, headers and body."""
    headers = [(name.decode(), value.decode()) for name, value in request.headers]
    received = (await request.transport.read_body(1 << 20)).decode("latin-1")
    body = json.dumps([request.method, request.path, headers, received]).encode()
    request.transport.send_response(200, [(b"content-length", b"%d" % len(body))], body)


LENGTHS = ("content-length: {}", "Content-Length: {}", "content-length:{}", "Content-Length:  {}")
BODIES = st.sampled_from(
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
    body, before, after = draw(BODIES), draw(HEADERS), draw(HEADERS)
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


def test_pipelined_requests_with_same_head_keep_their_bodies() -> None:
    """The heads are equal and the bodies are not, and the client does not wait for responses."""

    async def exchange_pipelined() -> list[object]:
        async with listen(describe_request) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            bodies = [b"%d" % number * (number % 7) for number in range(200)]
            descriptions = []
            for at in range(0, 200, 4):
                for body in bodies[at : at + 4]:
                    writer.write(
                        b"POST /seen HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
                        + body
                    )
                descriptions += [await read_description(reader) for _ in range(4)]
            writer.close()
            return [description[3] for description in descriptions]

    assert asyncio.run(exchange_pipelined()) == [
        str(number) * (number % 7) for number in range(200)
    ]
