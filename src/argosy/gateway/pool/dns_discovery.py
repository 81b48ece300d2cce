"""Replicas that a name stands for: it is looked up again and again, and each of its addresses is one of them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Literal

import structlog

from argosy.gateway.upstream import addresses_of
from argosy.policy import Addresses

EACH_S = 5.0
LATE_S = 5.0
"""After so long without an answer it is told that there is none; it is waited for still."""
MOST = 1000
"""Addresses of one name that are used: the first in their order."""

Discover = Literal["dns", "dns4", "dns6"]
"""All addresses of a name, or those of IPv4 or IPv6 alone."""

FAMILIES: dict[Discover, socket.AddressFamily] = {
    "dns": socket.AF_UNSPEC,
    "dns4": socket.AF_INET,
    "dns6": socket.AF_INET6,
}

LookUp = Callable[[str, socket.AddressFamily], Awaitable[Collection[str]]]
"""The addresses of a name; none: it has none now. Raises OSError when nobody can say."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

_NONE = frozenset({socket.EAI_NONAME, socket.EAI_NODATA})


async def look_up(host: str, family: socket.AddressFamily) -> Collection[str]:
    """Ask the system: see `LookUp`."""
    try:
        return frozenset(await addresses_of(host, family))
    except socket.gaierror as error:
        if error.errno in _NONE:
            return ()
        raise


class Discovery:
    """Looks up one name. Belongs to one event loop."""

    def __init__(
        self,
        host: str,
        discover: Discover,
        look_up: LookUp,
        *,
        come: Callable[[str], None],
        go: Callable[[str], None],
        there: Collection[str] = (),
    ) -> None:
        """`come` is told of an address that is there, if it is not known to be `there`; `go` of one that has gone."""
        self.answered = asyncio.Event()
        """Set once there was an answer, or none for too long."""
        self._host = host
        self._family = FAMILIES[discover]
        self._look_up = look_up
        self._come = come
        self._go = go
        self._addresses = Addresses()
        self.there = self._addresses.answered(there, time.monotonic())
        self._trouble = ""
        """Why there was no address in the last answer; empty: there was one."""

    async def run(self) -> None:
        """Look it up for as long as this is awaited; while nobody can say, what is known stays."""
        while True:
            try:
                self._take(await self._ask())
            except OSError as error:
                self._note(str(error))
            self.answered.set()
            await asyncio.sleep(EACH_S)

    async def _ask(self) -> Collection[str]:
        """The answer, however late. Raises OSError."""
        asking = asyncio.ensure_future(self._look_up(self._host, self._family))
        try:
            await asyncio.wait({asking}, timeout=LATE_S)
            if not asking.done():
                self._note(f"no answer within {LATE_S:g} s")
                self.answered.set()
            return await asking
        finally:
            asking.cancel()

    def _take(self, answer: Collection[str]) -> None:
        self._note("" if answer else "it has no address")
        before = self.there
        self.there = self._addresses.answered(sorted(answer)[:MOST], time.monotonic())
        for address in sorted(before - self.there):
            self._go(address)
        for address in sorted(self.there - before):
            self._come(address)

    def _note(self, trouble: str) -> None:
        if trouble and trouble != self._trouble:
            log.warning("name_not_found", host=self._host, reason=trouble, used=len(self.there))
        self._trouble = trouble
