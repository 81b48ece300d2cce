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

from argosy.http_server.acceptor import Acceptor, UnixSocket, leave
from argosy.http_server.connection import Connection
from argosy.http_server.deadlines import Deadlines
from argosy.http_server.http_exchange import App
from argosy.http_server.server_state import State
from argosy.http_server.tls import Certificates
from argosy.process import most_clients

BACKLOG = 2048
"""Connections that wait to be accepted: who comes before anybody accepts waits too."""
UNSENT_BYTES = 128 * 1024
"""What the kernel keeps for a client that takes nothing, beside what is on its way.

It would be megabytes for each, and one that takes less than a third of that would not be seen to take anything.
"""
IDLE_S = 75.0
"""An idle connection is closed after this long; longer than most clients keep theirs."""
HEADER_TIMEOUT_S = 30
"""A connection whose request line and headers take longer is dropped."""
QUIET_S = 0.05
"""How often it is looked whether a client that has closed its sending direction is there, while it waits."""
VANISHED_S = 60
"""A client whose machine answers no packet for so long is gone."""
LOOK_S = 0.02
"""How often it is looked whether connections are left."""
GOODBYE_S = 5
"""How long connections may take to close once everything has been answered,"""
FORCED_S = 0.1
"""and where nobody waits for answers."""
DATE_S = 1
"""How often the date that answers bear is renewed."""
_PORTS = frozenset({errno.EADDRINUSE, errno.EACCES})
"""Errors of a port that others have, or that one may not have; others are those of an address."""


class Listener(uvicorn.Server):
    """uvicorn on our connections, without its signal handlers: what a signal means its owner decides.

    It ends by `stop`, and as soon as all have left, where uvicorn looks every 0.1 s.
    """

    def __init__(
        self,
        app: App,
        certificates: Certificates | None = None,
        *,
        descriptors: int = 1,
        age_s: float = math.inf,
        idle_s: float = IDLE_S,
        vanished_s: float = VANISHED_S,
    ) -> None:
        """`descriptors`: how many a client takes; `age_s`: how long a connection may be kept for more requests.

        One that gets no request for `idle_s` is closed, or whose client takes nothing of a whole answer for so long.
        A client that answers no packet, or takes nothing of a stream, for `vanished_s` is gone.
        """
        self._descriptors = descriptors
        self._idle_s = idle_s
        self._vanished_s = vanished_s
        self._stopped = asyncio.Event()
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
        self.server_state = self._state = State(age_s)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept on `sockets`, as many at a time as wait."""
        heads = Deadlines(HEADER_TIMEOUT_S, Connection.late)
        idle = Deadlines(self._idle_s, Connection.leave)
        quiet = Deadlines(QUIET_S, Connection.look_after)
        make = partial(Connection, heads, idle, quiet, self.config.loaded_app, self._state)
        clients, most = self._state.connections, most_clients(self._descriptors)
        self.servers = [
            Acceptor(each, make, self.config.ssl, clients, most, self._vanished_s)  # type: ignore[misc] # they do as asyncio's
            for each in sockets or ()
        ]
        self.started = True

    def stop(self) -> None:
        """End: `serve` returns once all has been answered, or soon after where `force_exit` says not to wait."""
        self.should_exit = True
        self._stopped.set()

    async def main_loop(self) -> None:
        """Let answers bear the date, until it is to end."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_S):
                    await self._stopped.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nobody any more; what has not been answered in time is cancelled, and has ended."""
        del sockets  # the servers' own
        for server in self.servers:
            server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FORCED_S if self.force_exit else GOODBYE_S):
                await self._all_left()
        late = list(self._state.tasks)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _all_left(self) -> None:
        for server in self.servers:
            await server.wait_closed()
        await self._state.deserted.wait()
        while self._state.tasks:
            await asyncio.wait(self._state.tasks)

    async def retire(self, idle_s: float) -> None:
        """Accept nobody any more, and let connections end with the next answer that can still say so.

        Those that get no request for `idle_s` are closed: not at once, for one may be on its way.
        """
        leaving = self._state.leaving = Deadlines(idle_s, Connection.shutdown)
        for server in self.servers:
            server.close()
        for connection in self._state.connections:
            connection.retire()  # type: ignore[union-attr] # it is one of ours
        while leaving or self._state.tasks:  # noqa: ASYNC110 - uvicorn's set tells nobody
            await asyncio.sleep(LOOK_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


@contextlib.contextmanager
def listening_socket(host: str, port: int, uds: str | None) -> Iterator[socket.socket]:
    """A socket at the path `uds`, which vanishes with it, else at host and port. Raises OSError, with the remedy."""
    bound = bind(host, port) if uds is None else bind_unix(Path(uds))
    try:
        yield bound
    finally:
        leave(bound)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises OSError (with the remedy) when it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (")[0]  # the address is said there, too
        other = "--port" if error.errno in _PORTS else "--host"
        message = f"cannot listen on {host}:{port} ({reason}); choose another {other}"
        raise OSError(error.errno, message) from error
    # Not every system knows it. Clients' sockets have it of this one.
    with contextlib.suppress(OSError):
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    return bound


def bind_unix(path: Path) -> socket.socket:
    """A socket at `path`, where one that nobody listens on any more is replaced. Raises OSError."""
    try:
        if path.is_socket() and not _somebody_listens(path):
            path.unlink()
        unix = UnixSocket(path)
        try:
            unix.listen(BACKLOG)
        except OSError:
            leave(unix)
            raise
    except OSError as error:
        message = f"cannot listen on {path} ({error.strerror or error}); choose another path (uds)"
        raise OSError(error.errno, message) from error
    return unix


def url_of(listening: socket.socket, scheme: str = "http") -> str:
    """Where it can be reached: `http://host:port`, or `unix:` and the path."""
    if listening.family == socket.AF_UNIX:
        return f"unix:{listening.getsockname()}"
    host, port = listening.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _somebody_listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) != errno.ECONNREFUSED
