"""Connection acceptor that accepts up to 32 waiting connections per event loop turn, where libuv accepts one."""

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
"""Connections accepted per event loop turn, so that open connections are served in between."""
WRITE_HIGH_WATER_BYTES = 16 * 1024
"""Write buffer size in bytes above which a connection is backpressured, not counting the kernel's send buffer."""
HANDSHAKE_GRACE_S = 0.1
"""Time that unfinished TLS handshakes get when the server closes."""
ACCEPT_RETRY_INTERVAL_S = 0.5
"""Pause in accepting after the process has run out of descriptors or reached its connection limit."""

log = logging.getLogger("argosy.http_server")


class UnixListenSocket(socket.socket):
    """Unix socket bound to a path, which another process may replace later.

    Raises:
        OSError: The path cannot be bound.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.bind(str(path))
            self._path, self._file_id = path, _file_identity(path)
        except OSError:
            self.close()
            raise

    def remove_file(self) -> None:
        """Remove the socket file, unless another process has replaced the file."""
        if _file_identity(self._path) == self._file_id:
            self._path.unlink(missing_ok=True)


def close_listen_socket(listen_socket: socket.socket) -> None:
    """Stop listening, and remove a Unix socket's file first, since a successor may bind the path after the close."""
    if listen_socket.fileno() >= 0 and isinstance(listen_socket, UnixListenSocket):
        listen_socket.remove_file()
    listen_socket.close()


def _file_identity(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_dev, found.st_ino
    return None


class Acceptor:
    """Accepts connections on one socket, in place of an asyncio server. uvicorn uses only `close` and `wait_closed`.

    A busy loop has few turns per second. With one accepted connection per turn, clients would wait for seconds.

    Accepting pauses at `max_connections` open connections. A connection closes if its peer acknowledges no packet or
    reads no data for `dead_peer_timeout_s`.
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
        """Accept the connections that are already waiting, then close the socket so that new ones are refused."""
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        if self._listen_socket.fileno() >= 0:
            self._loop.remove_reader(self._listen_socket)
            with contextlib.suppress(OSError):  # out of descriptors: drop the remaining connections
                while self._accept_one():
                    pass
            close_listen_socket(self._listen_socket)

    async def wait_closed(self) -> None:
        """Wait until the accepted connections are open, or for `HANDSHAKE_GRACE_S` at most."""
        handshakes = asyncio.gather(*self._handshakes, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HANDSHAKE_GRACE_S):
                await handshakes

    def _on_readable(self) -> None:
        try:
            for _ in range(MAX_ACCEPTS_PER_TURN):
                if not self._accept_one():
                    return
        except OSError as error:
            self._pause_accepting(str(error.strerror))

    def _accept_one(self) -> bool:
        """Accept one waiting connection and return whether one was waiting.

        Raises:
            OSError: The connection limit is reached or the process is out of descriptors.
        """
        if len(self._connections) + len(self._handshakes) >= self._max_connections:
            raise OSError(errno.EMFILE, "the connection limit is reached")
        try:
            accepted, _ = self._listen_socket.accept()
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in RESOURCE_EXHAUSTED_ERRNOS:
                raise
            return True  # the client disconnected before the accept
        handshake = self._loop.create_task(self._open_connection(accepted))
        self._handshakes.add(handshake)
        handshake.add_done_callback(self._handshakes.discard)
        return True

    def _pause_accepting(self, reason: str) -> None:
        """Stop accepting for `ACCEPT_RETRY_INTERVAL_S`, since connections may close in the meantime."""
        log.error("connections cannot be accepted (%s); raise the limit on open files", reason)
        self._loop.remove_reader(self._listen_socket)
        self._retry_timer = self._loop.call_later(
            ACCEPT_RETRY_INTERVAL_S, self._loop.add_reader, self._listen_socket, self._on_readable
        )

    async def _open_connection(self, client_socket: socket.socket) -> None:
        transport: asyncio.Transport | None = None
        try:
            if client_socket.family != socket.AF_UNIX:
                enable_tcp_keepalive(client_socket, self._dead_peer_timeout_s)
            transport, _ = await self._loop.connect_accepted_socket(
                self._protocol_factory, client_socket, ssl=self._tls
            )
            transport.set_write_buffer_limits(WRITE_HIGH_WATER_BYTES)
        except OSError as error:  # TLS handshake failed, or the client disconnected
            log.debug("connection could not be opened: %s", error)
        finally:
            if transport is None:
                client_socket.close()
