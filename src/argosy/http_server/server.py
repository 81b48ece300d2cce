"""Listening: a socket bound with the remedy in its errors, and uvicorn without its signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import uvicorn

from argosy.http_server.acceptor import Acceptor, UnixListenSocket, close_listen_socket
from argosy.http_server.connection import HttpConnection
from argosy.http_server.deadlines import Deadlines
from argosy.http_server.http_exchange import AsgiApp
from argosy.http_server.server_state import HttpServerState
from argosy.http_server.tls import CertificateWatcher
from argosy.process import max_clients

BACKLOG = 2048
"""Connections that wait to be accepted: who comes before anybody accepts waits too."""
NOTSENT_LOWAT_BYTES = 128 * 1024
"""What the kernel keeps for a client that takes nothing, beside what is on its way.

It would be megabytes for each, and one that takes less than a third of that would not be seen to take anything.
"""
IDLE_TIMEOUT_S = 75.0
"""An idle connection is closed after this long; longer than most clients keep theirs."""
HEADER_TIMEOUT_S = 30
"""A connection whose request line and headers take longer is dropped."""
HALF_CLOSE_CHECK_INTERVAL_S = 0.05
"""How often it is looked whether a client that has closed its sending direction is there, while it waits."""
DEAD_PEER_TIMEOUT_S = 60
"""A client whose machine answers no packet for so long is gone."""
DRAIN_POLL_INTERVAL_S = 0.02
"""How often it is looked whether connections are left."""
SHUTDOWN_GRACE_S = 5
"""How long connections may take to close once everything has been answered,"""
FORCED_SHUTDOWN_GRACE_S = 0.1
"""and where nobody waits for answers."""
DATE_HEADER_INTERVAL_S = 1
"""How often the date that answers bear is renewed."""
_PORT_ERRNOS = frozenset({errno.EADDRINUSE, errno.EACCES})
"""Errors of a port that others have, or that one may not have; others are those of an address."""


class HttpServer(uvicorn.Server):
    """uvicorn on our connections, without its signal handlers: what a signal means its owner decides.

    It ends by `stop`, and as soon as all have left, where uvicorn looks every 0.1 s.
    """

    def __init__(
        self,
        app: AsgiApp,
        certificates: CertificateWatcher | None = None,
        *,
        descriptors_per_client: int = 1,
        max_connection_age_s: float = math.inf,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        dead_peer_timeout_s: float = DEAD_PEER_TIMEOUT_S,
    ) -> None:
        """`descriptors`: how many a client takes; `age_s`: how long a connection may be kept for more requests.

        One that gets no request for `idle_s` is closed, or whose client takes nothing of a whole answer for so long.
        A client that answers no packet, or takes nothing of a stream, for `vanished_s` is gone.
        """
        self._descriptors_per_client = descriptors_per_client
        self._idle_timeout_s = idle_timeout_s
        self._dead_peer_timeout_s = dead_peer_timeout_s
        self._stop_requested = asyncio.Event()
        shown = None if certificates is None else certificates.context
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",  # what our connections parse with
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # whom to believe is a setting of ours
                ssl_context_factory=None if shown is None else lambda *_: shown,
            )
        )
        self.server_state = self._state = HttpServerState(max_connection_age_s)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept on `sockets`, as many at a time as wait."""
        heads = Deadlines(HEADER_TIMEOUT_S, HttpConnection.on_header_timeout)
        idle = Deadlines(self._idle_timeout_s, HttpConnection.on_idle_timeout)
        quiet = Deadlines(HALF_CLOSE_CHECK_INTERVAL_S, HttpConnection.probe_half_closed)
        make = partial(HttpConnection, heads, idle, quiet, self.config.loaded_app, self._state)
        clients, most = self._state.connections, max_clients(self._descriptors_per_client)
        self.servers = [
            Acceptor(each, make, self.config.ssl, clients, most, self._dead_peer_timeout_s)  # type: ignore[misc] # they do as asyncio's
            for each in sockets or ()
        ]
        self.started = True

    def stop(self) -> None:
        """End: `serve` returns once all has been answered, or soon after where `force_exit` says not to wait."""
        self.should_exit = True
        self._stop_requested.set()

    async def main_loop(self) -> None:
        """Let answers bear the date, until it is to end."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_HEADER_INTERVAL_S):
                    await self._stop_requested.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nobody any more; what has not been answered in time is cancelled, and has ended."""
        del sockets  # the servers' own
        for server in self.servers:
            server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(
                FORCED_SHUTDOWN_GRACE_S if self.force_exit else SHUTDOWN_GRACE_S
            ):
                await self._wait_until_closed()
        late = list(self._state.tasks)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _wait_until_closed(self) -> None:
        for server in self.servers:
            await server.wait_closed()
        await self._state.all_closed.wait()
        while self._state.tasks:
            await asyncio.wait(self._state.tasks)

    async def drain(self, idle_timeout_s: float) -> None:
        """Accept nobody any more, and let connections end with the next answer that can still say so.

        Those that get no request for `idle_s` are closed: not at once, for one may be on its way.
        """
        leaving = self._state.drain_deadlines = Deadlines(idle_timeout_s, HttpConnection.shutdown)
        for server in self.servers:
            server.close()
        for connection in self._state.connections:
            connection.retire()  # type: ignore[union-attr] # it is one of ours
        while leaving or self._state.tasks:  # noqa: ASYNC110 - uvicorn's set tells nobody
            await asyncio.sleep(DRAIN_POLL_INTERVAL_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


@contextlib.contextmanager
def listening_socket(host: str, port: int, uds: str | None) -> Iterator[socket.socket]:
    """A socket at the path `uds`, which vanishes with it, else at host and port. Raises OSError, with the remedy."""
    bound = bind_tcp(host, port) if uds is None else bind_unix(Path(uds))
    try:
        yield bound
    finally:
        close_listen_socket(bound)


def bind_tcp(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises OSError (with the remedy) when it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (")[0]  # the address is said there, too
        other = "--port" if error.errno in _PORT_ERRNOS else "--host"
        message = f"cannot listen on {host}:{port} ({reason}); choose another {other}"
        raise OSError(error.errno, message) from error
    # Not every system knows it. Clients' sockets have it of this one.
    with contextlib.suppress(OSError):
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOTSENT_LOWAT_BYTES)
    return bound


def bind_unix(path: Path) -> socket.socket:
    """A socket at `path`, where one that nobody listens on any more is replaced. Raises OSError."""
    try:
        if path.is_socket() and not _has_listener(path):
            path.unlink()
        unix = UnixListenSocket(path)
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
    """Where it can be reached: `http://host:port`, or `unix:` and the path."""
    if listen_socket.family == socket.AF_UNIX:
        return f"unix:{listen_socket.getsockname()}"
    host, port = listen_socket.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _has_listener(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) != errno.ECONNREFUSED
