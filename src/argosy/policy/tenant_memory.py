"""Memory that the requests of tenants keep in a process, in bytes: a bound for each tenant, and one for all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from heapq import heapify, heappop, heappush

import msgspec

MIN_HEAP_LENGTH = 64
"""Length up to which outdated entries of the heap are kept."""


class MemoryEntry(msgspec.Struct, gc=False, eq=False):
    """Object that takes memory for a tenant. Untracked, so that thousands add nothing to garbage collection."""

    tenant: str
    key: str
    """Identifies the object for `evict`."""
    size_bytes: int
    """0 after the entry was removed or evicted."""
    evict: Callable[[str], object]
    """Releases the object with the key. Called after the entry was removed."""


class TenantMemory:
    """Bytes of all entries of a process.

    If they reach `max_bytes`, the oldest entries of the largest tenant make room, of equal tenants that of the one that
    has not grown for longest. An entry is refused if its own tenant would be the largest, so that a tenant never
    displaces one that keeps less.
    """

    def __init__(self, max_bytes: int, max_tenant_bytes: int | None = None) -> None:
        """Create an empty account. `max_tenant_bytes` is `max_bytes` by default."""
        self.max_bytes = max_bytes
        self.max_tenant_bytes = max_bytes if max_tenant_bytes is None else max_tenant_bytes
        self.used_bytes = 0
        self._entries: dict[str, dict[MemoryEntry, None]] = {}
        """Entries by tenant, oldest first."""
        self._tenant_bytes: dict[str, int] = {}
        self._heap: list[tuple[int, int, str]] = []
        """(-bytes, number, tenant), largest first. Some are outdated, but each tenant has one that is not too small."""
        self._numbers = itertools.count()

    def add(self, entry: MemoryEntry, *, displaces_equals: bool = False) -> bool:
        """Add an entry that displaces no other one of its tenant. Returns False if it does not fit.

        With `displaces_equals`, it may displace those of a tenant that then keeps as much as its own.
        """
        tenant, size_bytes = entry.tenant, entry.size_bytes
        if not self._make_room(tenant, size_bytes, displaces_equals=displaces_equals):
            return False
        self._entries.setdefault(tenant, {})[entry] = None
        self._count(tenant, size_bytes)
        return True

    def add_cached(self, entry: MemoryEntry) -> bool:
        """Add an entry in the place of its tenant's oldest ones. Returns False if it is too large for that."""
        if entry.size_bytes > min(self.max_bytes, self.max_tenant_bytes):
            return False
        while not self.add(entry, displaces_equals=True):
            if not self.evict_oldest(entry.tenant):
                return False
        return True

    def resize(self, entry: MemoryEntry, size_bytes: int) -> bool:
        """Change the size of an entry. Returns False, without an effect, if it does not fit or was evicted."""
        growth = size_bytes - entry.size_bytes
        is_kept = entry in self._entries.get(entry.tenant, ())
        if not is_kept or not self._make_room(entry.tenant, growth):
            return False
        entry.size_bytes = size_bytes
        self._count(entry.tenant, growth)
        return True

    def remove(self, entry: MemoryEntry) -> None:
        """Remove an entry. Has no effect if it was removed or evicted."""
        entries = self._entries.get(entry.tenant, {})
        if entry not in entries:
            return
        del entries[entry]
        self._count(entry.tenant, -entry.size_bytes)
        entry.size_bytes = 0
        if not entries:
            del self._entries[entry.tenant], self._tenant_bytes[entry.tenant]

    def evict_oldest(self, tenant: str) -> bool:
        """Evict the oldest entry of a tenant. Returns False if it has none."""
        entry = next(iter(self._entries.get(tenant, ())), None)
        if entry is None:
            return False
        self.remove(entry)
        entry.evict(entry.key)
        return True

    def find_largest(self) -> str | None:
        """Return the tenant whose entries are the largest in all, or None if there is none."""
        while self._heap:
            negative_bytes, _, tenant = self._heap[0]
            size_bytes = self._tenant_bytes.get(tenant)
            if size_bytes == -negative_bytes:
                return tenant
            heappop(self._heap)
            if size_bytes is not None:
                heappush(self._heap, (-size_bytes, next(self._numbers), tenant))
        return None

    def _make_room(self, tenant: str, growth: int, *, displaces_equals: bool = False) -> bool:
        """Return whether a tenant may keep `growth` more bytes, after entries of larger tenants were evicted."""
        own_bytes = self._tenant_bytes.get(tenant, 0) + growth
        if growth > 0 and own_bytes > self.max_tenant_bytes:
            return False
        while self.used_bytes + growth > self.max_bytes and growth > 0:
            largest = self.find_largest()
            if largest is None or self._tenant_bytes[largest] < own_bytes + (not displaces_equals):
                return False
            self.evict_oldest(largest)
        return True

    def _count(self, tenant: str, growth: int) -> None:
        self.used_bytes += growth
        self._tenant_bytes[tenant] = tenant_bytes = self._tenant_bytes.get(tenant, 0) + growth
        if growth < 0:
            return
        heappush(self._heap, (-tenant_bytes, next(self._numbers), tenant))
        if len(self._heap) > 2 * len(self._tenant_bytes) + MIN_HEAP_LENGTH:
            self._heap = [
                (-each, next(self._numbers), name) for name, each in self._tenant_bytes.items()
            ]
            heapify(self._heap)
