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

from argosy.process import NO_ROOM, have_watched

AT_ONCE = 32
"""Connections that are accepted before those that are there get their turn again."""
BEHIND_BYTES = 16 * 1024
"""A client for which so much waits here, beside what the kernel keeps for it, is behind: it is sent no more for now."""
OPENING_S = 0.1
"""How long who is accepted last may take to agree upon TLS."""
FULL_FOR_S = 0.5
"""How long nobody is accepted when the process has no room for one more."""

log = logging.getLogger("argosy.http_server")


class UnixSocket(socket.socket):
    """A Unix socket bound to a path, where somebody else may have put another since."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.bind(str(path))
            self._path, self._file = path, _file_at(path)
        except OSError:
            self.close()
            raise

    def remove(self) -> None:
        """Remove its file, if it is still there."""
        if _file_at(self._path) == self._file:
            self._path.unlink(missing_ok=True)


def leave(listening: socket.socket) -> None:
    """Listen no more. A Unix socket's path goes first: once nobody listens there, somebody else may."""
    if listening.fileno() >= 0 and isinstance(listening, UnixSocket):
        listening.remove()
    listening.close()


def _file_at(path: Path) -> tuple[int, int] | None:
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
        listening: socket.socket,
        make: Callable[[], asyncio.BaseProtocol],
        tls: ssl.SSLContext | None,
        clients: Sized,
        most: int,
        vanished_s: float,
    ) -> None:
        """Accept on `listening` from now on, until `close` closes it, while there are fewer than `most` clients.

        One that answers no packet, or takes nothing, for `vanished_s` is gone.
        """
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._make = make
        self._tls = tls
        self._clients = clients
        self._most = most
        self._vanished_s = vanished_s
        self._opening: set[asyncio.Task[None]] = set()
        self._again: asyncio.TimerHandle | None = None
        listening.settimeout(0)
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Accept those that wait, and nobody any more: who connects from now on is refused, and does not wait."""
        if self._again is not None:
            self._again.cancel()
        if self._listening.fileno() >= 0:
            self._loop.remove_reader(self._listening)
            with contextlib.suppress(OSError):  # there is no room for the others
                while self._take():
                    pass
            leave(self._listening)

    async def wait_closed(self) -> None:
        """Until what has been accepted is open; what takes longer than TLS should, ends."""
        opening = asyncio.gather(*self._opening, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPENING_S):
                await opening

    def _accept(self) -> None:
        try:
            for _ in range(AT_ONCE):
                if not self._take():
                    return
        except OSError as error:
            self._rest(str(error.strerror))

    def _take(self) -> bool:
        """Accept one that waits; whether there was one. Raises OSError when there is no room for it."""
        if len(self._clients) + len(self._opening) >= self._most:
            raise OSError(errno.EMFILE, "there is room for no more clients")
        try:
            accepted, _ = self._listening.accept()
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in NO_ROOM:
                raise
            return True  # it has gone again
        opening = self._loop.create_task(self._open(accepted))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        return True

    def _rest(self, reason: str) -> None:
        """Let those that wait do so: perhaps somebody leaves."""
        log.error("no connection can be accepted (%s); raise the limit on open files", reason)
        self._loop.remove_reader(self._listening)
        self._again = self._loop.call_later(
            FULL_FOR_S, self._loop.add_reader, self._listening, self._accept
        )

    async def _open(self, accepted: socket.socket) -> None:
        opened: asyncio.Transport | None = None
        try:
            if accepted.family != socket.AF_UNIX:
                have_watched(accepted, self._vanished_s)
            opened, _ = await self._loop.connect_accepted_socket(
                self._make, accepted, ssl=self._tls
            )
            opened.set_write_buffer_limits(BEHIND_BYTES)
        except OSError as error:  # a client that speaks no TLS, or has gone
            log.debug("a connection was not opened: %s", error)
        finally:
            if opened is None:
                accepted.close()
