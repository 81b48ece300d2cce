"""Answers that are kept under a key that the client chose: who asks the same again is given the same."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta

RESPONSE_OVERHEAD_BYTES = 512
"""Bytes that an answer takes beside its body, about."""


class IdempotencyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much is kept, and for how long."""

    retention_s: Annotated[float, Meta(gt=0, le=86_400)] = 86_400.0
    max_bytes: Annotated[int, Meta(ge=0)] = 64 * 1024 * 1024
    """Of all answers together, those that run included; the oldest are forgotten first."""
    max_response_bytes: Annotated[int, Meta(ge=0)] = 1024 * 1024
    """Of one answer; a longer one is not kept."""


class InFlightClaim(msgspec.Struct, frozen=True, array_like=True, tag="claim", gc=False):
    """The first request with a key, while it is being answered."""

    request_id: str
    """Its id, which no other request has."""
    request_digest: bytes
    """Of what it asks."""


class CachedResponse(msgspec.Struct, frozen=True, array_like=True, tag="answer", gc=False):
    """What it was given."""

    request_id: str
    request_digest: bytes
    media_type: bytes
    """Media type."""
    body: bytes


class IdempotencyStore(Protocol):
    """The keys in use and the answers that are kept. Names are of keys: no two callers' are the same."""

    async def claim(self, key: str, claim: InFlightClaim) -> InFlightClaim | CachedResponse | None:
        """Take the name, until it is settled. What it holds already; None: it is the claim's now."""

    def reserve_bytes(self, size_bytes: int) -> bool:
        """Take so many bytes for an answer that comes; whether there are so many, if older ones are forgotten."""

    def release_bytes(self, size_bytes: int) -> None:
        """Give back bytes that were held."""

    def settle_claim(self, key: str, claim: InFlightClaim, response: CachedResponse | None) -> None:
        """Keep the answer that a claim got, if there is room for it; None: the name is free again."""

    async def start(self) -> None:
        """Be ready, within seconds."""

    async def close(self) -> None:
        """Bring what was settled to where it belongs."""


class _StoredResponse(NamedTuple):
    expires_at: float
    response: CachedResponse


class MemoryIdempotencyStore:
    """The `Answers` of one gateway."""

    def __init__(
        self, config: IdempotencyConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._clock = clock
        self._claims: dict[str, InFlightClaim] = {}
        self._responses: OrderedDict[str, _StoredResponse] = OrderedDict()
        """Oldest first."""
        self.used_bytes = 0
        """Of what is kept, and held."""

    @property
    def claims(self) -> Mapping[str, InFlightClaim]:
        """The names that are claimed."""
        return self._claims

    def __len__(self) -> int:
        return len(self._responses)

    async def claim(self, key: str, claim: InFlightClaim) -> InFlightClaim | CachedResponse | None:
        """See `Answers`."""
        self._evict_expired()
        kept = self._responses.get(key)
        if kept is not None:
            return kept.response
        holder = self._claims.setdefault(key, claim)
        return None if holder is claim else holder

    def reserve_bytes(self, size_bytes: int) -> bool:
        """See `Answers`."""
        self._evict_expired()
        while self._responses and self.used_bytes + size_bytes > self._config.max_bytes:
            self._evict_oldest()
        if self.used_bytes + size_bytes > self._config.max_bytes:
            return False
        self.used_bytes += size_bytes
        return True

    def release_bytes(self, size_bytes: int) -> None:
        """See `Answers`."""
        self.used_bytes -= size_bytes

    def settle_claim(self, key: str, claim: InFlightClaim, response: CachedResponse | None) -> None:
        """See `Answers`."""
        if self._claims.get(key) != claim:
            return
        del self._claims[key]
        if response is not None and self.reserve_bytes(_response_bytes(response)):
            self._responses[key] = _StoredResponse(
                self._clock() + self._config.retention_s, response
            )

    async def start(self) -> None:
        """See `Answers`."""

    async def close(self) -> None:
        """See `Answers`."""

    def _evict_expired(self) -> None:
        now = self._clock()
        while self._responses and next(iter(self._responses.values())).expires_at <= now:
            self._evict_oldest()

    def _evict_oldest(self) -> None:
        _, oldest = self._responses.popitem(last=False)
        self.used_bytes -= _response_bytes(oldest.response)


def _response_bytes(response: CachedResponse) -> int:
    return len(response.body) + RESPONSE_OVERHEAD_BYTES
