"""Replica selection by estimated cost in seconds, and classic load-balancing policies to compare with.

The cost of a replica is a sum of terms in seconds, so no weights need tuning:

    (queued tokens + uncached tokens of this prompt) / prefill_tokens_per_s
    + inter_token_s * expected output tokens
    + MEMORY_BARRIER_S * k / (1 - k), where k is kv_usage_ratio
    + time to load a missing adapter

A replica without a recent load report costs `STALE_PENALTY_S` more. The sum is divided by the replica's weight, so
that a replica of weight 0.5 gets the next request only if it costs less than half. The other policies scale a
replica's share by its weight too.

Cache affinity enters only through the cached tokens. A replica with a warm cache wins until its queue costs more than
recomputing the prompt elsewhere, and each request is judged on its own.
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
"""Cost of a half full KV cache. The cost grows without bound as the cache fills."""
MAX_KV_USAGE_RATIO = 0.999
STALE_AFTER_S = 2.0
"""Age from which a load report is stale."""
STALE_PENALTY_S = 0.25
"""Cost added to a replica with a stale report, whose load is then known only from what was sent to it."""


@dataclass(slots=True)
class ReplicaLoad:
    """Load of a replica: its last report, and the requests dispatched to it since."""

    name: str
    prefill_tokens_per_s: float = 2000.0
    """Measured rate at which the replica computes prompts."""
    inter_token_s: float = 0.02
    """Expected seconds between the tokens of a sequence if one more sequence runs there."""
    queued_tokens: int = 0
    """Prompt tokens not computed yet, from the last report."""
    running: int = 0
    waiting: int = 0
    kv_usage_ratio: float = 0.0
    """Used fraction of the KV cache, 0 to 1."""
    reported_at: float = float("-inf")
    sent_tokens: int = 0
    """Uncached prompt tokens dispatched since the report."""
    in_flight: int = 0
    """Requests that this gateway dispatched and that still run."""
    extra_slots: int = 0
    """Slots beyond one for each of these, which those with several sequences take."""
    demand_by_tenant: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Sequences of these requests, and tokens that they are expected to hold in the KV cache, by tenant."""
    oversubscribed: int = 0
    """Reported requests of all gateways beyond the concurrency slots.

    Gateways oversubscribe a replica until they learn of each other's requests.
    """
    max_seqs: int = 0
    """Sequences that the replica runs at a time; 0 if unknown."""
    weight: float = 1.0
    """Share of the requests relative to other replicas, above 0."""
    ttft: PeakEwma = field(default_factory=PeakEwma)
    """Time to first token as measured by this gateway."""

    @property
    def slots_in_use(self) -> int:
        """Slots that the requests of this gateway take."""
        return self.in_flight + self.extra_slots

    def add_demand(self, tenant: str, sequences: int, kv_tokens: int) -> None:
        """Add sequences of a tenant and their tokens in the KV cache. Negative numbers take them back."""
        demands = self.demand_by_tenant
        own_sequences, own_tokens = demands.get(tenant, (0, 0))
        demands[tenant] = own_sequences + sequences, own_tokens + kv_tokens
        if demands[tenant][0] <= 0:
            del demands[tenant]


class RoutingCost(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Cost terms of one candidate in seconds, kept to explain a routing decision."""

    replica: str
    queue_s: float
    prefill_s: float
    decode_s: float
    memory_s: float
    stale_s: float
    weight: float = 1.0
    """Weight of the replica, by which the sum is divided."""
    adapter_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Weighted sum of all terms, by which candidates are compared."""
        total_s = self.queue_s + self.prefill_s + self.decode_s + self.memory_s + self.stale_s
        return (total_s + self.adapter_s) / self.weight


class RoutingCandidate(msgspec.Struct, frozen=True):
    """Replica that may get a request, with the estimated cost."""

    load: ReplicaLoad
    uncached_tokens: int
    """Prompt tokens that the replica probably has to compute."""
    cost: RoutingCost
    cached_blocks: list[int] = []
    """Cached blocks of the prompt, as `PrefixCacheIndex.match_prefix` returns them."""


class RoutingPolicy(Protocol):
    """Policy that selects a replica among candidates.

    A selection replaces the values of attributes and never changes them in place, so a shallow copy is independent.
    """

    def __call__(
        self, candidates: Sequence[RoutingCandidate], affinity_key: str, draw: float, now: float, /
    ) -> RoutingCandidate:
        """Select a candidate.

        Args:
            candidates: At least one candidate.
            affinity_key: Requests with equal keys should share a replica. The key is the session, or else the
                beginning of the prompt; empty for no affinity.
            draw: Random number, uniform in [0, 1).
            now: Seconds on the clock of `ReplicaLoad.reported_at`.
        """
        ...


def estimate_cost(
    load: ReplicaLoad, uncached_tokens: int, output_tokens: int, now: float, adapter_s: float = 0.0
) -> RoutingCost:
    """Estimate what a request with these uncached prompt tokens and expected output tokens costs on a replica.

    `adapter_s` is the time to load the request's adapter.
    """
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
        weight=load.weight,
        adapter_s=adapter_s,
    )


def select_least_cost(
    candidates: Sequence[RoutingCandidate], _affinity_key: str, draw: float, _now: float
) -> RoutingCandidate:
    """Select the lowest total cost; `draw` decides between equals."""
    if len(candidates) == 1:
        return candidates[0]
    totals = [candidate.cost.total_s for candidate in candidates]
    threshold = min(totals) + 1e-9
    cheapest = [
        candidate for candidate, total in zip(candidates, totals, strict=True) if total <= threshold
    ]
    return cheapest[int(draw * len(cheapest))]


class RoundRobin:
    """Policy that selects the replicas in turn, by name, or smoothly in proportion to different weights.

    With different weights each candidate earns its weight per request, and the richest pays the sum of all weights.
    """

    def __init__(self) -> None:
        self._last_replica = ""
        self._credits: dict[str, float] = {}
        """Credit of each candidate of the last request; empty while all weights are equal."""

    def __call__(
        self, candidates: Sequence[RoutingCandidate], _affinity_key: str, _draw: float, _now: float
    ) -> RoutingCandidate:
        ordered = sorted(candidates, key=lambda candidate: candidate.load.name)
        if len({candidate.load.weight for candidate in ordered}) > 1:
            return self._select_weighted(ordered)
        self._credits = {}
        selected = next(
            (candidate for candidate in ordered if candidate.load.name > self._last_replica),
            ordered[0],
        )
        self._last_replica = selected.load.name
        return selected

    def _select_weighted(self, ordered: Sequence[RoutingCandidate]) -> RoutingCandidate:
        self._credits = {
            candidate.load.name: self._credits.get(candidate.load.name, 0.0) + candidate.load.weight
            for candidate in ordered
        }
        selected = max(ordered, key=lambda candidate: self._credits[candidate.load.name])
        total_weight = sum(candidate.load.weight for candidate in ordered)
        self._credits[selected.load.name] -= total_weight
        self._last_replica = selected.load.name
        return selected


def select_power_of_two(
    candidates: Sequence[RoutingCandidate], _affinity_key: str, draw: float, _now: float
) -> RoutingCandidate:
    """Select the less loaded of two random candidates (Mitzenmacher 2001)."""
    count = len(candidates)
    if count == 1:
        return candidates[0]
    pair = int(draw * count * (count - 1))
    first, second = divmod(pair, count - 1)
    second += second >= first
    return min(candidates[first], candidates[second], key=_weighted_in_flight)


def select_latency_aware(
    candidates: Sequence[RoutingCandidate], _affinity_key: str, _draw: float, now: float
) -> RoutingCandidate:
    """Select the lowest product of smoothed time to first token and load (as Finagle's balancer).

    A replica without a measurement gets one request. While that request runs, its latency counts as the slowest.
    """
    slowest_s = max(candidate.load.ttft.value(now) for candidate in candidates)

    def rank(candidate: RoutingCandidate) -> tuple[float, int]:
        in_flight = candidate.load.slots_in_use
        latency_s = candidate.load.ttft.value(now) or (slowest_s if in_flight else 0.0)
        return latency_s * _weighted_in_flight(candidate), in_flight

    return min(candidates, key=rank)


class BoundedHash:
    """Policy that hashes the affinity key consistently, with bounded loads (Mirrokni, Thorup & Zadimoghaddam 2018).

    Without an affinity key the position on the ring is random.
    """

    VIRTUAL_NODES = 64
    """Positions of each replica on the hash ring."""
    MAX_RING_REPLICAS = 1000
    """Approximate number of replicas on the ring, which bounds it when replica names keep changing."""

    def __init__(self, load_factor: float = 1.25) -> None:
        self._load_factor = load_factor
        self._names: frozenset[str] = frozenset()
        self._ring: list[tuple[int, str]] = []

    def __call__(
        self, candidates: Sequence[RoutingCandidate], affinity_key: str, draw: float, _now: float
    ) -> RoutingCandidate:
        by_name = {candidate.load.name: candidate for candidate in candidates}
        self._rebuild_ring(frozenset(by_name))
        total_in_flight = sum(candidate.load.slots_in_use for candidate in candidates) + 1
        total_weight = sum(candidate.load.weight for candidate in candidates)
        capacity_per_weight = self._load_factor * total_in_flight / total_weight
        position = _ring_position(affinity_key) if affinity_key else int(draw * 2**64)
        start = bisect_left(self._ring, (position, ""))
        nodes = (self._ring[(start + step) % len(self._ring)] for step in range(len(self._ring)))
        clockwise = (by_name[name] for _, name in nodes if name in by_name)
        return next(
            candidate
            for candidate in clockwise
            if candidate.load.slots_in_use < math.ceil(capacity_per_weight * candidate.load.weight)
        )

    def _rebuild_ring(self, names: frozenset[str]) -> None:
        """Add new replicas to the ring.

        Replicas that are full or down keep their positions, because rebuilding costs a thousand hashes.
        """
        if not names <= self._names:
            self._names = (
                names if len(self._names) >= self.MAX_RING_REPLICAS else self._names | names
            )
            self._ring = sorted(
                (_ring_position(f"{n} {i}"), n)
                for n in self._names
                for i in range(self.VIRTUAL_NODES)
            )


def _weighted_in_flight(candidate: RoutingCandidate) -> float:
    """Return the slots that would be in use at the candidate with this request, divided by its weight."""
    return (candidate.load.slots_in_use + 1) / candidate.load.weight


def _ring_position(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest())


RoutingPolicyName = Literal["least-cost", "round-robin", "power-of-two", "latency", "hash"]
"""Name of a policy in the settings of a pool."""

FULL_SCAN_POLICIES: frozenset[RoutingPolicyName] = frozenset({"round-robin", "hash"})
"""Policies that need all candidates. The others find a good replica in a sample of a large pool."""

ROUTING_POLICIES: dict[RoutingPolicyName, Callable[[], RoutingPolicy]] = {
    "least-cost": lambda: select_least_cost,
    "round-robin": RoundRobin,
    "power-of-two": lambda: select_power_of_two,
    "latency": lambda: select_latency_aware,
    "hash": BoundedHash,
}
