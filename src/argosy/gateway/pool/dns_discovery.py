"""Discovery of replicas behind a DNS name, which is looked up repeatedly. Each address is one replica."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Collection

import structlog

from argosy.deployment import DiscoveryMode
from argosy.gateway.upstream import resolve_addresses
from argosy.policy import ResolvedAddresses

LOOKUP_INTERVAL_S = 5.0
SLOW_LOOKUP_S = 5.0
"""Time after which an unanswered lookup is logged. The lookup itself continues."""
MAX_ADDRESSES = 1000
"""Maximum number of addresses of one name. The first ones in sorted order are used."""

ADDRESS_FAMILIES: dict[DiscoveryMode, socket.AddressFamily] = {
    "dns": socket.AF_UNSPEC,
    "dns4": socket.AF_INET,
    "dns6": socket.AF_INET6,
}

Resolver = Callable[[str, socket.AddressFamily], Awaitable[Collection[str]]]
"""Function that resolves a name; empty if the name has no address. Raises OSError if the resolver fails."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

_NO_ADDRESS_ERRORS = frozenset({socket.EAI_NONAME, socket.EAI_NODATA})


async def resolve_host(host: str, family: socket.AddressFamily) -> Collection[str]:
    """Resolve a name with the system's resolver, as a `Resolver`."""
    try:
        return frozenset(await resolve_addresses(host, family))
    except socket.gaierror as error:
        if error.errno in _NO_ADDRESS_ERRORS:
            return ()
        raise


class DnsDiscovery:
    """Repeated lookup of one name. Not thread-safe: use it from one event loop."""

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
        """Create a discovery that does not look up anything until `run`.

        The callback `on_added` is called for each new address that is not in `known`, and `on_removed` for each
        address that disappeared.
        """
        self.first_lookup_done = asyncio.Event()
        """Set after the first answer, or after `SLOW_LOOKUP_S` without one."""
        self._host = host
        self._family = ADDRESS_FAMILIES[mode]
        self._resolve = resolve
        self._on_added = on_added
        self._on_removed = on_removed
        self._tracker = ResolvedAddresses()
        self.addresses = self._tracker.update(known, time.monotonic())
        self._failure_reason = ""
        """Reason why the last lookup gave no address; empty if it gave one."""

    async def run(self) -> None:
        """Look up the name every `LOOKUP_INTERVAL_S` until cancelled. A failed lookup changes no addresses."""
        while True:
            try:
                self._apply_addresses(await self._look_up_once())
            except OSError as error:
                self._note_failure(str(error))
            self.first_lookup_done.set()
            await asyncio.sleep(LOOKUP_INTERVAL_S)

    async def _look_up_once(self) -> Collection[str]:
        """Look up the name and wait for the answer, however late. Raises OSError."""
        lookup = asyncio.ensure_future(self._resolve(self._host, self._family))
        try:
            await asyncio.wait({lookup}, timeout=SLOW_LOOKUP_S)
            if not lookup.done():
                self._note_failure(f"no answer within {SLOW_LOOKUP_S:g} s")
                self.first_lookup_done.set()
            return await lookup
        finally:
            lookup.cancel()

    def _apply_addresses(self, found: Collection[str]) -> None:
        self._note_failure("" if found else "the name has no address")
        previous = self.addresses
        self.addresses = self._tracker.update(sorted(found)[:MAX_ADDRESSES], time.monotonic())
        for address in sorted(previous - self.addresses):
            self._on_removed(address)
        for address in sorted(self.addresses - previous):
            self._on_added(address)

    def _note_failure(self, reason: str) -> None:
        if reason and reason != self._failure_reason:
            log.warning(
                "dns_lookup_failed",
                host=self._host,
                reason=reason,
                known_addresses=len(self.addresses),
            )
        self._failure_reason = reason
