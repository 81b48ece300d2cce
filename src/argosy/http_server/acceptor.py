"""Accepting: all connections that wait are taken in one turn of the event loop, where libuv takes one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Sized
from pathlib import Path

from argosy.process import RESOURCE_EXHAUSTED_ERRNOS, enable_tcp_keepalive

MAX_ACCEPTS_PER_TURN = 32
"""Connections that are accepted before those that are there get their turn again."""
WRITE_HIGH_WATER_BYTES = 16 * 1024
"""A client for which so much waits here, beside what the kernel keeps for it, is behind: it is sent no more for now."""
HANDSHAKE_GRACE_S = 0.1
"""How long who is accepted last may take to agree upon TLS."""
ACCEPT_RETRY_INTERVAL_S = 0.5
"""How long nobody is accepted when the process has no room for one more."""

log = logging.getLogger("argosy.http_server")


class UnixListenSocket(socket.socket):
    """A Unix socket bound to a path, where somebody else may have put another since."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.bind(str(path))
            self._path, self._file_id = path, _file_identity(path)
        except OSError:
            self.close()
            raise

    def remove_file(self) -> None:
        """Remove its file, if it is still there."""
        if _file_identity(self._path) == self._file_id:
            self._path.unlink(missing_ok=True)


def close_listen_socket(listen_socket: socket.socket) -> None:
    """Listen no more. A Unix socket's path goes first: once nobody listens there, somebody else may."""
    if listen_socket.fileno() >= 0 and isinstance(listen_socket, UnixListenSocket):
        listen_socket.remove_file()
    listen_socket.close()


def _file_identity(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_dev, found.st_ino
    return None


class Acceptor:
    """What a server of asyncio's is, as far as uvicorn goes.

    A loop that is busy has few turns a second: with one connection each, clients would wait for seconds to get in.
    """

    def __init__(
        self,
        listen_socket: socket.socket,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        tls: ssl.SSLContext | None,
        connections: Sized,
        max_connections: int,
        dead_peer_timeout_s: float,
    ) -> None:
        """Accept on `listening` from now on, until `close` closes it, while there are fewer than `most` clients.

        One that answers no packet, or takes nothing, for `vanished_s` is gone.
        """
        self._loop = asyncio.get_running_loop()
        self._listen_socket = listen_socket
        self._protocol_factory = protocol_factory
        self._tls = tls
        self._connections = connections
        self._max_connections = max_connections
        self._dead_peer_timeout_s = dead_peer_timeout_s
        self._handshakes: set[asyncio.Task[None]] = set()
        self._retry_timer: asyncio.TimerHandle | None = None
        listen_socket.settimeout(0)
        self._loop.add_reader(listen_socket, self._on_readable)

    def close(self) -> None:
        """Accept those that wait, and nobody any more: who connects from now on is refused, and does not wait."""
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        if self._listen_socket.fileno() >= 0:
            self._loop.remove_reader(self._listen_socket)
            with contextlib.suppress(OSError):  # there is no room for the others
                while self._accept_one():
                    pass
            close_listen_socket(self._listen_socket)

    async def wait_closed(self) -> None:
        """Until what has been accepted is open; what takes longer than TLS should, ends."""
        opening = asyncio.gather(*self._handshakes, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HANDSHAKE_GRACE_S):
                await opening

    def _on_readable(self) -> None:
        try:
            for _ in range(MAX_ACCEPTS_PER_TURN):
                if not self._accept_one():
                    return
        except OSError as error:
            self._pause_accepting(str(error.strerror))

    def _accept_one(self) -> bool:
        """Accept one that waits; whether there was one. Raises OSError when there is no room for it."""
        if len(self._connections) + len(self._handshakes) >= self._max_connections:
            raise OSError(errno.EMFILE, "there is room for no more clients")
        try:
            accepted, _ = self._listen_socket.accept()
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in RESOURCE_EXHAUSTED_ERRNOS:
                raise
            return True  # it has gone again
        opening = self._loop.create_task(self._open_connection(accepted))
        self._handshakes.add(opening)
        opening.add_done_callback(self._handshakes.discard)
        return True

    def _pause_accepting(self, reason: str) -> None:
        """Let those that wait do so: perhaps somebody leaves."""
        log.error("no connection can be accepted (%s); raise the limit on open files", reason)
        self._loop.remove_reader(self._listen_socket)
        self._retry_timer = self._loop.call_later(
            ACCEPT_RETRY_INTERVAL_S, self._loop.add_reader, self._listen_socket, self._on_readable
        )

    async def _open_connection(self, client_socket: socket.socket) -> None:
        opened: asyncio.Transport | None = None
        try:
            if client_socket.family != socket.AF_UNIX:
                enable_tcp_keepalive(client_socket, self._dead_peer_timeout_s)
            opened, _ = await self._loop.connect_accepted_socket(
                self._protocol_factory, client_socket, ssl=self._tls
            )
            opened.set_write_buffer_limits(WRITE_HIGH_WATER_BYTES)
        except OSError as error:  # a client that speaks no TLS, or has gone
            log.debug("a connection was not opened: %s", error)
        finally:
            if opened is None:
                client_socket.close()
