"""Responses stored by idempotency key, so that a repeated request gets the first response again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from argosy.policy import MemoryEntry, TenantMemory
from argosy.settings import ByOperator

RESPONSE_OVERHEAD_BYTES = 512
"""Approximate size of a stored response without its body."""


class IdempotencyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a store of responses: of those by idempotency key, or of the response cache."""

    retention_s: ByOperator[Annotated[float, Meta(gt=0, le=86_400)]] = 86_400.0
    """How long a response is kept."""
    max_bytes: ByOperator[Annotated[int, Meta(ge=0)]] = 64 * 1024 * 1024
    """Maximum size of all responses, including running ones. The oldest of the largest tenant are evicted first."""
    max_response_bytes: ByOperator[Annotated[int, Meta(ge=0)]] = 1024 * 1024
    """Maximum size of one response. Longer responses are not stored."""


class InFlightClaim(msgspec.Struct, frozen=True, array_like=True, tag="claim", gc=False):
    """First request with a key, while its response is running."""

    request_id: str
    """Unique id of the request."""
    request_digest: bytes
    """Digest of the request, to detect another request with the same key."""


class CachedResponse(msgspec.Struct, frozen=True, array_like=True, tag="answer", gc=False):
    """Stored response of the first request with a key."""

    request_id: str
    request_digest: bytes
    media_type: bytes
    body: bytes


class IdempotencyStore(Protocol):
    """Idempotency keys in use and their stored responses.

    Callers make keys unique by principal. What is before the first point of a key stands for its tenant.
    """

    async def claim(self, key: str, claim: InFlightClaim) -> InFlightClaim | CachedResponse | None:
        """Claim a key until `settle_claim`. Returns the existing claim or response, or None if the claim succeeded."""

    async def forget(self, key: str) -> None:
        """Remove the response of a key, if there is one."""

    async def purge(self, matches: Callable[[str], bool]) -> int:
        """Remove all responses whose keys match. Returns their number."""

    def reserve_bytes(self, size_bytes: int) -> bool:
        """Reserve memory for a running response, evicting older ones. Returns whether there is enough."""

    def release_bytes(self, size_bytes: int) -> None:
        """Release reserved memory."""

    def settle_claim(self, key: str, claim: InFlightClaim, response: CachedResponse | None) -> None:
        """End a claim. Stores the response if there is room, or frees the key for None."""

    async def start(self) -> None:
        """Connect, within seconds."""

    async def close(self) -> None:
        """Finish pending writes and disconnect."""


class _StoredResponse(MemoryEntry, gc=False, eq=False):
    expires_at: float
    response: CachedResponse


class MemoryIdempotencyStore:
    """Idempotency store in the memory of one gateway."""

    def __init__(
        self, config: IdempotencyConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._clock = clock
        self._claims: dict[str, InFlightClaim] = {}
        self._responses: dict[str, _StoredResponse] = {}
        """Stored responses by key, oldest first."""
        self._memory = TenantMemory(config.max_bytes)
        """Size of the stored responses. Reserved memory lowers its bound."""

    @property
    def used_bytes(self) -> int:
        """Size of stored and reserved responses."""
        return self._memory.used_bytes + self._config.max_bytes - self._memory.max_bytes

    @property
    def claims(self) -> Mapping[str, InFlightClaim]:
        """Running claims by key."""
        return self._claims

    def __len__(self) -> int:
        return len(self._responses)

    async def claim(self, key: str, claim: InFlightClaim) -> InFlightClaim | CachedResponse | None:
        self._evict_expired()
        stored = self._responses.get(key)
        if stored is not None:
            return stored.response
        holder = self._claims.setdefault(key, claim)
        return None if holder is claim else holder

    async def forget(self, key: str) -> None:
        stored = self._responses.pop(key, None)
        if stored is not None:
            self._memory.remove(stored)

    async def purge(self, matches: Callable[[str], bool]) -> int:
        keys = [key for key in self._responses if matches(key)]
        for key in keys:
            await self.forget(key)
        return len(keys)

    def reserve_bytes(self, size_bytes: int) -> bool:
        self._evict_expired()
        memory = self._memory
        while memory.used_bytes + size_bytes > memory.max_bytes and (
            largest := memory.find_largest()
        ):
            memory.evict_oldest(largest)
        if memory.used_bytes + size_bytes > memory.max_bytes:
            return False
        memory.max_bytes -= size_bytes
        return True

    def release_bytes(self, size_bytes: int) -> None:
        self._memory.max_bytes += size_bytes

    def settle_claim(self, key: str, claim: InFlightClaim, response: CachedResponse | None) -> None:
        if self._claims.get(key) != claim:
            return
        del self._claims[key]
        if response is None:
            return
        self._evict_expired()
        stored = _StoredResponse(
            key.partition(".")[0],
            key,
            len(response.body) + RESPONSE_OVERHEAD_BYTES,
            self._responses.pop,
            self._clock() + self._config.retention_s,
            response,
        )
        if self._memory.add_cached(stored):
            self._responses[key] = stored

    async def start(self) -> None:
        """Do nothing, because there is no connection."""

    async def close(self) -> None:
        """Do nothing, because there is no connection."""

    def _evict_expired(self) -> None:
        now = self._clock()
        while self._responses:
            oldest = next(iter(self._responses.values()))
            if oldest.expires_at > now:
                return
            self._memory.remove(oldest)
            del self._responses[oldest.key]
