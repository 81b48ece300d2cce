"""Cache of whole responses: equal requests of one tenant get the answer of the first one, also while it runs.

A key is the digest of what can change an answer: all fields of a request but a few that cannot, its tenant, and the
model. An entry has the answer before its content is filtered. Only complete answers
are kept. Sampled ones and answers to requests with tools are kept if the rule says so.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from argosy.gateway.proxy.single_flight import CacheEntry, Flight
from argosy.gateway.request_context import RequestContext
from argosy.protocol import SSE_CONTENT_TYPE, ApiError
from argosy.store import CachedResponse, IdempotencyStore, InFlightClaim
from argosy.telemetry import GatewayMetrics

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

IGNORED_FIELDS = frozenset(
    {
        *("stream", "stream_options", "user", "metadata", "store", "safety_identifier", "model"),
        *("request_id", "timeout_s", "priority", "session_id", "prompt_cache_key", "cache_salt"),
    }
)
"""Fields that cannot change an answer. All others are in the key, so that a later one is never forgotten. What the name
of the model stands for is in the key in its place."""
MIN_POLL_INTERVAL_S, MAX_POLL_INTERVAL_S = 0.02, 0.5
"""Shortest and longest interval at which the answer of another gateway is looked up. It doubles with each time."""
MAX_INVALID_ENTRIES = 3
"""Damaged or outdated entries of a key that are removed for one request. Then it does without the cache."""
_COMPLETE = frozenset({"stop", "tool_calls", "function_call"})
"""Finish reasons of complete answers."""
_encode = msgspec.json.Encoder(order="sorted").encode


class ResponseCache:
    """Kept answers of a gateway, or of several that share a Redis."""

    def __init__(
        self,
        store: IdempotencyStore,
        metrics: GatewayMetrics,
        max_response_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create a cache.

        Args:
            store: Keeps the answers.
            metrics: Counts the requests.
            max_response_bytes: Size of the largest answer that is kept.
            clock: Seconds since the epoch.
        """
        self._store = store
        self.metrics = metrics
        self._max_response_bytes = max_response_bytes
        self._clock = clock
        self._numbers = itertools.count()
        self._flights: dict[str, Flight] = {}
        """Answers that this gateway finds or computes, by key."""

    def find_flight(self, key: str) -> Flight | None:
        """Return the running flight of a key."""
        return self._flights.get(key)

    async def start_flight(
        self,
        key: str,
        flight: Flight,
        claim: InFlightClaim,
        max_age_s: float,
        *,
        is_refresh: bool,
    ) -> bool:
        """Start the flight of a key that has none: find its answer, or claim the key.

        Waits while another gateway computes the answer.

        Returns:
            Whether the caller has to compute the answer, and to call `settle`. Otherwise the flight has ended. It has
            an entry then, unless the cache keeps damaged or outdated ones.
        """
        self._flights[key] = flight
        is_claimed, poll_interval_s = False, MIN_POLL_INTERVAL_S
        try:
            if is_refresh:
                await self._store.forget(key)
            invalid_entries = 0
            while invalid_entries < MAX_INVALID_ENTRIES:
                existing = await self._store.claim(key, claim)
                if existing is None:
                    is_claimed = True
                    break
                if isinstance(existing, CachedResponse):
                    entry = _open_entry(key, existing)
                    if entry is not None and self._clock() - entry.stored_at <= max_age_s:
                        flight.kept_as = "hit"
                        self._end_flight(key, flight, entry)
                        break
                    await self._store.forget(key)
                    invalid_entries += 1
                else:  # another gateway computes it
                    await asyncio.sleep(poll_interval_s)
                    poll_interval_s = min(2 * poll_interval_s, MAX_POLL_INTERVAL_S)
        finally:
            if not (is_claimed or flight.is_ended):
                flight.drop_chunks()
                self._end_flight(key, flight, None)
        return is_claimed

    def settle(
        self,
        key: str,
        flight: Flight,
        claim: InFlightClaim,
        entry: CacheEntry | None,
        error: ApiError | None,
    ) -> bool:
        """End the flight of a claimed key. Returns whether its answer was kept.

        Args:
            key: The key.
            flight: Its flight.
            claim: The claim.
            entry: The answer; None if it is not complete. One that a limit has ended is complete, but not kept.
            error: Error of the request that computed it.
        """
        response = None
        if (
            entry is not None
            and not flight.is_purged
            and _COMPLETE.issuperset(entry.finish_reasons.values())
            and sum(map(len, entry.chunks)) <= self._max_response_bytes
        ):
            body = msgspec.msgpack.encode(entry)
            response = CachedResponse(
                claim.request_id, _checksum(key, body), SSE_CONTENT_TYPE, body
            )
        self._store.settle_claim(key, claim, response)
        self._end_flight(key, flight, entry, error)
        return response is not None

    async def read(self, key: str, max_age_s: float) -> CacheEntry | None:
        """Return the kept answer of a key; None if there is none, or it is too old. The key is not claimed."""
        claim = InFlightClaim(f"read-{next(self._numbers)}", b"")
        existing = await self._store.claim(key, claim)
        if existing is None:
            self._store.settle_claim(key, claim, None)
        entry = _open_entry(key, existing) if isinstance(existing, CachedResponse) else None
        is_valid = entry is not None and self.age_s(entry) <= max_age_s
        return entry if is_valid else None

    async def purge(self, tenant: tuple[str, str] | None, model: str | None) -> int:
        """Remove kept answers, also those that are being computed. Returns the number of kept ones.

        Args:
            tenant: Organisation and project; None for all.
            model: Name of the model; None for all.

        Raises:
            ApiError: 503 if Redis cannot be reached.
        """
        matches = select_keys(tenant, model)
        for key, flight in self._flights.items():
            flight.is_purged |= matches(key)
        try:
            return await self._store.purge(matches)
        except Exception as error:
            message = "The answers in Redis cannot be removed at the moment. Purge again."
            raise ApiError(503, "store_unavailable", message) from error

    def settle_similar(
        self, key: str, flight: Flight, claim: InFlightClaim, entry: CacheEntry
    ) -> None:
        """End the flight of a claimed key with the answer to a similar request."""
        self._store.settle_claim(key, claim, None)
        flight.kept_as = "semantic"
        self._end_flight(key, flight, entry)

    def reserve_bytes(self, size_bytes: int, total_bytes: int, flight: Flight) -> bool:
        """Reserve memory for an answer that has `total_bytes` by then. Returns whether its chunks are kept."""
        is_needed = total_bytes <= self._max_response_bytes or flight.has_followers
        return is_needed and self._store.reserve_bytes(size_bytes)

    def release_bytes(self, size_bytes: int) -> None:
        """Release reserved memory."""
        self._store.release_bytes(size_bytes)

    def count(self, rule: str, result: str) -> None:
        """Count a request by how the cache answered."""
        self.metrics.cache_requests.add((rule, result))

    def create_entry(
        self, context: RequestContext, chunks: list[bytes], duration_s: float
    ) -> CacheEntry:
        """Create the entry of a complete answer, which took `duration_s`."""
        delivered = context.delivered
        return CacheEntry(
            self._clock(), delivered.usage, dict(delivered.finish_reasons), chunks, duration_s
        )

    def _end_flight(
        self, key: str, flight: Flight, entry: CacheEntry | None, error: ApiError | None = None
    ) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        flight.end(entry, error)

    def age_s(self, entry: CacheEntry) -> float:
        """Return the age of an entry."""
        return max(0.0, self._clock() - entry.stored_at)


def compute_key(context: RequestContext) -> str:
    """Return the key of a request, which begins with a digest of its tenant (see `IdempotencyStore`)."""
    owner, parts = _describe(context)
    return f"{_tenant(owner)}.{_digest(context.pool.model)[:16]}.{_digest((owner, parts))}"


def select_keys(tenant: tuple[str, str] | None, model: str | None) -> Callable[[str], bool]:
    """Return a function that says whether a key is of a tenant and a model, of which None means all."""
    wanted = None if tenant is None else _tenant((*tenant, ""))
    digest = None if model is None else _digest(model)[:16]

    def matches(key: str) -> bool:
        owner, _, rest = key.partition(".")
        return wanted in {None, owner} and digest in {None, rest.partition(".")[0]}

    return matches


def compute_partition(context: RequestContext, messages: object, extra: object) -> tuple[str, str]:
    """Return the tenant of a request, and the partition of those that differ from it in one question only.

    Args:
        context: The request.
        messages: Its messages without the question.
        extra: Whatever else has to be equal.
    """
    owner, (*computed_by, content) = _describe(context)
    content = {**content, "messages": messages}
    return _tenant(owner), _digest((owner, computed_by, content, extra))


def _describe(context: RequestContext) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Return the owner of a request, and what decides its answer, with the fields of its body last."""
    fields, principal, pool = context.fields, context.principal, context.pool
    own = "" if principal.project else principal.user or principal.key
    owner = (principal.organisation, principal.project, own)
    content = {
        name: msgspec.json.decode(value)
        for name, value in fields.raw.items()
        if name not in IGNORED_FIELDS and not (name == "seed" and fields.has_generated_seed)
    }
    computed_by = sorted(
        {(each.upstream_model, each.model_digest or "") for each in pool.replicas.values()}
    )
    adapter = "" if context.adapter is None else context.adapter.digest
    # Of a cascade another model may answer.
    cascade = () if context.cascade is None else (fields.model, context.cascade)
    path = context.api.path.decode()
    return owner, (path, pool.model, pool.version, adapter, computed_by, *cascade, content)


def _tenant(owner: tuple[str, ...]) -> str:
    return f"cache-{_digest(owner)}"


def _digest(value: object) -> str:
    return hashlib.sha256(_encode(value)).hexdigest()


def _checksum(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + body).digest()


def _open_entry(key: str, response: CachedResponse) -> CacheEntry | None:
    """Return the entry in a stored response; None if it is damaged, or was stored under another key."""
    if response.request_digest != _checksum(key, response.body):
        log.warning("cache_entry_invalid", first=response.request_id)
        return None
    try:
        return msgspec.msgpack.decode(response.body, type=CacheEntry)
    except msgspec.DecodeError:  # of another version
        return None
