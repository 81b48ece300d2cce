"""Requests whose heads are the same as the one before are read as any other: each as if its connection were its own."""

from __future__ import annotations

import asyncio
import json

from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from tests.integration.gateway.test_http_connections import listening


async def seen(request: Request) -> JSONResponse:
    """Tells what came."""
    headers = [(name.decode(), value.decode()) for name, value in request.headers.raw]
    body = (await request.body()).decode("latin-1")
    return JSONResponse([request.method, str(request.url.path), headers, body])


APP = Starlette(routes=[Route("/seen", seen, methods=["POST"])])

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
def requests(draw: st.DrawFn) -> bytes:
    """As clients write them, with a length or in chunks."""
    body, before, after = draw(BODIES), draw(HEADERS), draw(HEADERS)
    length = draw(st.sampled_from((*LENGTHS, "content-length: 00{}", "transfer-encoding: chunked")))
    head = ("POST /seen HTTP/1.1", "host: x", *before, length.format(len(body)), *after, "", "")
    if "chunked" in length:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
    return "\r\n".join(head).encode() + body


FEW = st.lists(requests(), min_size=1, max_size=3).flatmap(
    lambda some: st.lists(st.sampled_from(some), min_size=2, max_size=8)
)
"""The same ones again and again."""


async def told(reader: asyncio.StreamReader) -> list[object]:
    """What the application saw: method, path, headers and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
    seen: list[object] = json.loads(await reader.readexactly(length))
    return seen


async def over_one(port: int, asked: list[bytes], cut: int) -> list[list[object]]:
    """The answers to requests one after another on one connection; the last comes in two pieces."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = []
    for request in asked[:-1]:
        writer.write(request)
        found.append(await told(reader))
    writer.write(asked[-1][:cut])
    await writer.drain()
    writer.write(asked[-1][cut:])
    found.append(await told(reader))
    writer.close()
    return found


@settings(max_examples=60, deadline=None)
@given(FEW, st.integers(0, 200))
def test_what_came_before_changes_nothing(asked: list[bytes], cut: int) -> None:
    async def both() -> tuple[list[list[object]], list[list[object]]]:
        async with listening(APP) as port:
            alone = [(await over_one(port, [request], 0))[0] for request in asked]
            return await over_one(port, asked, cut), alone

    together, alone = asyncio.run(both())
    assert together == alone


def test_many_at_once_are_each_their_own() -> None:
    """Heads that are the same, bodies that are not, sent without waiting."""

    async def all_of_them() -> list[object]:
        async with listening(APP) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            bodies = [b"%d" % number * (number % 7) for number in range(200)]
            found = []
            for at in range(0, 200, 4):
                for body in bodies[at : at + 4]:
                    writer.write(
                        b"POST /seen HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
                        + body
                    )
                found += [await told(reader) for _ in range(4)]
            writer.close()
            return [one[3] for one in found]

    assert asyncio.run(all_of_them()) == [str(number) * (number % 7) for number in range(200)]
