"""Replicas of one pool as placement sees them: availability, capacity, and selection of a replica for a request."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from argosy.policy.adapter_placement import (
    AdapterRates,
    count_homes,
    estimate_load_s,
    select_homes,
)
from argosy.policy.breaker import eligible_replicas
from argosy.policy.placement.giving_way import GivingWay
from argosy.policy.placement.replica import TIER_RANKS, PlacementReplica
from argosy.policy.placement.request import PlacementRequest
from argosy.policy.prefix_cache_index import BLOCK_TOKENS, RecentPlacements
from argosy.policy.prefix_tree import RecentPrompt, RecentPrompts
from argosy.policy.replica_status import ReplicaStatus
from argosy.policy.retries import Hedging, PoisonRequestTracker, RetryBudget
from argosy.policy.routing import (
    FULL_SCAN_POLICIES,
    ROUTING_POLICIES,
    ReplicaLoad,
    RoutingCandidate,
    RoutingPolicy,
    RoutingPolicyName,
    estimate_cost,
)
from argosy.policy.smoothing import EwmaMean

MAX_COMPARED_REPLICAS = 32
"""Maximum number of replicas compared per request. Larger pools are sampled, since each comparison takes 2 µs."""
OUTPUT_HALF_LIFE_SAMPLES = 32.0
MIN_DECODE_S = 1e-3
"""Shortest time in which a sequence is assumed to end, where a replica reports no time between tokens."""
DEFAULT_OUTPUT_TOKENS = 256
"""Expected output of a request that sets no limit, before any response has completed."""

WITHDRAWN = "the version has no share of the users"
UNAVAILABLE = "no replica of the version is available"
NONE_LEFT = "no other replica of the version can serve the request"

R = TypeVar("R", bound=PlacementReplica)


class RandomSource(Protocol):
    """Source of random numbers, so that a recorded run can be repeated."""

    def random(self) -> float:
        """Return the next number, uniform in [0, 1)."""
        ...


class Selection(NamedTuple):
    """Replica selected for a request, and its comparison with the others."""

    replica: PlacementReplica
    chosen: RoutingCandidate
    candidates: list[RoutingCandidate]
    output_tokens: int
    """Expected output tokens of the request."""


def _nothing_pending() -> bool:
    """Default of `PlacementPool.has_pending_replicas`, for a pool whose replicas have all been probed."""
    return False


class PlacementPool(Generic[R]):
    """Replicas of one version of a public model, and what limits attempts at them."""

    def __init__(
        self,
        model: str,
        replicas: Iterable[R],
        routing_policy: RoutingPolicyName = "least-cost",
        hedging: Hedging | None = None,
        giving_way: GivingWay | None = None,
    ) -> None:
        self.model = model
        self.routing_policy = routing_policy
        self.replicas = {replica.name: replica for replica in replicas}
        self.retry_budget = RetryBudget()
        self.poison_requests = PoisonRequestTracker()
        self.hedging = hedging
        """Hedging policy; None if the pool sends no hedged requests."""
        self.giving_way = giving_way
        """When streams give way to waiting requests; None if they never do."""
        self.has_pending_replicas: Callable[[], bool] = _nothing_pending
        """Function that returns whether discovery or first probes may soon add usable replicas."""
        self.takeover: PlacementPool[R] | None = None
        """Pool of the stable version, which serves the requests that this one cannot. None if this is that pool."""
        self.is_withdrawn = False
        """Whether all requests that do not run yet go to `takeover`, because the route gives this version no share."""
        self.is_starting = False
        """Whether there is no replica, but one starts or is started for requests. They wait for it."""
        self.started_at = -math.inf
        """When it was last found that the pool is not starting any more."""
        self.wake_s: float | None = None
        """How long the replicas that sleep take to wake up for requests; None if none sleeps, or they cannot."""
        self._removed_may_recover_until = -math.inf
        """Time until which requests wait for replacements of removed replicas."""
        self.recent_prompts = RecentPrompts()
        """The latest prompts, to show which prefixes they share."""
        self.adapter_rates = AdapterRates()
        """How often adapters are requested."""
        self._policy = ROUTING_POLICIES[routing_policy]()
        self._recent_placements = RecentPlacements()
        self._mean_output_tokens = EwmaMean(OUTPUT_HALF_LIFE_SAMPLES, DEFAULT_OUTPUT_TOKENS)

    def add(self, replica: R) -> None:
        """Add a replica, in place of one with its name."""
        self.replicas[replica.name] = replica

    def remove(self, name: str, now: float) -> R:
        """Remove a replica and return it. Its running requests continue."""
        replica = self.replicas.pop(name)
        replica.health.on_removed(now)
        self._removed_may_recover_until = max(
            self._removed_may_recover_until, replica.health.grace_ends_at
        )
        return replica

    def set_starting(self, *, is_starting: bool, now: float) -> None:
        """Set whether requests wait for the start of the first replica."""
        if self.is_starting and not is_starting:
            self.started_at = now
        self.is_starting = is_starting

    def set_routing_policy(
        self, routing_policy: RoutingPolicyName, hedging: Hedging | None
    ) -> None:
        """Change the routing policy and the hedging policy. An unchanged policy keeps its state."""
        if routing_policy != self.routing_policy:
            self.routing_policy, self._policy = (
                routing_policy,
                ROUTING_POLICIES[routing_policy](),
            )
        if hedging is None or self.hedging is None or hedging.after_s != self.hedging.after_s:
            self.hedging = hedging

    # --- availability and capacity ---------------------------------------------------------------

    def eligible_replicas(self) -> list[R]:
        """Return the replicas that may get requests and are not ejected by their circuit breakers."""
        schedulable = [r for r in self.replicas.values() if r.health.is_schedulable]
        if [r for r in schedulable if r.health.breaker.open_until is not None]:
            breakers = {replica.name: replica.health.breaker for replica in schedulable}
            return [self.replicas[name] for name in eligible_replicas(breakers)]
        return schedulable

    def is_available(self) -> bool:
        """Whether an eligible replica is not known to be down."""
        return any(not replica.health.is_down for replica in self.eligible_replicas())

    @property
    def is_out_of_service(self) -> bool:
        """Whether operators decided that no replica gets requests."""
        replicas = self.replicas.values()
        return bool(replicas) and all(replica.health.is_out_of_service for replica in replicas)

    def may_recover(self, now: float) -> bool:
        """Whether a replica is available or may be soon, so that requests wait instead of failing."""
        return (
            self.is_starting
            or any(now < replica.health.grace_ends_at for replica in self.replicas.values())
            or now < self._removed_may_recover_until
            or self.has_pending_replicas()
        )

    def retry_after_s(self, now: float) -> float:
        """Return the time in seconds for which all eligible replicas report to be full; 0 if one does not."""
        return min(
            (replica.health.retry_after_s(now) for replica in self.eligible_replicas()),
            default=0.0,
        )

    def reachable_loads(self) -> list[ReplicaLoad]:
        """Return the loads of the eligible replicas that are not down."""
        return [replica.load for replica in self.eligible_replicas() if not replica.health.is_down]

    def estimate_wait_s(self, queued: int, tier: int, now: float) -> float | None:
        """Estimate how long a new request would wait, here and at its replica, until its prompt is computed.

        A queued request waits until as many slots are free as requests wait. A slot is free after the mean output.
        Replicas that sleep wake up for it, so that it waits at most for this.

        Args:
            queued: Requests that wait for a slot.
            tier: Rank of the request's tier.
            now: Monotonic time.

        Returns:
            Seconds; None if no replica is ready or wakes up. One that is ejected or has refused requests as full is
            not ready.
        """
        ready = [
            replica
            for replica in self.replicas.values()
            if replica.health.status(now) is ReplicaStatus.READY
        ]
        free = [replica for replica in ready if replica.has_free_slot(tier, now)]
        output_tokens = max(1, round(self._mean_output_tokens.value))
        costs = [estimate_cost(each.load, 0, output_tokens, now) for each in free or ready]
        if not costs:
            return self.wake_s
        replica_queue_s = min(cost.queue_s for cost in costs)
        if free:
            return replica_queue_s
        slots_per_s = sum(
            replica.slots / max(cost.decode_s, MIN_DECODE_S)
            for replica, cost in zip(ready, costs, strict=True)
        )
        wait_s = replica_queue_s + (queued + 1) / slots_per_s
        return wait_s if self.wake_s is None else min(wait_s, self.wake_s)

    def has_ready(self, now: float, excluded: Collection[str] = ()) -> bool:
        """Whether a replica that is not `excluded` is ready, free or not, or replicas wake up for requests.

        Others may get requests if none is.
        """
        return self.wake_s is not None or any(
            replica.name not in excluded and replica.health.status(now) is ReplicaStatus.READY
            for replica in self.replicas.values()
        )

    def replicas_with_free_slots(self, tier: int, now: float) -> list[R]:
        """Return the eligible replicas with a free slot for this tier, without those in backoff."""
        return [replica for replica in self.eligible_replicas() if replica.has_free_slot(tier, now)]

    def has_healthy(self, tier: int, now: float) -> bool:
        """Whether a replica with a free slot has a closed circuit breaker. Others are used only if there is none."""
        return any(
            not replica.health.is_ejected for replica in self.replicas_with_free_slots(tier, now)
        )

    def free_slots(self, now: float) -> tuple[list[int], int]:
        """Count the free slots and all slots of this gateway at the eligible replicas.

        Returns:
            The free slots for each tier, and the number of all slots. At replicas shared with other gateways, both
            count only this gateway's share.
        """
        free_by_tier, free_for_all, total, lowest = [0 for _ in TIER_RANKS], 0, 0, TIER_RANKS[-1]
        for replica in self.eligible_replicas():
            slots, in_use = replica.slot_share(lowest, now), replica.load.slots_in_use
            total += slots
            if replica.slot_shares is None:
                if slots > in_use:
                    free_for_all += slots - in_use
                continue
            for tier in TIER_RANKS:
                free_by_tier[tier] += max(0, replica.slot_share(tier, now) - in_use)
        return [free + free_for_all for free in free_by_tier], total

    def count_room_for_moves(self, arithmetic_id: str, now: float) -> int:
        """Count the free slots of healthy replicas to which streams of this arithmetic may move."""
        return sum(
            max(0, replica.slot_share(TIER_RANKS[-1], now) - replica.load.slots_in_use)
            for replica in self.eligible_replicas()
            if replica.arithmetic_id == arithmetic_id
            and not replica.health.is_ejected
            and not replica.health.is_down
        )

    def can_resume(self, request: PlacementRequest, now: float) -> bool:
        """Whether a replica may continue the response of the request, now or within its grace period."""
        return any(
            now < replica.health.grace_ends_at
            and replica.has_arithmetic(request.arithmetic_id)
            and replica.name not in request.unsuitable
            for replica in self.replicas.values()
        )

    # --- takeover by the pool of the stable version ----------------------------------------------

    def find_takeover_reason(self, now: float) -> str:
        """Return why requests that do not run leave the pool; empty if they stay, as in a pool without takeover."""
        if self.takeover is None:
            return ""
        if self.is_withdrawn:
            return WITHDRAWN
        return UNAVAILABLE if not self.is_available() and self.takeover.may_recover(now) else ""

    def may_move(self, request: PlacementRequest, now: float) -> bool:
        """Whether a request without a running attempt may go to the pool that takes over.

        A response that has begun goes there only if it can be resumed exactly or starts from its beginning, or if no
        replica of this pool can resume it either. If the arithmetic of the response is unknown, the versions may differ
        in the model, so it stays.
        """
        takeover = self.takeover
        if takeover is None or not request.output_tokens:
            return takeover is not None
        return bool(request.arithmetic_id) and (
            not request.is_stream
            or takeover.can_resume(request, now)
            or not self.can_resume(request, now)
        )

    def can_be_taken_over(self, request: PlacementRequest, now: float) -> bool:
        """Whether a displaced request may move, and the pool that takes over has replicas or may have soon."""
        takeover = self.takeover
        return takeover is not None and takeover.may_recover(now) and self.may_move(request, now)

    def has_replica_left(self, request: PlacementRequest) -> bool:
        """Whether the pool has a replica for a displaced request, free or not, that has not failed it."""
        return not self.is_withdrawn and any(
            replica.name not in request.failed
            and replica.name not in request.unsuitable
            and not replica.health.is_down
            and replica.has_arithmetic(request.arithmetic_id)
            for replica in self.eligible_replicas()
        )

    # --- requests --------------------------------------------------------------------------------

    def on_dispatched(self, now: float) -> None:
        """Record a dispatched request. Retries and hedged requests are limited to a part of these."""
        self.retry_budget.record_request(now)
        if self.hedging is not None:
            self.hedging.record_request(now)

    def on_completed(self, output_tokens: float) -> None:
        """Record a completed response with its mean number of output tokens per choice."""
        self._mean_output_tokens.add(output_tokens)

    def expected_output_tokens(self, request: PlacementRequest) -> int:
        """Estimate the output tokens of a request from the mean of completed responses and its own limit."""
        mean, limit = round(self._mean_output_tokens.value), request.max_output_tokens
        return request.choice_count * (mean if limit is None else min(mean, limit))

    def select_replica(
        self,
        request: PlacementRequest,
        excluded: Collection[str],
        now: float,
        random_source: RandomSource,
    ) -> Selection | None:
        """Select the replica for a request with the pool's routing policy.

        A replica whose circuit breaker is not closed is selected only if no other has a free slot. `excluded` are
        the names of replicas that must not be selected.

        Returns:
            The selection; None if no replica has a free slot now.
        """
        selection = self._compare_replicas(request, excluded, now, random_source, self._policy)
        if selection is None:
            return None
        keys, selected = request.block_keys, selection.replica
        selected.prefix_index.on_prompt_sent(keys)
        if request.adapter:
            selected.adapters.setdefault(request.adapter, 0)
            if not request.records:
                self.adapter_rates.record(request.adapter, now)
        if keys and not request.records:
            self.recent_prompts.add(RecentPrompt(keys, request.tenant, now))
        if len(self.replicas) > MAX_COMPARED_REPLICAS:
            self._recent_placements.record_placement(keys, selected.name)
        selected.health.on_dispatched(now)
        return selection

    def preview_selection(
        self,
        request: PlacementRequest,
        excluded: Collection[str],
        now: float,
        random_source: RandomSource,
    ) -> Selection | None:
        """Return the comparison by which `select_replica` would select now, and change nothing."""
        policy = copy.copy(self._policy)
        return self._compare_replicas(request, excluded, now, random_source, policy)

    def _compare_replicas(
        self,
        request: PlacementRequest,
        excluded: Collection[str],
        now: float,
        random_source: RandomSource,
        policy: RoutingPolicy,
    ) -> Selection | None:
        """Compare the replicas with a free slot, and choose one; None if there is none. Only `policy` changes."""
        keys = request.block_keys
        selectable = self._selectable_replicas(keys, request.tier, excluded, now, random_source)
        if not selectable:
            return None
        adapter_s = dict[str, float]()
        if request.adapter:
            selectable = self._select_homes(request, selectable, now)
            adapter_s = self._estimate_adapter_loads(request.adapter, selectable)
        output_tokens = self.expected_output_tokens(request)
        candidates: list[RoutingCandidate] = []
        # Tokens that a resumed stream has to compute again, except where it ran, whose cache still has them.
        output_so_far = request.output_tokens
        last = request.last_attempt.replica.name if output_so_far and request.last_attempt else ""
        for replica in selectable:
            match, uncached = replica.prefix_index.match_prefix(keys), request.prompt_tokens
            if match:  # the keys differ if the tools do
                cached = len(match) * BLOCK_TOKENS + request.tool_tokens
                uncached = max(0, uncached - cached)
            if output_so_far and replica.name != last:
                uncached += output_so_far
            cost = estimate_cost(
                replica.load, uncached, output_tokens, now, adapter_s.get(replica.name, 0.0)
            )
            candidates.append(RoutingCandidate(replica.load, uncached, cost, match))
        affinity_key = request.session_id or (keys[0].hex() if keys else "")
        chosen = policy(candidates, affinity_key, random_source.random(), now)
        return Selection(self.replicas[chosen.load.name], chosen, candidates, output_tokens)

    def find_homes(self, adapter: str, min_homes: int, now: float) -> list[R]:
        """Return the eligible replicas that keep an adapter, by the rate of its requests."""
        return self._find_homes(adapter, min_homes, self.eligible_replicas(), now)

    def _select_homes(self, request: PlacementRequest, selectable: list[R], now: float) -> list[R]:
        """Return the homes of a request's adapter among the selectable replicas."""
        return self._find_homes(request.adapter, request.min_homes, selectable, now)

    def _find_homes(
        self, adapter: str, min_homes: int, replicas: Sequence[R], now: float
    ) -> list[R]:
        count = count_homes(self.adapter_rates.per_minute(adapter, now), min_homes)
        if count >= len(replicas):
            return [*replicas]
        loads = {each.name: each.load.slots_in_use / each.load.weight for each in replicas}
        homes = select_homes(adapter, loads, count)
        return [replica for replica in replicas if replica.name in homes]

    def _estimate_adapter_loads(self, adapter: str, replicas: Sequence[R]) -> dict[str, float]:
        """Return the seconds that loading an adapter takes, by the names of the replicas that lack it."""
        sizes = (each.adapter_size(adapter) for each in self.replicas.values())
        size = next(filter(None, sizes), 0)
        return {
            each.name: estimate_load_s(size, each.adapter_bytes_per_s)
            for each in replicas
            if not each.has_adapter(adapter)
        }

    def _selectable_replicas(
        self,
        block_keys: Sequence[bytes],
        tier: int,
        excluded: Collection[str],
        now: float,
        random_source: RandomSource,
    ) -> list[R]:
        """Return the replicas that may get a prompt, if possible only those with a closed circuit breaker.

        In a large pool the result comes from a sample, unless no replica of the sample qualifies.
        """
        eligible = self.eligible_replicas()
        if len(eligible) > MAX_COMPARED_REPLICAS and self.routing_policy not in FULL_SCAN_POLICIES:
            sample = self._sample_replicas(eligible, block_keys, random_source)
            healthy = [
                each
                for each in sample
                if each.name not in excluded
                and each.health.breaker.open_until is None
                and each.has_free_slot(tier, now)
            ]
            if healthy:
                return healthy
        selectable = [
            each for each in eligible if each.name not in excluded and each.has_free_slot(tier, now)
        ]
        return [each for each in selectable if each.health.breaker.open_until is None] or selectable

    def _sample_replicas(
        self, eligible: Sequence[R], block_keys: Sequence[bytes], random_source: RandomSource
    ) -> list[R]:
        """Return a random sample of a large pool, and the replica that last got most of the prompt."""
        start = int(random_source.random() * len(eligible))
        sample = [
            *eligible[start : start + MAX_COMPARED_REPLICAS],
            *eligible[: max(0, start + MAX_COMPARED_REPLICAS - len(eligible))],
        ]
        recent_name = self._recent_placements.find_replica(block_keys)
        sample += [replica for replica in eligible if replica.name == recent_name]
        return list({replica.name: replica for replica in sample}.values())
