"""Connection acceptor that accepts up to 32 waiting connections per event loop turn, where libuv accepts one.

If connections or descriptors run short, it closes idle connections for new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog

from argosy.http_server.connection_limiter import ConnectionLimiter, ConnectionSlot
from argosy.http_server.error_responses import render_error_response
from argosy.process import (
    MAX_SOCKET_PATH_BYTES,
    RESOURCE_EXHAUSTED_ERRNOS,
    enable_tcp_keepalive,
)
from argosy.protocol import ApiError

MAX_ACCEPTS_PER_TURN = 32
"""Connections accepted per event loop turn, so that open connections are served in between."""
WRITE_HIGH_WATER_BYTES = 16 * 1024
"""Write buffer size in bytes above which a connection is backpressured, not counting the kernel's send buffer."""
HANDSHAKE_TIMEOUT_S = 30.0
"""Time in which a client must complete its TLS handshake."""
HANDSHAKE_GRACE_S = 0.1
"""Time that unfinished TLS handshakes get when the server closes."""
ACCEPT_RETRY_INTERVAL_S = 0.5
"""Pause in accepting after the process has run out of descriptors or reached its connection limit."""
MAX_DISCARDED_BYTES = 64 * 1024
"""Maximum received bytes that are discarded when a connection is refused."""
LOG_INTERVAL_S = 60.0
"""Shortest time between two log lines about the same limit."""
_TOO_MANY_CONNECTIONS = render_error_response(
    ApiError(
        429,
        "too_many_connections",
        "Your address has too many connections that run requests. Close some, or ask an administrator to raise "
        "max_connections_per_address.",
    )
)

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.http_server")


class UnixListenSocket(socket.socket):
    """Unix socket bound to a path, which another process may replace later.

    Args:
        path: Path of the socket's file.
        replaces: Whether it takes the path from the process that has bound it, which keeps its connections.
        mode: Permissions of the file; None for the usual ones.

    Raises:
        OSError: The path cannot be bound.
    """

    def __init__(self, path: Path, *, replaces: bool = False, mode: int | None = None) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        bound = path.with_name(f"{path.name}.{os.getpid()}") if replaces else path
        try:
            if replaces:
                bound.unlink(missing_ok=True)
            with short_socket_path(bound) as short_path:
                self.bind(short_path)
            if mode is not None:
                bound.chmod(mode)
            if replaces:
                bound.replace(path)
            self._path, self._file_id = path, _file_identity(path)
        except OSError:
            self.close()
            raise

    def remove_file(self) -> None:
        """Remove the socket file, unless another process has replaced the file."""
        if _file_identity(self._path) == self._file_id:
            self._path.unlink(missing_ok=True)


@contextlib.contextmanager
def short_socket_path(path: Path) -> Iterator[str]:
    """Provide a path to bind or to connect to, since the path of a Unix socket is limited to about 100 bytes.

    Raises:
        OSError: The folder cannot be opened.
    """
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES or sys.platform != "linux":
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


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
    """Accepts connections on one socket, in place of an asyncio server.

    A busy loop has few turns per second. With one accepted connection per turn, clients would wait for seconds.

    At the limit of `limiter` a new connection replaces an idle one. Accepting pauses while all connections run
    requests. A connection closes if its peer acknowledges no packet or reads no data for `dead_peer_timeout_s`.
    `on_refused` is called for each connection that its client's address may not have.
    """

    def __init__(
        self,
        listen_socket: socket.socket,
        protocol_factory: Callable[[ConnectionSlot], asyncio.BaseProtocol],
        tls: ssl.SSLContext | None,
        limiter: ConnectionLimiter,
        on_refused: Callable[[], object],
        dead_peer_timeout_s: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listen_socket = listen_socket
        self._protocol_factory = protocol_factory
        self._tls = tls
        self._limiter = limiter
        self._on_refused = on_refused
        self._dead_peer_timeout_s = dead_peer_timeout_s
        self._handshakes: set[asyncio.Task[None]] = set()
        self._retry_timer: asyncio.TimerHandle | None = None
        self._next_log_at: dict[str, float] = {}
        """Time at which the next line may be logged, by log event."""
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

    @property
    def is_opening(self) -> bool:
        """Whether an accepted connection is not open yet."""
        return bool(self._handshakes)

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
            # A descriptor of an evicted connection is free in the next turn, which tries again.
            if not (error.errno in RESOURCE_EXHAUSTED_ERRNOS and self._limiter.evict_idlest()):
                self._pause_accepting(str(error.strerror))

    def _accept_one(self) -> bool:
        """Accept one waiting connection and return whether one was waiting.

        Raises:
            OSError: All connections of the limit run requests, or the process is out of descriptors.
        """
        if not self._limiter.can_admit:
            raise OSError(errno.EMFILE, "the connection limit is reached")
        try:
            accepted, peer = self._listen_socket.accept()
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in RESOURCE_EXHAUSTED_ERRNOS:
                raise
            return True  # the client disconnected before the accept
        address = None if accepted.family == socket.AF_UNIX else peer[0]
        slot = self._limiter.admit(address)
        if slot is None:
            self._refuse(accepted, address)
            return True
        handshake = self._loop.create_task(self._open_connection(accepted, slot))
        slot.close_connection = handshake.cancel
        self._handshakes.add(handshake)
        handshake.add_done_callback(self._handshakes.discard)
        return True

    def _refuse(self, client_socket: socket.socket, address: str | None) -> None:
        """Close a connection that its client's address may not have, with an error response unless it needs TLS."""
        self._on_refused()
        if self._may_log("connections_refused"):
            log.warning("connections_refused", address=address)
        with client_socket, contextlib.suppress(OSError):
            client_socket.settimeout(0)
            if self._tls is None:
                client_socket.send(_TOO_MANY_CONNECTIONS)
                client_socket.shutdown(socket.SHUT_WR)
                # Unread data would turn the close into a reset, which discards the response.
                client_socket.recv(MAX_DISCARDED_BYTES)

    def _pause_accepting(self, reason: str) -> None:
        """Stop accepting for `ACCEPT_RETRY_INTERVAL_S`, since connections may close in the meantime."""
        if self._may_log("accepting_paused"):
            log.warning("accepting_paused", reason=reason, open_connections=len(self._limiter))
        self._loop.remove_reader(self._listen_socket)
        self._retry_timer = self._loop.call_later(
            ACCEPT_RETRY_INTERVAL_S, self._loop.add_reader, self._listen_socket, self._on_readable
        )

    def _may_log(self, event: str) -> bool:
        """Return whether an event was last logged at least `LOG_INTERVAL_S` ago, and record that it is logged now."""
        now = self._loop.time()
        is_due = now >= self._next_log_at.get(event, 0.0)
        if is_due:
            self._next_log_at[event] = now + LOG_INTERVAL_S
        return is_due

    async def _open_connection(self, client_socket: socket.socket, slot: ConnectionSlot) -> None:
        transport: asyncio.Transport | None = None
        try:
            if client_socket.family != socket.AF_UNIX:
                enable_tcp_keepalive(client_socket, self._dead_peer_timeout_s)
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: self._protocol_factory(slot),
                client_socket,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else HANDSHAKE_TIMEOUT_S,
            )
            transport.set_write_buffer_limits(WRITE_HIGH_WATER_BYTES)
        except OSError as error:  # TLS handshake failed, or the client disconnected
            log.debug("connection_not_opened", reason=str(error))
        finally:
            if transport is None:
                client_socket.close()
                slot.release()
