"""One HTTP request and its answer over ASGI: body in under limits, answer or stream out, a cut if it stalls."""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Protocol

from argosy.http_server.response_observer import Copy, to_both
from argosy.protocol import SSE_CONTENT_TYPE, ApiError, comment

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON = b"application/json"
ANYBODY = comment(b"")
"""Says nothing, between events."""
WIRE = "argosy.wire"
"""Key of the scope's state: the connection that the request came by, a `Wire`."""
EXCHANGE = "argosy.exchange"
"""Key of the scope's state: the `Exchange`, for an application that it was handed to."""

PIECE_BYTES = 64 * 1024
"""A whole answer that is larger is sent in pieces of so many, as the client takes them."""
OPENAI_VERSION = b"2020-10-01"
"""Of the API that is spoken; there is no other."""
LONGEST_RETRY_S = 120
"""Who has to wait for longer is told that SDKs are not to: some would do so in the middle of a call, for hours."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class DisconnectedError(Exception):
    """The client has gone; nobody waits for an answer."""


class SlowReaderError(Exception):
    """The client takes nothing; its connection has been cut."""


class Watcher(Protocol):
    """Whoever pushes to a client is told how the client takes it."""

    def on_full(self) -> None:
        """It is behind: push nothing more for now."""

    def on_room(self) -> None:
        """It has caught up."""

    def on_quiet(self) -> None:
        """It will send no more, and may have gone: whatever it is sent in the middle of an answer tells."""

    def on_gone(self) -> None:
        """It has gone away."""


class Wire(Protocol):
    """The connection under a request. What is sent after the client has gone is lost without an error."""

    @property
    def whole(self) -> bool:
        """Whether the body is all there."""

    @property
    def full(self) -> bool:
        """Whether the client is behind with what was sent to it."""

    @property
    def unsent(self) -> int:
        """Bytes that wait for the client to take others."""

    @property
    def gone(self) -> bool:
        """Whether the client has gone."""

    async def body(self, limit: int) -> bytes:
        """The whole body, or more than `limit` bytes of it. Raises DisconnectedError, or ApiError 503."""

    async def room(self) -> None:
        """Wait until the client is not behind, or has gone."""

    def answer(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Send a whole answer; `headers` tell its length."""

    def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Begin an answer of unknown length, which ends with the connection where HTTP is 1.0."""

    def begin_sized(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Begin one whose length `headers` tell."""

    def push(self, data: bytes) -> None:
        """Send a part of the answer that has begun."""

    def lend(self) -> int | None:
        """The socket's descriptor, for who sends the next parts instead, in chunks as HTTP has them.

        None: it cannot be, since it is TLS's, what was sent before waits still, or the answer does not come in chunks.
        """

    def pass_on(self, chunks: bytes) -> None:
        """Send what who had the socket could not: it is in chunks already."""

    def end(self) -> None:
        """End it."""

    def cut(self) -> None:
        """Drop the connection at once, whatever waits to be sent."""

    def watch(self, watcher: Watcher | None) -> None:
        """Tell `watcher`, and nobody else, how the client takes what is pushed."""


class ExchangeLimits(Protocol):
    """What a client may send and how long it may take. Times are in seconds."""

    @property
    def body_limit_bytes(self) -> int:
        """Most bytes of a body."""

    @property
    def body_timeout_s(self) -> float:
        """A request whose body is not complete after this long is refused."""

    @property
    def slow_reader_timeout_s(self) -> float:
        """A client that takes nothing for this long is cut off."""


class Exchange:
    """One request and its answer. Every answer carries `x-request-id`, `openai-processing-ms` and `openai-version`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: ExchangeLimits) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._limits = limits
        self._wire: Wire = scope["state"][WIRE]
        self.push = self._wire.push
        """Send a part of a stream at once; `watch` tells when the client is behind."""
        self.arrived = time.monotonic()
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        """What came after the path's `?`."""
        self.headers = _by_name(scope["headers"])
        self.request_id = self._find_request_id()
        self.extra: list[tuple[bytes, bytes]] = []
        """Headers of the answer, whatever it will be."""
        self.status: int | None = None
        """The status that was sent, once it was."""
        self.complete = False
        """Whether the whole answer was sent."""
        self._copy: Copy | None = None
        self.failure: str | None = None
        """Code of the error that it ended with."""

    @property
    def peer(self) -> str:
        """Address of the other end; "unix" over a Unix socket; empty when nobody can tell any more."""
        client, server = self._scope.get("client"), self._scope.get("server")
        if client is not None:
            return str(client[0])
        return "unix" if server is not None and server[1] is None else ""

    @property
    def gone(self) -> bool:
        """Whether the client has gone: nobody gets what is sent."""
        return self._wire.gone

    def _find_request_id(self) -> str:
        if b"x-request-id" in self.headers:
            given = self.header(b"x-request-id")
            if _REQUEST_ID.fullmatch(given):
                return given
        return f"req_{random.getrandbits(128):032x}"

    def header(self, name: bytes) -> str:
        """A header's value; empty when it was not sent."""
        return self.headers.get(name, b"").decode("latin-1")

    def rename(self, request_id: str) -> None:
        """Take the id that the body gives, unless a header gave one or it cannot be a header."""
        if b"x-request-id" not in self.headers and _REQUEST_ID.fullmatch(request_id):
            self.request_id = request_id

    async def body(self) -> bytes:
        """The whole body. Raises ApiError 413 before reading too much, 408 when it does not come.

        503 when more bodies come than can be kept at a time.
        """
        limit, wire = self._limits.body_limit_bytes, self._wire
        self._refuse_length(limit)
        if wire.whole:
            body = await wire.body(limit)
        else:
            try:
                async with asyncio.timeout(self._limits.body_timeout_s):
                    body = await wire.body(limit)
            except TimeoutError as error:
                seconds = self._limits.body_timeout_s
                message = f"The body was not complete after {seconds:g} s. Send it faster."
                raise ApiError(408, "request_timeout", message) from error
        if len(body) > limit:
            raise _too_large(limit)
        return body

    def _refuse_length(self, limit: int) -> None:
        length = self.headers.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > limit:
            raise _too_large(limit)
        encoding = self.headers.get(b"content-encoding", b"identity").lower()
        if encoding not in {b"identity", b""}:
            message = "Compressed bodies are not read. Send the JSON as it is."
            raise ApiError(415, "unsupported_encoding", message)

    def on_disconnect(self, gone: Callable[[], object]) -> Leaving:
        """Call `gone` when the client goes away; cancel what is returned when that is over."""
        leaving = Leaving(self._wire, gone)
        self._wire.watch(leaving)
        return leaving

    async def answer(self, status: int, body: bytes, content_type: bytes = JSON) -> None:
        """Send a whole answer."""
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
        if self._wire.full:
            await self._room()
        if self._copy is not None:
            self._copy.begin(content_type)
            self._copy.add(body)
        if len(body) <= PIECE_BYTES:
            self._wire.answer(status, self._headed(status, headers), body)
        else:
            await self._answer_in_pieces(status, self._headed(status, headers), body)
        self.complete = True

    async def _answer_in_pieces(
        self, status: int, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> None:
        """No faster than the client takes them: for thousands who take nothing, all of it would be kept."""
        self._wire.begin_sized(status, headers)
        try:
            for start in range(0, len(body), PIECE_BYTES):
                await self._room()
                self._wire.push(body[start : start + PIECE_BYTES])
        except BaseException:
            self.cut()  # nothing else can be said before the rest
            raise
        self._wire.end()

    async def refuse(self, error: ApiError) -> None:
        """Send an error body, with the headers that tell clients when to try again."""
        if error.retry_after_s is not None:
            seconds = str(max(1, math.ceil(error.retry_after_s))).encode()
            milliseconds = str(math.ceil(error.retry_after_s * 1000)).encode()
            self.extra += [(b"retry-after", seconds), (b"retry-after-ms", milliseconds)]
            if error.retry_after_s > LONGEST_RETRY_S:
                self.extra.append((b"x-should-retry", b"false"))
        await self.answer(error.status, error.body(self.request_id))

    async def start_stream(self, content_type: bytes = SSE_CONTENT_TYPE) -> None:
        """Begin a stream, by default one of events."""
        headers = [
            (b"content-type", content_type),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        if self._wire.full:
            await self._room()
        if self._copy is not None:
            self._copy.begin(content_type)
        self._wire.begin(200, self._headed(200, headers))

    async def write(self, data: bytes) -> None:
        """Send a part of a stream, waiting while the client is behind."""
        if self._wire.full:
            await self._room()
        self.push(data)

    def copy_to(self, copy: Copy | None) -> None:
        """Give `copy` too what is sent of the answer from now on: its socket must not be lent. None: nobody more."""
        self._copy = copy
        self.push = self._wire.push if copy is None else to_both(self._wire.push, copy.add)

    def lend(self) -> int | None:
        """See `Wire`."""
        return self._wire.lend()

    def pass_on(self, chunks: bytes) -> None:
        """See `Wire`."""
        self._wire.pass_on(chunks)

    def watch(self, watcher: Watcher | None) -> None:
        """Tell `watcher` from now on how the client takes what is pushed."""
        self._wire.watch(watcher)

    async def end_stream(self) -> None:
        """End it."""
        if self._wire.full:
            await self._room()
        self._wire.end()
        self.complete = True

    def cut(self) -> None:
        """Cut the connection at once, whatever waits to be sent; whoever watches learns of it."""
        self._wire.cut()

    async def drop(self) -> None:
        """The same, for whoever answers."""
        self.cut()
        await asyncio.sleep(0)  # the server learns of it before we return

    async def hand_to(self, app: App) -> None:
        """Let `app` answer: it finds this exchange in its scope's state, under `EXCHANGE`."""
        state = self._scope["state"]
        state[EXCHANGE] = self
        try:
            await app(self._scope, self._receive, self._send)
        finally:
            del state[EXCHANGE]

    def age_ms(self) -> float:
        """Milliseconds since the request came."""
        return round((time.monotonic() - self.arrived) * 1000, 1)

    def _headed(self, status: int, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The headers, with those that every answer has."""
        self.status = status
        spent_ms = b"%d" % round((time.monotonic() - self.arrived) * 1000)
        headers += [
            *self.extra,
            (b"x-request-id", self.request_id.encode("latin-1")),
            (b"openai-processing-ms", spent_ms),
            (b"openai-version", OPENAI_VERSION),
        ]
        return headers

    async def _room(self) -> None:
        """Wait while the client is behind; when it takes nothing, cut it and raise SlowReaderError."""
        before = math.inf
        while (unsent := self._wire.unsent) < before:
            try:
                async with asyncio.timeout(self._limits.slow_reader_timeout_s):
                    return await self._wire.room()
            except TimeoutError:
                before = unsent
        await self.drop()
        raise SlowReaderError


class Leaving:
    """A `Watcher` of a stream of events that only wants to know when the client has gone."""

    def __init__(self, wire: Wire, gone: Callable[[], object]) -> None:
        self._wire = wire
        self._gone = gone

    def cancel(self) -> None:
        """It no longer wants to."""
        self._wire.watch(None)

    def on_full(self) -> None:
        """See `Watcher`."""

    def on_room(self) -> None:
        """See `Watcher`."""

    def on_quiet(self) -> None:
        """See `Watcher`."""
        self._wire.push(ANYBODY)

    def on_gone(self) -> None:
        """See `Watcher`."""
        self._gone()


def _by_name(headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Headers by name; several lines of one are a list with commas (RFC 9110, 5.3), which proxies add to by lines."""
    found = dict(headers)
    if len(found) < len(headers):
        lines: dict[bytes, list[bytes]] = {}
        for name, value in headers:
            lines.setdefault(name, []).append(value)
        found = {name: b", ".join(values) for name, values in lines.items()}
    return found


def _too_large(limit: int) -> ApiError:
    message = f"The body is larger than {limit} bytes. Send less in one request."
    return ApiError(413, "request_too_large", message)
