"""One try to get an answer from one replica: its head, then its body to whoever takes it, then how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from argosy.gateway.upstream.connection import Connection, UpstreamError
from argosy.gateway.upstream.upstream import Upstream
from argosy.http_server import JSON

_HARMLESS = frozenset({JSON, b"text/plain", b"text/event-stream", b"application/openmetrics-text"})
"""Content types that no browser takes for a page."""
STALE_S = 1.0
"""A connection that fails within so long of a request may have been closed before that came."""
WHOLE_LIMIT_BYTES = 64 * 1024 * 1024
"""Most bytes of an answer that are kept until somebody takes them."""


class TooLargeError(UpstreamError):
    """The replica gives more than can be kept, which may be what it was asked for."""

    def __init__(self, message: str) -> None:
        super().__init__(message, outcome=None)


class Attempt:
    """A `Sink` whose end can be awaited. Body pieces that come before `deliver` are kept for it."""

    def __init__(self, clock: Callable[[], float], most: int | None = None) -> None:
        """`most`: bytes of its answer that are kept until somebody takes them; None: as of any."""
        loop = asyncio.get_running_loop()
        self.head: asyncio.Future[int] = loop.create_future()
        """The status. Raises UpstreamError when none will come."""
        self.end: asyncio.Future[None] = loop.create_future()
        """Done when the answer is whole. Raises UpstreamError when it will not be."""
        self.sent = False
        """A replica was sent the request."""
        self.headers: dict[bytes, bytes] = {}
        self.last = clock()
        """When something came last."""
        self._clock = clock
        self._most = most or WHOLE_LIMIT_BYTES
        self._connection: Connection | None = None
        self._early: list[bytes] = []
        self._kept = 0
        self._piece: asyncio.Future[None] | None = None
        """Somebody waits for the next piece of the body."""
        self._take: Callable[[bytes], None] | None = None
        """Where the body goes; None: it is kept for `deliver`."""

    async def send(self, upstream: Upstream, request: bytes) -> None:
        """Send the request on a kept connection, or a new one. Raises UpstreamError when there is none."""
        kept = upstream.kept()
        self._connection = kept or await upstream.connect()
        self.sent = True
        self.last = self._clock()
        self._connection.ask(request, self)
        if kept is None:
            return
        try:
            await self.head
        except UpstreamError as error:
            if not error.untouched or self._clock() - self.last > STALE_S:
                raise
            # A kept connection that the replica closed meanwhile: it never saw the request, unless it is gone with it.
            self.head = asyncio.get_running_loop().create_future()
            self.end = asyncio.get_running_loop().create_future()
            self._connection = await upstream.connect()
            self._connection.ask(request, self)

    def deliver(self, take: Callable[[bytes], None]) -> None:
        """Give the body to `take`, piece by piece, from the first."""
        early, self._early = self._early, []
        self._take = take
        for piece in early:
            self.on_body(piece)
        if self.end.done():
            self._let_go()

    async def first(self, wanted: Callable[[bytes], bool]) -> None:
        """Wait for the first piece of the body that is `wanted`, before `deliver`, or its end. Raises UpstreamError."""
        seen = 0
        while not any(map(wanted, self._early[seen:])):
            seen = len(self._early)
            if self.end.done():
                await self.end
                return
            self._piece = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._piece, self.end), return_when=asyncio.FIRST_COMPLETED)

    async def whole(self) -> bytes:
        """The whole body. Raises UpstreamError."""
        await self.end
        return b"".join(self._early)

    @property
    def kind(self) -> bytes:
        """The content type, as far as the answer may be passed on as that: a page would speak to us as its reader."""
        told = self.headers.get(b"content-type", JSON)
        return told if told.partition(b";")[0].strip().lower() in _HARMLESS else b"text/plain"

    def pause(self) -> None:
        """Take nothing more for now."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """Go on."""
        if self._connection is not None:
            self._connection.resume()

    def lend(self) -> int | None:
        """See `Connection`; None where there is none."""
        return None if self._connection is None else self._connection.lend()

    def take_back(self, rest: bytes) -> None:
        """See `Connection`."""
        if self._connection is not None:
            self._connection.take_back(rest)

    def abandon(self, reason: str) -> None:
        """Close the connection; whoever waits gets an UpstreamError with this reason."""
        self._abandon(UpstreamError(reason))

    def leave(self) -> None:
        """Its answer is whole although the replica would go on: close the connection, and end well."""
        if self._connection is not None:
            self._connection.abort()
        self.on_end()

    # --- what the connection calls ---------------------------------------------------------------

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """See `Sink`."""
        self.last = self._clock()
        self.headers = dict(headers)
        if not self.head.done():
            self.head.set_result(status)

    def on_body(self, body: bytes) -> None:
        """See `Sink`."""
        self.last = self._clock()
        try:
            (self._take or self._keep)(body)
        except (ValueError, LookupError) as error:
            self._take = _pass_over
            if self.end.done():  # all of it came before `deliver`
                self.end = asyncio.get_running_loop().create_future()
            self.abandon(f"the replica's stream cannot be read ({error})")

    def on_end(self) -> None:
        """See `Sink`."""
        self._connection = None
        self._let_go()
        if not self.end.done():
            self.end.set_result(None)

    def on_failure(self, error: UpstreamError) -> None:
        """See `Sink`."""
        self._connection = None
        self._let_go()
        for future in (self.head, self.end):
            if not future.done():
                future.set_exception(error)
                future.exception()  # it may be that nobody asks

    def _abandon(self, error: UpstreamError) -> None:
        if self._connection is not None:
            self._connection.abort()
        self.on_failure(error)

    def _let_go(self) -> None:
        """Of whoever took the body: it is over, and they may have this attempt."""
        if self._take is not None:
            self._take = _pass_over

    def _keep(self, piece: bytes) -> None:
        self._kept += len(piece)
        if self._kept > self._most:
            self._abandon(TooLargeError(f"the replica's answer is larger than {self._most} bytes"))
        else:
            self._early.append(piece)
            if self._piece is not None and not self._piece.done():
                self._piece.set_result(None)


def _pass_over(body: bytes) -> None:
    """What comes after something that cannot be read is of no use."""
