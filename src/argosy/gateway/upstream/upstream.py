"""Connections to one replica, kept open for later requests, with the replica's addresses and its TLS settings."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Sequence
from functools import partial

from aiohappyeyeballs import AddrInfoType, start_connection

from argosy.deployment import UpstreamTls
from argosy.gateway.upstream.connection import UpstreamConnection, UpstreamError
from argosy.gateway.upstream.tunnel import open_tunnel
from argosy.http_server import Deadlines
from argosy.policy import AttemptOutcome
from argosy.process import RESOURCE_EXHAUSTED_ERRNOS, run_in_daemon_thread
from argosy.protocol import Endpoint
from argosy.proxies import Proxy

IDLE_TIMEOUT_S = 60.0
"""Time after which an idle connection is closed, which is before servers close theirs."""
MAX_IDLE_CONNECTIONS = 256
CONNECT_TIMEOUT_S = 2.0
CONNECTION_ATTEMPT_DELAY_S = 0.25
"""Time to wait for an address before the next one is tried in parallel (RFC 8305, section 8)."""


async def resolve_addresses(
    host: str, family: socket.AddressFamily = socket.AF_UNSPEC
) -> tuple[str, ...]:
    """Resolve `host` to its addresses, in the order in which to try them.

    The event loop's own `getaddrinfo` shares a few threads, which unanswered lookups would block for all names.

    Raises:
        OSError: The name has no address, or the resolver failed.
    """
    look_up = partial(socket.getaddrinfo, host, None, family, socket.SOCK_STREAM)
    try:
        try:
            found = look_up(flags=socket.AI_NUMERICHOST)  # an address needs no lookup
        except socket.gaierror:
            found = await run_in_daemon_thread(look_up)
    except UnicodeError as error:
        raise OSError(f"{host!r} is not a valid host name") from error
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def create_client_ssl_context(config: UpstreamTls) -> ssl.SSLContext:
    """Create the TLS context for connections to a replica.

    Raises:
        ValueError: A file is missing or unusable. The message names it.
    """
    try:
        context = ssl.create_default_context(cafile=config.ca)
    except (OSError, ValueError) as error:
        message = f"tls: cannot use {config.ca}: {error}"
        raise ValueError(f"{message}. Give a PEM file with the authority's certificate.") from error
    context.set_alpn_protocols(["http/1.1"])
    if config.certificate is None:
        return context
    try:
        context.load_cert_chain(config.certificate, config.key, password=lambda: "")
    except (OSError, ValueError) as error:
        message = f"tls: cannot use {config.certificate} with {config.key}: {error}"
        raise ValueError(f"{message}. Give PEM files that belong together.") from error
    return context


def encode_headers(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Encode headers as lines."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


class Upstream:
    """Connections to one replica. Idle ones are kept for the next request."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        headers: tuple[tuple[bytes, bytes], ...] = (),
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
        proxy: Proxy | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.proxy = proxy
        """Proxy through which the server is reached; None for none."""
        self._connect_timeout_s = connect_timeout_s
        self._tls = (tls or ssl.create_default_context()) if endpoint.tls else None
        self._server_name = (server_name or endpoint.host) if endpoint.tls else None
        fixed = [(b"host", endpoint.authority.encode()), *headers]
        self._path_prefix = endpoint.path_prefix.encode()
        if proxy is not None and not endpoint.tls:  # a proxy gets whole URLs (RFC 9112, 3.2.2)
            self._path_prefix = b"http://" + endpoint.authority.encode() + self._path_prefix
            if proxy.authorization:
                fixed.append((b"proxy-authorization", proxy.authorization))
        self._fixed_lines = encode_headers(fixed)
        self._idle_connections: list[UpstreamConnection] = []
        self._unresponsive_addresses: set[str] = set()
        """Addresses of the replica's name that did not answer at the last try."""
        self._pending_lookup: asyncio.Future[tuple[str, ...]] | None = None
        """Running lookup of the replica's name."""
        self._idle_deadlines = Deadlines(IDLE_TIMEOUT_S, UpstreamConnection.close)
        self._closed = False

    def build_request(
        self, method: bytes, path: bytes, body: bytes, headers: Sequence[tuple[bytes, bytes]]
    ) -> bytes:
        """Encode a request to this replica, with its fixed headers and path prefix."""
        length = b"content-length: %d\r\n" % len(body) if body or method == b"POST" else b""
        lines = self._fixed_lines + encode_headers(headers) + length
        return b"%b %b%b HTTP/1.1\r\n%b\r\n%b" % (method, self._path_prefix, path, lines, body)

    def build_post(self, path: bytes, body: bytes, header_lines: bytes) -> bytes:
        """Encode a POST request with headers that are encoded already."""
        return b"POST %b%b HTTP/1.1\r\n%b%bcontent-length: %d\r\n\r\n%b" % (
            self._path_prefix,
            path,
            self._fixed_lines,
            header_lines,
            len(body),
            body,
        )

    def take_idle_connection(self) -> UpstreamConnection | None:
        """Return an idle connection that is not known to be closed; None if there is none."""
        while self._idle_connections:
            connection = self._idle_connections.pop()
            self._idle_deadlines.remove(connection)
            if not connection.closed:
                return connection
        return None

    async def connect(self) -> UpstreamConnection:
        """Open a new connection. Raises UpstreamError."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                connection = await self._open_connection()
        except TimeoutError as error:
            message = f"no connection within {self._connect_timeout_s:g} s"
            if self.proxy is not None:
                message += f" through the proxy {self.proxy.name}"
            raise UpstreamError(message, before_response=True) from error
        except OSError as error:
            message = f"no connection ({error.strerror or error})"
            outcome = (
                AttemptOutcome.BACKPRESSURE
                if error.errno in RESOURCE_EXHAUSTED_ERRNOS
                else AttemptOutcome.FAILURE
            )
            raise UpstreamError(message, before_response=True, outcome=outcome) from error
        if connection.closed:  # a request on a closed connection would never call its listener
            raise UpstreamError("no connection (it was closed at once)", before_response=True)
        return connection

    async def _open_connection(self) -> UpstreamConnection:
        """Connect to the socket path, the address, or the first address of the name that answers. Raises OSError."""
        loop, endpoint = asyncio.get_running_loop(), self.endpoint
        if endpoint.socket_path is not None:
            _, connection = await loop.create_unix_connection(
                self._create_connection, endpoint.socket_path
            )
            return connection
        if self.proxy is None:
            connected = await self._connect_host(endpoint.host, endpoint.port)
        else:
            connected = await self._connect_proxy(self.proxy)
        _, connection = await loop.create_connection(
            self._create_connection,
            sock=connected,
            ssl=self._tls,
            server_hostname=self._server_name,
        )
        return connection

    async def _connect_host(self, host: str, port: int) -> socket.socket:
        address = self.endpoint.address
        addresses = [address] if address else await self._lookup_addresses(host)
        return await self._connect_socket(addresses, port)

    async def _connect_proxy(self, proxy: Proxy) -> socket.socket:
        """Connect to a proxy, and for TLS through it to the server. Raises OSError or UpstreamError."""
        try:
            connected = await self._connect_host(proxy.host, proxy.port)
        except OSError as error:
            message = f"proxy {proxy.name}: {error.strerror or error}"
            raise OSError(error.errno, message) from error
        if self.endpoint.tls:
            try:
                await open_tunnel(connected, proxy, self.endpoint)
            except BaseException:
                connected.close()
                raise
        return connected

    async def _lookup_addresses(self, host: str) -> tuple[str, ...]:
        """Resolve the name of the replica or its proxy. Concurrent callers share one lookup. Raises OSError."""
        if self._pending_lookup is None:
            self._pending_lookup = asyncio.ensure_future(resolve_addresses(host))
            self._pending_lookup.add_done_callback(self._on_lookup_done)
        return await asyncio.shield(self._pending_lookup)

    def _on_lookup_done(self, lookup: asyncio.Future[tuple[str, ...]]) -> None:
        self._pending_lookup = None
        if not lookup.cancelled():
            lookup.exception()  # marks the exception as retrieved, since all callers may be cancelled

    async def _connect_socket(self, addresses: Sequence[str], port: int) -> socket.socket:
        """Connect to the first address that answers. Each is tried shortly after the one before. Raises OSError."""
        if not addresses:
            raise OSError("the name has no address")
        unresponsive, tried = self._unresponsive_addresses, dict[socket.socket, str]()
        unresponsive.intersection_update(addresses)

        def create_socket(info: AddrInfoType) -> socket.socket:
            created = socket.socket(info[0], info[1], info[2])
            tried[created] = str(info[4][0])
            return created

        ordered = sorted(addresses, key=unresponsive.__contains__)
        try:
            connected = await start_connection(
                [_build_address_info(address, port) for address in ordered],
                happy_eyeballs_delay=CONNECTION_ATTEMPT_DELAY_S,
                interleave=0,  # keeps the order
                socket_factory=create_socket,
            )
        except (OSError, RuntimeError) as error:  # uvloop raises both; the texts repeat the address
            code = getattr(error, "errno", None)
            raise OSError(code, os.strerror(code) if code else str(error)) from error
        unresponsive.discard(tried.pop(connected))
        unresponsive.update(tried.values())
        return connected

    def close(self) -> None:
        """Close idle connections now, and the others when their responses are complete."""
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


def _build_address_info(address: str, port: int) -> AddrInfoType:
    """Return the entry of `getaddrinfo` for a numeric address, which needs no lookup."""
    return socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    )[0]
