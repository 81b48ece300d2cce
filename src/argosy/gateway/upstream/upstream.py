"""Towards replicas: connections that are kept for the next request."""

from __future__ import annotations

import asyncio
import ssl

from argosy.gateway.upstream.connection import Connection, UpstreamError
from argosy.gateway.upstream.name_resolution import addresses_of
from argosy.http_server import Deadlines
from argosy.policy import Outcome
from argosy.process import NO_ROOM
from argosy.protocol import Endpoint

IDLE_S = 60.0
"""An idle connection is closed after this long: sooner than servers close theirs."""
MAX_IDLE = 256
CONNECT_TIMEOUT_S = 2.0
NEXT_ADDRESS_S = 0.25
"""A name's next address is tried beside those that have not answered for so long (RFC 8305, section 8)."""


class Upstream:
    """All connections to one replica, kept for the next request."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        headers: tuple[tuple[bytes, bytes], ...] = (),
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._connect_timeout_s = connect_timeout_s
        self._tls = (tls or ssl.create_default_context()) if endpoint.tls else None
        self._server_name = (server_name or endpoint.host) if endpoint.tls else None
        fixed = [(b"host", endpoint.authority.encode()), *headers]
        self._fixed = b"".join(name + b": " + value + b"\r\n" for name, value in fixed)
        self._path = endpoint.path.encode()
        self._idle: list[Connection] = []
        self._deaf: set[str] = set()
        """Addresses of its name that did not answer when they were tried last."""
        self._asking: asyncio.Future[tuple[str, ...]] | None = None
        """The name is being looked up."""
        self._expiring = Deadlines(IDLE_S, Connection.close)
        self._closed = False

    def request(
        self, method: bytes, path: bytes, body: bytes, headers: list[tuple[bytes, bytes]]
    ) -> bytes:
        """The bytes of a request to this replica."""
        own = b"".join([b"%b: %b\r\n" % header for header in headers])
        length = b"content-length: %d\r\n" % len(body) if body or method == b"POST" else b""
        line = method + b" " + self._path + path + b" HTTP/1.1\r\n"
        return line + self._fixed + own + length + b"\r\n" + body

    def kept(self) -> Connection | None:
        """A connection that is idle and, as far as is known, alive."""
        while self._idle:
            connection = self._idle.pop()
            self._expiring.remove(connection)
            if not connection.closed:
                return connection
        return None

    async def connect(self) -> Connection:
        """A new connection. Raises UpstreamError."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                made = await self._connect()
        except TimeoutError as error:
            message = f"no connection within {self._connect_timeout_s:g} s"
            raise UpstreamError(message, untouched=True) from error
        except OSError as error:
            message = f"no connection ({error.strerror or error})"
            outcome = Outcome.BACKPRESSURE if error.errno in NO_ROOM else Outcome.FAILURE
            raise UpstreamError(message, untouched=True, outcome=outcome) from error
        if made.closed:  # it would call nobody back
            raise UpstreamError("no connection (it was closed at once)", untouched=True)
        return made

    async def _connect(self) -> Connection:
        """To the first of its name's addresses that answers. Raises OSError."""
        loop, endpoint = asyncio.get_running_loop(), self.endpoint
        if endpoint.unix is not None:
            _, made = await loop.create_unix_connection(self._make, endpoint.unix)
            return made
        if endpoint.address is not None:
            return await self._reach(endpoint.address)
        addresses = await self._addresses()
        self._deaf.intersection_update(addresses)
        return await self._first(sorted(addresses, key=self._deaf.__contains__))

    async def _addresses(self) -> tuple[str, ...]:
        """Of its name, which is looked up once for all who ask meanwhile: it may take long. Raises OSError."""
        if self._asking is None:
            self._asking = asyncio.ensure_future(addresses_of(self.endpoint.host))
            self._asking.add_done_callback(self._asked)
        return await asyncio.shield(self._asking)

    def _asked(self, asking: asyncio.Future[tuple[str, ...]]) -> None:
        self._asking = None
        if not asking.cancelled():
            asking.exception()  # it may be that nobody waits any more

    async def _first(self, addresses: list[str]) -> Connection:
        """To the first of them that answers, each tried a little after the one before. Raises OSError."""
        running: dict[asyncio.Task[Connection], str] = {}
        failed: OSError | None = None
        try:
            while addresses or running:
                if addresses:
                    address = addresses.pop(0)
                    running[asyncio.create_task(self._reach(address))] = address
                next_s = NEXT_ADDRESS_S if addresses else None
                done, _ = await asyncio.wait(
                    running, timeout=next_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    address = running.pop(task)
                    try:
                        made = task.result()
                    except OSError as error:
                        failed = failed or error
                        self._deaf.add(address)
                    else:
                        self._deaf.discard(address)
                        self._deaf.update(running.values())
                        return made
        finally:
            for task in running:
                task.add_done_callback(_let_go)
                task.cancel()
        raise failed or OSError("its name has no address")

    async def _reach(self, address: str) -> Connection:
        """To this one. Raises OSError."""
        _, made = await asyncio.get_running_loop().create_connection(
            self._make,
            address,
            self.endpoint.port,
            ssl=self._tls,
            server_hostname=self._server_name,
        )
        return made

    def close(self) -> None:
        """Keep no connection any more: idle ones are closed now, the others when they have what they were asked."""
        self._closed = True
        while (connection := self.kept()) is not None:
            connection.abort()

    def _make(self) -> Connection:
        return Connection(self._keep)

    def _keep(self, connection: Connection) -> None:
        if connection.closed:
            return
        if self._closed or len(self._idle) >= MAX_IDLE:
            connection.abort()
            return
        self._expiring.add(connection)
        self._idle.append(connection)


def _let_go(task: asyncio.Task[Connection]) -> None:
    """Another address was sooner."""
    if not task.cancelled() and task.exception() is None:
        task.result().abort()
