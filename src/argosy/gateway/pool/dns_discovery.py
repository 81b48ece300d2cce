"""Replicas that a name stands for: it is looked up again and again, and each of its addresses is one of them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Literal

import structlog

from argosy.gateway.upstream import resolve_addresses
from argosy.policy import ResolvedAddresses

LOOKUP_INTERVAL_S = 5.0
SLOW_LOOKUP_S = 5.0
"""After so long without an answer it is told that there is none; it is waited for still."""
MAX_ADDRESSES = 1000
"""Addresses of one name that are used: the first in their order."""

DiscoveryMode = Literal["dns", "dns4", "dns6"]
"""All addresses of a name, or those of IPv4 or IPv6 alone."""

ADDRESS_FAMILIES: dict[DiscoveryMode, socket.AddressFamily] = {
    "dns": socket.AF_UNSPEC,
    "dns4": socket.AF_INET,
    "dns6": socket.AF_INET6,
}

Resolver = Callable[[str, socket.AddressFamily], Awaitable[Collection[str]]]
"""The addresses of a name; none: it has none now. Raises OSError when nobody can say."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

_NO_ADDRESS_ERRORS = frozenset({socket.EAI_NONAME, socket.EAI_NODATA})


async def resolve_host(host: str, family: socket.AddressFamily) -> Collection[str]:
    """Ask the system: see `LookUp`."""
    try:
        return frozenset(await resolve_addresses(host, family))
    except socket.gaierror as error:
        if error.errno in _NO_ADDRESS_ERRORS:
            return ()
        raise


class DnsDiscovery:
    """Looks up one name. Belongs to one event loop."""

    def __init__(
        self,
        host: str,
        mode: DiscoveryMode,
        resolve: Resolver,
        *,
        on_added: Callable[[str], None],
        on_removed: Callable[[str], None],
        known: Collection[str] = (),
    ) -> None:
        """`come` is told of an address that is there, if it is not known to be `there`; `go` of one that has gone."""
        self.first_lookup_done = asyncio.Event()
        """Set once there was an answer, or none for too long."""
        self._host = host
        self._family = ADDRESS_FAMILIES[mode]
        self._resolve = resolve
        self._on_added = on_added
        self._on_removed = on_removed
        self._tracker = ResolvedAddresses()
        self.addresses = self._tracker.update(known, time.monotonic())
        self._failure_reason = ""
        """Why there was no address in the last answer; empty: there was one."""

    async def run(self) -> None:
        """Look it up for as long as this is awaited; while nobody can say, what is known stays."""
        while True:
            try:
                self._apply_addresses(await self._look_up_once())
            except OSError as error:
                self._note_failure(str(error))
            self.first_lookup_done.set()
            await asyncio.sleep(LOOKUP_INTERVAL_S)

    async def _look_up_once(self) -> Collection[str]:
        """The answer, however late. Raises OSError."""
        asking = asyncio.ensure_future(self._resolve(self._host, self._family))
        try:
            await asyncio.wait({asking}, timeout=SLOW_LOOKUP_S)
            if not asking.done():
                self._note_failure(f"no answer within {SLOW_LOOKUP_S:g} s")
                self.first_lookup_done.set()
            return await asking
        finally:
            asking.cancel()

    def _apply_addresses(self, found: Collection[str]) -> None:
        self._note_failure("" if found else "it has no address")
        before = self.addresses
        self.addresses = self._tracker.update(sorted(found)[:MAX_ADDRESSES], time.monotonic())
        for address in sorted(before - self.addresses):
            self._on_removed(address)
        for address in sorted(self.addresses - before):
            self._on_added(address)

    def _note_failure(self, reason: str) -> None:
        if reason and reason != self._failure_reason:
            log.warning(
                "dns_lookup_failed", host=self._host, reason=reason, used=len(self.addresses)
            )
        self._failure_reason = reason
