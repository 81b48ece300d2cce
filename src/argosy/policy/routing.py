"""Which replica gets a request: its cost there in seconds, or one of the classic rules to compare with.

Cost of replica i, every term in seconds, so that there are no weights to tune:

    (tokens queued there + tokens of this prompt that it has not cached) / its prefill rate
    + its seconds between tokens x the expected output
    + BARRIER_S x k / (1 - k), k the used part of its KV cache

Affinity is the cached term and nothing else: a warm replica wins until its queue costs more than recomputing
elsewhere, judged for each request alone.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from argosy.policy.smoothing import PeakEwma

MEMORY_BARRIER_S = 0.15
"""Cost of a half full KV cache: it grows without bound towards a full one."""
MAX_KV_USAGE_RATIO = 0.999
STALE_AFTER_S = 2.0
"""After so long without a report a replica is judged by what was sent to it, at `STALE_PENALTY_S` more."""
STALE_PENALTY_S = 0.25


@dataclass(slots=True)
class ReplicaLoad:
    """What is known of a replica: its own last report, and what was sent there since."""

    name: str
    prefill_tokens_per_s: float = 2000.0
    """Prompt tokens a second, measured."""
    inter_token_s: float = 0.02
    """Seconds between a sequence's tokens, were one more to run there."""
    queued_tokens: int = 0
    """Prompt tokens not computed yet, as reported."""
    running: int = 0
    waiting: int = 0
    kv_usage_ratio: float = 0.0
    """Part of the KV cache, 0 to 1."""
    reported_at: float = float("-inf")
    sent_tokens: int = 0
    """Uncached prompt tokens dispatched since the report."""
    in_flight: int = 0
    """Requests dispatched by this gateway that have not ended."""
    oversubscribed: int = 0
    """Requests more than it runs at once, all gateways' together, as reported: they had not heard of each other yet."""
    max_seqs: int = 0
    """Sequences that it runs at once; 0: unknown."""
    ttft: PeakEwma = field(default_factory=PeakEwma)
    """Time to the first token, as this gateway saw it."""


class RoutingCost(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The terms of one candidate, in seconds, for the explanation."""

    replica: str
    queue_s: float
    prefill_s: float
    decode_s: float
    memory_s: float
    stale_s: float

    @property
    def total_s(self) -> float:
        """What is compared."""
        return self.queue_s + self.prefill_s + self.decode_s + self.memory_s + self.stale_s


class RoutingCandidate(msgspec.Struct, frozen=True):
    """A replica that could get a request, and what that would cost."""

    load: ReplicaLoad
    uncached_tokens: int
    """Prompt tokens that it probably has to compute."""
    cost: RoutingCost


class RoutingPolicy(Protocol):
    """A routing rule."""

    def select(
        self, candidates: Sequence[RoutingCandidate], affinity_key: str, draw: float, now: float
    ) -> RoutingCandidate:
        """One of `candidates` (at least one).

        `key` is what should stay together: a session, else the prompt's beginning; empty: nothing. `draw` is uniform
        in [0, 1).
        """
        ...


def estimate_cost(
    load: ReplicaLoad, uncached_tokens: int, output_tokens: int, now: float
) -> RoutingCost:
    """What a request costs on this replica: prompt tokens that it has not cached, and expected output."""
    rate = max(load.prefill_tokens_per_s, 1.0)
    used = min(max(load.kv_usage_ratio, 0.0), MAX_KV_USAGE_RATIO)
    stale = now - load.reported_at > STALE_AFTER_S
    return RoutingCost(
        replica=load.name,
        queue_s=(load.queued_tokens + load.sent_tokens) / rate,
        prefill_s=uncached_tokens / rate,
        decode_s=load.inter_token_s * output_tokens,
        memory_s=MEMORY_BARRIER_S * used / (1.0 - used),
        stale_s=STALE_PENALTY_S if stale else 0.0,
    )


class LeastCost:
    """The cheapest in seconds; `draw` decides between equals."""

    def select(
        self, candidates: Sequence[RoutingCandidate], affinity_key: str, draw: float, now: float
    ) -> RoutingCandidate:
        """See `Chooser`."""
        del affinity_key, now
        totals = [candidate.cost.total_s for candidate in candidates]
        least = min(totals) + 1e-9
        equal = [one for one, total in zip(candidates, totals, strict=True) if total <= least]
        return equal[int(draw * len(equal))]


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._last_replica = ""

    def select(
        self, candidates: Sequence[RoutingCandidate], affinity_key: str, draw: float, now: float
    ) -> RoutingCandidate:
        """See `Chooser`."""
        del affinity_key, draw, now
        ordered = sorted(candidates, key=lambda one: one.load.name)
        chosen = next((one for one in ordered if one.load.name > self._last_replica), ordered[0])
        self._last_replica = chosen.load.name
        return chosen


class PowerOfTwo:
    """The less loaded of two at random (Mitzenmacher 2001)."""

    def select(
        self, candidates: Sequence[RoutingCandidate], affinity_key: str, draw: float, now: float
    ) -> RoutingCandidate:
        """See `Chooser`."""
        del affinity_key, now
        count = len(candidates)
        if count == 1:
            return candidates[0]
        pair = int(draw * count * (count - 1))
        first, second = divmod(pair, count - 1)
        second += second >= first
        return min(candidates[first], candidates[second], key=_in_flight)


class LatencyAware:
    """The least smoothed time to the first token, times who is there already (as Finagle's balancer)."""

    def select(
        self, candidates: Sequence[RoutingCandidate], affinity_key: str, draw: float, now: float
    ) -> RoutingCandidate:
        """See `Chooser`. Who is not known yet gets one request, then counts as the slowest."""
        del affinity_key, draw
        slowest = max(one.load.ttft.value(now) for one in candidates)

        def expected(one: RoutingCandidate) -> tuple[float, int]:
            busy = one.load.in_flight
            latency = one.load.ttft.value(now) or (slowest if busy else 0.0)
            return latency * (busy + 1), busy

        return min(candidates, key=expected)


class BoundedHash:
    """Consistent hashing with bounded loads (Mirrokni, Thorup & Zadimoghaddam 2018) on the key."""

    VIRTUAL_NODES = 64
    """Places of each replica on the ring."""
    MAX_RING_REPLICAS = 1000
    """Replicas, about: their names may change for ever."""

    def __init__(self, load_factor: float = 1.25) -> None:
        self._load_factor = load_factor
        self._names: frozenset[str] = frozenset()
        self._ring: list[tuple[int, str]] = []

    def select(
        self, candidates: Sequence[RoutingCandidate], affinity_key: str, draw: float, now: float
    ) -> RoutingCandidate:
        """See `Chooser`. Without a key the place is `draw`'s."""
        del now
        named = {one.load.name: one for one in candidates}
        self._rebuild_ring(frozenset(named))
        busy = sum(map(_in_flight, candidates)) + 1
        most = math.ceil(self._load_factor * busy / len(candidates))
        place = _ring_position(affinity_key) if affinity_key else int(draw * 2**64)
        start = bisect_left(self._ring, (place, ""))
        around = (self._ring[(start + step) % len(self._ring)] for step in range(len(self._ring)))
        there = (named[name] for _, name in around if name in named)
        return next(one for one in there if one.load.in_flight < most)

    def _rebuild_ring(self, names: frozenset[str]) -> None:
        """Who is full or away for a moment keeps its places: a thousand hashes for each request would be too many."""
        if not names <= self._names:
            self._names = (
                names if len(self._names) >= self.MAX_RING_REPLICAS else self._names | names
            )
            self._ring = sorted(
                (_ring_position(f"{n} {i}"), n)
                for n in self._names
                for i in range(self.VIRTUAL_NODES)
            )


def _in_flight(candidate: RoutingCandidate) -> int:
    return candidate.load.in_flight


def _ring_position(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest())


RoutingPolicyName = Literal["least-cost", "round-robin", "power-of-two", "latency", "hash"]
"""As a pool's setting names it."""

FULL_SCAN_POLICIES: frozenset[RoutingPolicyName] = frozenset({"round-robin", "hash"})
"""Rules that go by who is there; the others look for a good one, and need not see all of very many."""

ROUTING_POLICIES: dict[RoutingPolicyName, Callable[[], RoutingPolicy]] = {
    "least-cost": LeastCost,
    "round-robin": RoundRobin,
    "power-of-two": PowerOfTwo,
    "latency": LatencyAware,
    "hash": BoundedHash,
}
