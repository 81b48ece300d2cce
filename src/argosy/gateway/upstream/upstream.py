"""Towards replicas: connections that are kept for the next request."""

from __future__ import annotations

import asyncio
import ssl

from argosy.gateway.upstream.connection import UpstreamConnection, UpstreamError
from argosy.gateway.upstream.name_resolution import resolve_addresses
from argosy.http_server import Deadlines
from argosy.policy import AttemptOutcome
from argosy.process import RESOURCE_EXHAUSTED_ERRNOS
from argosy.protocol import Endpoint

IDLE_TIMEOUT_S = 60.0
"""An idle connection is closed after this long: sooner than servers close theirs."""
MAX_IDLE_CONNECTIONS = 256
CONNECT_TIMEOUT_S = 2.0
CONNECTION_ATTEMPT_DELAY_S = 0.25
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
        self._fixed_headers = b"".join(name + b": " + value + b"\r\n" for name, value in fixed)
        self._path_prefix = endpoint.path_prefix.encode()
        self._idle_connections: list[UpstreamConnection] = []
        self._unresponsive_addresses: set[str] = set()
        """Addresses of its name that did not answer when they were tried last."""
        self._pending_lookup: asyncio.Future[tuple[str, ...]] | None = None
        """The name is being looked up."""
        self._idle_deadlines = Deadlines(IDLE_TIMEOUT_S, UpstreamConnection.close)
        self._closed = False

    def build_request(
        self, method: bytes, path: bytes, body: bytes, headers: list[tuple[bytes, bytes]]
    ) -> bytes:
        """The bytes of a request to this replica."""
        own = b"".join([b"%b: %b\r\n" % header for header in headers])
        length = b"content-length: %d\r\n" % len(body) if body or method == b"POST" else b""
        line = method + b" " + self._path_prefix + path + b" HTTP/1.1\r\n"
        return line + self._fixed_headers + own + length + b"\r\n" + body

    def take_idle_connection(self) -> UpstreamConnection | None:
        """A connection that is idle and, as far as is known, alive."""
        while self._idle_connections:
            connection = self._idle_connections.pop()
            self._idle_deadlines.remove(connection)
            if not connection.closed:
                return connection
        return None

    async def connect(self) -> UpstreamConnection:
        """A new connection. Raises UpstreamError."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                made = await self._open_connection()
        except TimeoutError as error:
            message = f"no connection within {self._connect_timeout_s:g} s"
            raise UpstreamError(message, before_response=True) from error
        except OSError as error:
            message = f"no connection ({error.strerror or error})"
            outcome = (
                AttemptOutcome.BACKPRESSURE
                if error.errno in RESOURCE_EXHAUSTED_ERRNOS
                else AttemptOutcome.FAILURE
            )
            raise UpstreamError(message, before_response=True, outcome=outcome) from error
        if made.closed:  # it would call nobody back
            raise UpstreamError("no connection (it was closed at once)", before_response=True)
        return made

    async def _open_connection(self) -> UpstreamConnection:
        """To the first of its name's addresses that answers. Raises OSError."""
        loop, endpoint = asyncio.get_running_loop(), self.endpoint
        if endpoint.socket_path is not None:
            _, made = await loop.create_unix_connection(
                self._create_connection, endpoint.socket_path
            )
            return made
        if endpoint.address is not None:
            return await self._connect_to(endpoint.address)
        addresses = await self._lookup_addresses()
        self._unresponsive_addresses.intersection_update(addresses)
        return await self._connect_to_first(
            sorted(addresses, key=self._unresponsive_addresses.__contains__)
        )

    async def _lookup_addresses(self) -> tuple[str, ...]:
        """Of its name, which is looked up once for all who ask meanwhile: it may take long. Raises OSError."""
        if self._pending_lookup is None:
            self._pending_lookup = asyncio.ensure_future(resolve_addresses(self.endpoint.host))
            self._pending_lookup.add_done_callback(self._on_lookup_done)
        return await asyncio.shield(self._pending_lookup)

    def _on_lookup_done(self, lookup: asyncio.Future[tuple[str, ...]]) -> None:
        self._pending_lookup = None
        if not lookup.cancelled():
            lookup.exception()  # it may be that nobody waits any more

    async def _connect_to_first(self, addresses: list[str]) -> UpstreamConnection:
        """To the first of them that answers, each tried a little after the one before. Raises OSError."""
        running: dict[asyncio.Task[UpstreamConnection], str] = {}
        failed: OSError | None = None
        try:
            while addresses or running:
                if addresses:
                    address = addresses.pop(0)
                    running[asyncio.create_task(self._connect_to(address))] = address
                next_s = CONNECTION_ATTEMPT_DELAY_S if addresses else None
                done, _ = await asyncio.wait(
                    running, timeout=next_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    address = running.pop(task)
                    try:
                        made = task.result()
                    except OSError as error:
                        failed = failed or error
                        self._unresponsive_addresses.add(address)
                    else:
                        self._unresponsive_addresses.discard(address)
                        self._unresponsive_addresses.update(running.values())
                        return made
        finally:
            for task in running:
                task.add_done_callback(_abort_unused)
                task.cancel()
        raise failed or OSError("its name has no address")

    async def _connect_to(self, address: str) -> UpstreamConnection:
        """To this one. Raises OSError."""
        _, made = await asyncio.get_running_loop().create_connection(
            self._create_connection,
            address,
            self.endpoint.port,
            ssl=self._tls,
            server_hostname=self._server_name,
        )
        return made

    def close(self) -> None:
        """Keep no connection any more: idle ones are closed now, the others when they have what they were asked."""
        self._closed = True
        while (connection := self.take_idle_connection()) is not None:
            connection.abort()

    def _create_connection(self) -> UpstreamConnection:
        return UpstreamConnection(self._on_connection_idle)

    def _on_connection_idle(self, connection: UpstreamConnection) -> None:
        if connection.closed:
            return
        if self._closed or len(self._idle_connections) >= MAX_IDLE_CONNECTIONS:
            connection.abort()
            return
        self._idle_deadlines.add(connection)
        self._idle_connections.append(connection)


def _abort_unused(task: asyncio.Task[UpstreamConnection]) -> None:
    """Another address was sooner."""
    if not task.cancelled() and task.exception() is None:
        task.result().abort()
