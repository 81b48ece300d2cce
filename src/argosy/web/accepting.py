"""Accepting: all connections that wait are taken in one turn of the event loop, where libuv takes one."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable

AT_ONCE = 32
"""Connections that are accepted before those that are there get their turn again."""
FULL_FOR_S = 0.5
"""How long nobody is accepted when the process has no room for one more."""
_FULL = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

log = logging.getLogger("argosy.web")


class Acceptor:
    """What a server of asyncio's is, as far as uvicorn goes.

    A loop that is busy has few turns a second: with one connection each, clients would wait for seconds to get in.
    """

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[], asyncio.BaseProtocol],
        tls: ssl.SSLContext | None,
    ) -> None:
        """Accept on `listening` from now on, until `close` closes it."""
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._make = make
        self._tls = tls
        self._opening: set[asyncio.Task[None]] = set()
        self._again: asyncio.TimerHandle | None = None
        listening.settimeout(0)
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Accept nobody any more: who connects from now on is refused, and does not wait for the end."""
        if self._again is not None:
            self._again.cancel()
        if self._listening.fileno() >= 0:
            self._loop.remove_reader(self._listening)
            self._listening.close()

    async def wait_closed(self) -> None:
        """End what has been accepted and is not open yet: TLS takes its time."""
        opening = list(self._opening)
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                accepted, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _FULL:
                    self._rest(error)
                    return
                continue  # it has gone again
            opening = self._loop.create_task(self._open(accepted))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    def _rest(self, error: OSError) -> None:
        """Let those that wait do so: perhaps somebody leaves."""
        log.error(
            "no connection can be accepted (%s); raise the limit on open files", error.strerror
        )
        self._loop.remove_reader(self._listening)
        self._again = self._loop.call_later(
            FULL_FOR_S, self._loop.add_reader, self._listening, self._accept
        )

    async def _open(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, accepted, ssl=self._tls)
        except OSError as error:  # a client that speaks no TLS, or has gone
            log.debug("a connection was not opened: %s", error)
            accepted.close()
