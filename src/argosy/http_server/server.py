"""HTTP server: accepts connections, drains and shuts down; with its listening sockets and its garbage collection."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from email.utils import formatdate
from functools import partial
from pathlib import Path
from ssl import SSLContext

from argosy.http_server.acceptor import (
    Acceptor,
    UnixListenSocket,
    close_listen_socket,
    short_socket_path,
)
from argosy.http_server.connection import HttpConnection, HttpConnections
from argosy.http_server.connection_limiter import (
    ConnectionLimiter,
    EvictionReason,
    IpAddress,
)
from argosy.http_server.deadlines import Deadlines
from argosy.http_server.handover import receive_listen_sockets
from argosy.http_server.http_request import RequestHandler
from argosy.http_server.tls import CertificateWatcher
from argosy.process import max_clients

BACKLOG = 2048
"""Connections that the kernel queues until the server accepts them."""
NOTSENT_LOWAT_BYTES = 128 * 1024
"""Unsent bytes that the kernel buffers per client, in addition to the bytes in flight.

The kernel's default is megabytes per client. The server would then see no progress of a client that reads less than a
third of that.
"""
IDLE_TIMEOUT_S = 75.0
"""Idle time after which a connection is closed, longer than most clients keep idle connections."""
DEAD_PEER_TIMEOUT_S = 60
"""Time in seconds after which a client whose machine acknowledges no packet is disconnected."""
DRAIN_POLL_INTERVAL_S = 0.02
"""Interval between checks whether connections are still open."""
SHUTDOWN_GRACE_S = 5
"""Time in seconds that connections get to close after all requests are answered."""
FORCED_SHUTDOWN_GRACE_S = 0.1
"""The same if the shutdown is forced and does not wait for responses."""
DATE_HEADER_INTERVAL_S = 1
"""Interval in seconds between updates of the Date header."""
_LOOPBACK, _ANY = ("127.0.0.1", "::1"), ("0.0.0.0", "::")  # noqa: S104 - only if the settings say so
_SEVERAL_ADDRESSES = {"localhost": _LOOPBACK, "::": _ANY, "": _ANY}
MAX_PORT_RETRIES = 8
"""How often another free port is tried if the one that is free at the first address is in use at the second."""
_MISSING_ERRNOS = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
"""Errors of an address family that the machine does not have."""
_PORT_ERRNOS = frozenset({errno.EADDRINUSE, errno.EACCES})
"""Errors caused by the port: in use, or not permitted. Other errors are caused by the address."""


class HttpServer:
    """HTTP server that passes each request to `handle_request`. It installs no signal handlers; its owner calls `stop`.

    `descriptors_per_client` is the number of file descriptors that one client needs, which bounds the number of
    clients. `max_connections_per_address` bounds those of one address, see `ConnectionLimiter`. A connection older than
    `max_connection_age_s` closes with its next response. A connection without a request closes after `idle_timeout_s`,
    and so does a client that reads nothing of a complete response for that time. A client is disconnected if it
    acknowledges no packet, or reads nothing of a stream, for `dead_peer_timeout_s`.
    """

    def __init__(
        self,
        handle_request: RequestHandler,
        certificates: CertificateWatcher | None = None,
        *,
        descriptors_per_client: int = 1,
        max_connections_per_address: int | None = None,
        is_trusted_proxy: Callable[[IpAddress], bool] = lambda _: False,
        on_connection_refused: Callable[[], object] = lambda: None,
        on_connection_evicted: Callable[[EvictionReason], object] = lambda _: None,
        max_connection_age_s: float = math.inf,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        dead_peer_timeout_s: float = DEAD_PEER_TIMEOUT_S,
    ) -> None:
        self._limiter = ConnectionLimiter(
            max_clients(descriptors_per_client),
            max_connections_per_address,
            is_trusted_proxy,
            on_connection_evicted,
            time.monotonic,
        )
        self._on_connection_refused = on_connection_refused
        self._dead_peer_timeout_s = dead_peer_timeout_s
        self._ssl_context = None if certificates is None else certificates.context
        self._acceptors: list[Acceptor] = []
        self._private_acceptors: list[Acceptor] = []
        self._stop_requested = asyncio.Event()
        self.connections = HttpConnections(handle_request, idle_timeout_s, max_connection_age_s)
        self.started = asyncio.Event()
        """Set once the server accepts connections."""
        self.force_exit = False
        """Whether the shutdown does not wait for responses."""

    @property
    def connection_count(self) -> int:
        """Number of open client connections, including unfinished TLS handshakes."""
        return len(self._limiter)

    async def serve(
        self, sockets: Iterable[socket.socket], private_sockets: Iterable[socket.socket] = ()
    ) -> None:
        """Accept connections on `sockets` until `stop` is called, then shut down.

        Private sockets are for processes of this user. They have no TLS, and accept connections also during a drain.
        """
        self._private_acceptors = [self._create_acceptor(each, None) for each in private_sockets]
        self.accept_on(sockets)
        self.started.set()
        await self._update_date_until_stopped()
        await self._shut_down()

    def stop(self) -> None:
        """Stop the server. `serve` returns when all requests are answered, or shortly after if `force_exit` is set."""
        self._stop_requested.set()

    def stop_accepting(self) -> None:
        """Refuse new connections. Open ones continue."""
        for acceptor in self._acceptors:
            acceptor.close()

    def accept_on(self, sockets: Iterable[socket.socket]) -> None:
        """Accept connections on further sockets while the server runs."""
        self._acceptors += [self._create_acceptor(each, self._ssl_context) for each in sockets]

    def _create_acceptor(
        self, listen_socket: socket.socket, ssl_context: SSLContext | None
    ) -> Acceptor:
        return Acceptor(
            listen_socket,
            partial(HttpConnection, self.connections),
            ssl_context,
            self._limiter,
            self._on_connection_refused,
            self._dead_peer_timeout_s,
        )

    async def _update_date_until_stopped(self) -> None:
        """Update the Date header every second until the server stops."""
        while not self._stop_requested.is_set():
            self.connections.state.default_headers = [
                (b"date", formatdate(time.time(), usegmt=True).encode())
            ]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_HEADER_INTERVAL_S):
                    await self._stop_requested.wait()

    async def _shut_down(self) -> None:
        """Stop accepting connections, wait for the requests, and cancel those that do not finish in time."""
        self.stop_accepting()
        for acceptor in self._private_acceptors:
            acceptor.close()
        for connection in list(self.connections.open):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(
                FORCED_SHUTDOWN_GRACE_S if self.force_exit else SHUTDOWN_GRACE_S
            ):
                await self._wait_until_closed()
        unfinished = list(self.connections.state.tasks)
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)

    async def _wait_until_closed(self) -> None:
        for acceptor in (*self._acceptors, *self._private_acceptors):
            await acceptor.wait_closed()
        await self.connections.all_closed.wait()
        while self.connections.state.tasks:
            await asyncio.wait(self.connections.state.tasks)

    async def drain(self, idle_timeout_s: float) -> None:
        """Stop accepting connections and close each connection with its next response.

        A response whose head is already sent cannot announce the close, so the next one does.

        Args:
            idle_timeout_s: Time after which connections without a request are closed. They are not closed at once,
                since a request may be in flight.
        """
        drain_deadlines = Deadlines(idle_timeout_s, HttpConnection.shutdown)
        self.connections.drain_deadlines = drain_deadlines
        self.stop_accepting()
        for connection in self.connections.open:
            connection.close_gracefully()
        while (  # noqa: ASYNC110 - the deadlines have no event
            drain_deadlines
            or self.connections.state.tasks
            or any(acceptor.is_opening for acceptor in self._acceptors)  # it may bring a request
        ):
            await asyncio.sleep(DRAIN_POLL_INTERVAL_S)


@contextlib.contextmanager
def listening_sockets(
    host: str, port: int, uds: str | None, handover: Path | None = None
) -> Iterator[list[socket.socket]]:
    """Open a listening socket at the path `uds` if set, else at all addresses of a host, and close them on exit.

    The file of a Unix socket is removed on exit.

    Args:
        host: Host name or address, see `listen_addresses`.
        port: Port; 0 selects a free one.
        uds: Path of a Unix socket to listen on instead.
        handover: Where a process that listens there hands over its sockets (see `SocketHandover`). A path `uds` is
            taken from that process.

    Raises:
        OSError: No socket can be bound, or one of them only to another port; the message contains the remedy.
    """
    if uds is not None:
        bound = [bind_unix(Path(uds), replaces=handover is not None and _has_listener(handover))]
    else:
        received = [] if handover is None else receive_listen_sockets(handover)
        bound = bind_host(host, port, received)
    try:
        yield bound
    finally:
        for each in bound:
            close_listen_socket(each)


def listen_addresses(host: str) -> tuple[str, ...]:
    """Return what to listen on for a host: both loopback addresses for `localhost`, both families for `::`.

    IPv6 and IPv4 get sockets of their own, so that the addresses of IPv4 clients look the same in all cases.
    """
    return _SEVERAL_ADDRESSES.get(host, (host,))


def bind_host(host: str, port: int, received: Sequence[socket.socket] = ()) -> list[socket.socket]:
    """Return listening sockets with one port for all addresses of a host, without those that the machine lacks.

    Args:
        host: Host name or address, see `listen_addresses`.
        port: Port; 0 selects a free one.
        received: Listening sockets of another process. Those of the same address and port are used, the others closed.

    Raises:
        OSError: An address cannot be bound; the message contains the remedy.
    """
    addresses = listen_addresses(host)
    bound: dict[str, socket.socket] = {}
    for each in received:
        address = next((one for one in addresses if _has_address(each, one, port)), None)
        if address is None:
            each.close()
        else:
            bound[address] = each
    missing: OSError | None = None
    retries = MAX_PORT_RETRIES if port == 0 and len(addresses) > 1 else 0
    while True:
        try:
            for address in addresses:
                if address in bound:
                    continue
                first = next(iter(bound.values()), None)
                try:
                    bound[address] = bind_tcp(address, first.getsockname()[1] if first else port)
                except OSError as error:
                    if len(addresses) == 1 or error.errno not in _MISSING_ERRNOS:
                        raise
                    missing = error
            if missing is not None and not bound:
                raise missing
            return [bound[address] for address in addresses if address in bound]
        except OSError:
            for each in bound.values():
                each.close()
            bound.clear()
            if retries == 0:
                raise
            retries -= 1


def bind_tcp(host: str, port: int) -> socket.socket:
    """Return a TCP listening socket for one address. Port 0 selects a free port.

    Raises:
        OSError: The address cannot be bound; the message contains the remedy.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (")[0]  # the rest repeats the address
        option = "--port" if error.errno in _PORT_ERRNOS else "--host"
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        message = f"cannot listen on {shown} ({reason}); choose another {option}"
        raise OSError(error.errno, message) from error
    # Accepted sockets inherit the options. Not every system supports the second one.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # which asyncio's loop leaves out
    with contextlib.suppress(OSError):
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOTSENT_LOWAT_BYTES)
    return bound


def _has_address(listen_socket: socket.socket, host: str, port: int) -> bool:
    """Return whether a socket is what `bind_tcp` would return for an address."""
    if listen_socket.family == socket.AF_UNIX:
        return False
    try:
        found = socket.getaddrinfo(
            host or None,
            port,
            socket.AF_INET6 if ":" in host else socket.AF_INET,
            socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )
    except OSError:
        return False
    return listen_socket.getsockname()[:2] in [address[:2] for *_, address in found]


def bind_unix(path: Path, *, replaces: bool = False) -> socket.socket:
    """Return a Unix listening socket at `path`. A socket file there without a listener is replaced.

    With `replaces`, one with a listener is replaced too.

    Raises:
        OSError: The path cannot be bound; the message contains the remedy.
    """
    try:
        if not replaces and path.is_socket() and not _has_listener(path):
            path.unlink()
        unix = UnixListenSocket(path, replaces=replaces)
        try:
            unix.listen(BACKLOG)
        except OSError:
            close_listen_socket(unix)
            raise
    except OSError as error:
        message = f"cannot listen on {path} ({error.strerror or error}); choose another path (uds)"
        raise OSError(error.errno, message) from error
    return unix


def listen_url(listen_socket: socket.socket, scheme: str = "http") -> str:
    """Return the socket's URL: `http://host:port`, or `unix:` and the path."""
    if listen_socket.family == socket.AF_UNIX:
        return f"unix:{listen_socket.getsockname()}"
    host, port = listen_socket.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _has_listener(path: Path) -> bool:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe,
        short_socket_path(path) as short_path,
    ):
        return probe.connect_ex(short_path) not in {errno.ECONNREFUSED, errno.ENOENT}


GC_GEN0_THRESHOLD = 20_000
"""Allocations between two collections of the youngest generation. Python's default is 700."""


def tune_gc() -> None:
    """Freeze all existing objects and make garbage collection rarer, since requests create hardly any cycles.

    Call this function once, when a server is ready. Without it, each full collection scans all imported modules and
    occasionally stalls every stream for tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_GEN0_THRESHOLD, 10, 10)
