"""Handover of listening sockets to the process that replaces this one, so that no connection is refused or reset.

Both processes accept on the same sockets until the old one stops. A connection that waits in the kernel's queue is
accepted by either. With two sockets on one port (SO_REUSEPORT), the system would reset what waits at the old one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from argosy.http_server.acceptor import UnixListenSocket, close_listen_socket, short_socket_path

HANDOVER_TIMEOUT_S = 2.0
"""Time in which the old process must hand over its socket. One that is stopped does not."""
MAX_WAITING_SUCCESSORS = 8
MAX_SOCKETS = 8
"""Sockets that a process may hand over: one for each address that it listens on."""


class SocketHandover:
    """Gives listening sockets to each process that connects to a Unix socket. Not thread-safe.

    Only this user may connect, and nothing is read, so a connection costs one message. It replaces the offer of the
    process from which the sockets were received.

    Raises:
        OSError: The path cannot be bound.
    """

    def __init__(self, path: Path, listen_sockets: Sequence[socket.socket]) -> None:
        self._listen_sockets = listen_sockets
        self._offer = UnixListenSocket(path, replaces=True, mode=0o600)
        self._offer.listen(MAX_WAITING_SUCCESSORS)
        self._offer.settimeout(0)
        asyncio.get_running_loop().add_reader(self._offer, self._on_successor)

    def close(self) -> None:
        """End the offer, unless a successor has replaced it."""
        if self._offer.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._offer)
            close_listen_socket(self._offer)

    def _on_successor(self) -> None:
        with contextlib.suppress(OSError):  # the successor has gone
            successor, _ = self._offer.accept()
            with successor:
                socket.send_fds(
                    successor, [b"\0"], [each.fileno() for each in self._listen_sockets]
                )


def receive_listen_sockets(path: Path) -> list[socket.socket]:
    """Return the listening sockets that the process at a path hands over."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as predecessor:
        predecessor.settimeout(HANDOVER_TIMEOUT_S)
        try:
            with short_socket_path(path) as short_path:
                predecessor.connect(short_path)
            _, descriptors, _, _ = socket.recv_fds(predecessor, 1, MAX_SOCKETS)
        except OSError:
            return []
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)  # noqa: FBT003 - positional-only in the library
    return [socket.socket(fileno=descriptor) for descriptor in descriptors]
