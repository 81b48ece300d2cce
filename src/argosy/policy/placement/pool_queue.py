"""Requests of one pool in placement: who waits, who occupies slots, and who is next."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from argosy.policy.concurrency_slots import (
    RECENT_WINDOW_S,
    lowest_admissible_tier,
    no_reservation_active,
    reserved_slots,
)
from argosy.policy.fair_queue import BATCH_TIER, DispatchQueue
from argosy.policy.load_shedding import is_tenant_within_share, is_tier_admitted, saturation
from argosy.policy.placement.attempt import Attempt
from argosy.policy.placement.giving_way import (
    PauseBudget,
    TenantStreams,
    is_pausable_at,
)
from argosy.policy.placement.messages import RefusalReason
from argosy.policy.placement.pool import PlacementPool, RandomSource, Selection
from argosy.policy.placement.replica import TIER_RANKS, PlacementReplica
from argosy.policy.placement.request import PlacementRequest
from argosy.policy.virtual_token_counters import weighted_tokens

S = TypeVar("S")
DisplacedKey = tuple[int, frozenset[str]]
"""Tier and names of the replicas to exclude. Displaced requests with equal keys can use the same replicas."""


class QueueLimits(msgspec.Struct, frozen=True):
    """Limits of the queue in front of each pool."""

    max_requests: int = 5000
    max_bytes: int = 1 << 30
    timeout_s: float = 60.0


class Arrival(NamedTuple, Generic[S]):
    """Decision about a request that arrives. Without a replica and a refusal it waits."""

    selected: S | None = None
    """Decision about its replica."""
    refusal: tuple[RefusalReason, float | None] | None = None
    """Why it may not wait, with the time until it may."""
    takes_over: PlacementPool[Any] | None = None
    """Pool that serves it instead of refusing it."""


class PoolQueue:
    """Queue and slots of one pool."""

    def __init__(self, pool: PlacementPool[Any], limits: QueueLimits) -> None:
        self.pool = pool
        self._limits = limits
        self.queue: DispatchQueue[PlacementRequest] = DispatchQueue(limits.timeout_s)
        self.running: tuple[dict[str, TenantStreams], ...] = tuple({} for _ in TIER_RANKS)
        """Requests that occupy slots, by tier and tenant."""
        self.running_by_tier = [0] * len(TIER_RANKS)
        """Requests from their first attempt to their end, without paused ones."""
        self._last_request_at = [-math.inf] * len(TIER_RANKS)
        """Monotonic arrival time of each tier's latest request."""
        self.displaced: dict[DisplacedKey, OrderedDict[PlacementRequest, None]] = {}
        """Requests whose replica failed, in the order of the failures."""
        self._displaced_numbers = itertools.count(1)
        self.beneficiaries: dict[PlacementRequest, None] = {}
        """Waiting requests for which streams pause. They get the next slots."""
        self.pause_budget = PauseBudget()
        self.give_way_at = math.inf
        """When streams are looked for next that give way."""
        self.give_way_timer = 0
        self.has_fallbacks = False
        """Whether requests have waited that other models may answer."""
        self.total_slots = 0
        """Slots of the pool when they were last counted."""
        self.poll_at = math.inf
        """When the pool is looked at again without an event."""

    def __len__(self) -> int:
        return len(self.queue)

    @property
    def is_idle(self) -> bool:
        """Whether no request of the pool waits."""
        return not (self.queue or self.displaced)

    def served_tier(self, now: float) -> int | None:
        """Return the rank of the highest tier above batches with running or recent requests; None if there is none."""
        return next(
            (
                tier
                for tier in TIER_RANKS[:BATCH_TIER]
                if self.running_by_tier[tier] or now - self._last_request_at[tier] < RECENT_WINDOW_S
            ),
            None,
        )

    # --- admission -------------------------------------------------------------------------------

    def record_arrival(self, request: PlacementRequest, now: float) -> None:
        """Record the arrival of a request, for which slots of its tier are reserved."""
        self._last_request_at[request.tier] = now

    def decide_arrival(
        self, request: PlacementRequest, now: float, select: Callable[[], S | None]
    ) -> Arrival[S]:
        """Decide about a request that arrives and that no takeover concerns.

        Args:
            request: The request.
            now: Monotonic time.
            select: Selects a replica of the pool; returns None if none has a free slot.
        """
        pool = self.pool
        if len(pool.poison_requests):
            wait_s = pool.poison_requests.retry_after_s(request.compute_digest(), now)
            if wait_s > 0:
                return Arrival(refusal=(RefusalReason.QUARANTINED, wait_s))
        is_skipping_queue = not self.queue and (
            no_reservation_active(request.tier, self._last_request_at, now)
            or request.tier <= self.lowest_admissible_tier(*pool.free_slots(now), now)
        )
        if is_skipping_queue:
            selected = select()
            if selected is not None:
                return Arrival(selected)
        refusal = self._find_refusal(request, now)
        return Arrival(refusal=refusal, takes_over=None if refusal is None else pool.takeover)

    def _find_refusal(
        self, request: PlacementRequest, now: float
    ) -> tuple[RefusalReason, float | None] | None:
        """Return why a request may not join the queue, with the time to wait; None if it may."""
        limits, queue, tier, pool = self._limits, self.queue, request.tier, self.pool
        if not pool.may_recover(now):
            return RefusalReason.NO_REPLICA, None
        if pool.is_starting and request.start_wait_s <= 0.0:
            return RefusalReason.STARTING, None
        retry_after_s = pool.retry_after_s(now)
        if retry_after_s > limits.timeout_s:
            return RefusalReason.REPLICAS_FULL, retry_after_s
        backlog = queue.tenant_backlog(tier, request.tenant)
        if queue.size_bytes + request.size_bytes > limits.max_bytes:
            return RefusalReason.QUEUE_FULL, None
        if not (
            is_tenant_within_share(tier, backlog.count, len(queue), limits.max_requests)
            and is_tenant_within_share(tier, backlog.size_bytes, queue.size_bytes, limits.max_bytes)
        ):
            return RefusalReason.TENANT_SHARE_FULL, None
        if pool.is_starting:
            return None  # how long the queue has waited says nothing about the load
        waited_s = max(0.0, now - backlog.next_arrived_at)
        if not is_tier_admitted(
            tier,
            saturation(waited_s / limits.timeout_s, pool.reachable_loads(), request.tenant),
        ):
            return RefusalReason.RESERVED_FOR_HIGHER_TIERS, None
        return None

    def lowest_admissible_tier(
        self, free_slots: Sequence[int], total_slots: int, now: float
    ) -> int:
        """Return the rank of the lowest tier that may use a slot now, or -1 if none may."""
        return lowest_admissible_tier(
            free_slots, total_slots, self.running_by_tier, self._last_request_at, now
        )

    def select_hedge(
        self,
        request: PlacementRequest,
        silent: PlacementReplica,
        now: float,
        random_source: RandomSource,
    ) -> Selection | None:
        """Select a second replica that streams and has not failed the request, if capacity can be spared.

        Its arithmetic must be that of the silent one, so that the output does not depend on which of them is faster.

        Returns:
            The selection, or None if hedging is off or no capacity can be spared.
        """
        pool, tier = self.pool, request.tier
        hedging = pool.hedging
        if hedging is None:
            return None
        excluded = {silent.name} | request.failed
        excluded |= {
            replica.name
            for replica in pool.replicas.values()
            if replica.arithmetic_id != silent.arithmetic_id or not request.uses_stream(replica)
        }
        free_slots, total_slots = pool.free_slots(now)
        if tier > self.lowest_admissible_tier(free_slots, total_slots, now) or all(
            replica.name in excluded for replica in pool.replicas_with_free_slots(tier, now)
        ):
            return None
        is_affordable = hedging.try_acquire(
            now,
            queued=len(self),
            free_slots=free_slots[tier],
            total_slots=total_slots,
            saturation=saturation(0.0, pool.reachable_loads()),
        )
        return pool.select_replica(request, excluded, now, random_source) if is_affordable else None

    def missing_slots(self, tiers: Collection[int], now: float) -> dict[int, int]:
        """Return how many slots must become free for each tier before one is free that is not reserved."""
        if not tiers:
            return {}
        free_slots, total_slots = self.pool.free_slots(now)
        running, last_request_at = self.running_by_tier, self._last_request_at
        return {
            tier: max(
                0,
                reserved_slots(tier, total_slots, running, last_request_at, now) - free_slots[tier],
            )
            for tier in tiers
        }

    # --- waiting ---------------------------------------------------------------------------------

    def push(self, request: PlacementRequest, now: float, *, is_paused: bool = False) -> None:
        """Let a request wait. A paused one precedes the other requests of its tenant, and pays no prompt again."""
        expected_tokens = self.pool.expected_output_tokens(request)
        if is_paused:
            cost = weighted_tokens(0, max(1, expected_tokens - request.output_tokens))
        else:
            cost = weighted_tokens(request.prompt_tokens, expected_tokens)
        request.cost_tokens, request.arrived_at, request.is_first = cost, now, is_paused
        self.queue.push(request)
        if request.queued_at is None:
            request.queued_at = now
            request.queued_ahead = self.queue.count_ahead(request)

    def withdraw(self, request: PlacementRequest) -> None:
        """Remove a request from where it waits, if it does."""
        if self.queue.remove(request):
            self.beneficiaries.pop(request, None)
        elif request.displaced_key is not None:
            self.withdraw_displaced(request)

    def pop(self, now: float) -> PlacementRequest | None:
        """Dequeue the next request that may use a free slot; None if there is none.

        Streams have paused for beneficiaries, so these come first, whatever is reserved.
        """
        free_slots = self._count_slots(now)
        for request in self.beneficiaries:
            if free_slots[request.tier] > 0 and request.is_queued:
                self.queue.take(request)
                del self.beneficiaries[request]
                return request
        lowest_tier = self.lowest_admissible_tier(free_slots, self.total_slots, now)
        queued = self.queue.pop(now, lowest_tier, sum(map(bool, free_slots)) - 1)
        if queued is None:
            return None
        self.beneficiaries.pop(queued, None)
        return queued

    def pop_any(self, now: float) -> PlacementRequest | None:
        """Dequeue the next request, whether a slot is free or not; None if none waits."""
        queued = self.queue.pop(now)
        if queued is not None:
            self.beneficiaries.pop(queued, None)
        return queued

    # --- displaced requests ----------------------------------------------------------------------

    def add_displaced(self, request: PlacementRequest) -> None:
        """Let a request wait for another replica than those that failed it or cannot resume it."""
        request.displaced_number = request.displaced_number or next(self._displaced_numbers)
        key = request.tier, frozenset(request.failed | request.unsuitable)
        request.displaced_key = key
        self.displaced.setdefault(key, OrderedDict())[request] = None

    def withdraw_displaced(self, request: PlacementRequest) -> None:
        """Remove a request from the displaced ones, if it is among them."""
        key, request.displaced_key = request.displaced_key, None
        if key is not None:
            group = self.displaced[key]
            del group[request]
            if not group:
                del self.displaced[key]

    def displaced_in_order(self) -> Iterator[tuple[PlacementRequest, frozenset[str]]]:
        """Yield displaced requests with the replicas to exclude, oldest failure first.

        There may be thousands. If a request is still there when the next one is asked for, it found no replica, and the
        others of its group are skipped.
        """
        heads = [(next(iter(group)).displaced_number, key) for key, group in self.displaced.items()]
        heapq.heapify(heads)
        while heads:
            _, key = heapq.heappop(heads)
            request = next(iter(self.displaced[key]))
            yield request, key[1]
            group = self.displaced.get(key)
            if group and next(iter(group)) is not request:
                heapq.heappush(heads, (next(iter(group)).displaced_number, key))

    # --- slots and service -----------------------------------------------------------------------

    def start(self, request: PlacementRequest) -> None:
        """Count a request that was taken from the queue, or did not have to wait, and prepay its expected cost."""
        if request.is_charged:
            request.is_charged = False
            request.unspent_tokens = request.cost_tokens
            if not request.output_tokens:
                prompt_cost = weighted_tokens(request.prompt_tokens, 0)
                request.unspent_prompt = min(request.cost_tokens, prompt_cost)
        request.is_placed = True
        self.running_by_tier[request.tier] += 1

    def stop(self, request: PlacementRequest) -> None:
        """Count a request no more, and refund what it did not consume."""
        if request.is_placed:
            request.is_placed = False
            self.running_by_tier[request.tier] -= 1
            if request.unspent_tokens:
                self._charge(request, request.unspent_prompt - request.unspent_tokens)
                request.unspent_tokens = request.unspent_prompt = 0.0

    def record_service(self, request: PlacementRequest, service: float) -> None:
        """Charge the tenant for delivered tokens: what the request has not prepaid."""
        spent = min(request.unspent_tokens, service)
        request.unspent_tokens -= spent
        request.unspent_prompt = 0.0
        self._charge(request, service - spent)

    def occupy_slot(self, request: PlacementRequest, attempt: Attempt) -> None:
        """Record that the first running attempt of a request occupies a slot."""
        tenants = self.running[request.tier]
        streams = tenants.get(request.tenant)
        if streams is None:
            streams = tenants[request.tenant] = TenantStreams(request.weight)
        streams.weight = request.weight
        is_fixed = not is_pausable_at(request, attempt.replica)
        streams.requests[request] = is_fixed
        request.slots = attempt.slots
        streams.slots += request.slots
        if is_fixed:
            streams.fixed_slots += request.slots
            self._update_hold(request.tier, request.tenant, streams)

    def vacate_slot(self, request: PlacementRequest) -> None:
        """Record that a request occupies no slot any more."""
        tenants = self.running[request.tier]
        streams = tenants[request.tenant]
        streams.slots -= request.slots
        if streams.requests.pop(request):
            streams.fixed_slots -= request.slots
            self._update_hold(request.tier, request.tenant, streams)
        request.slots = 0
        if not streams.requests:
            del tenants[request.tenant]

    def give_up_slot(self, request: PlacementRequest, waiting: PlacementRequest | None) -> None:
        """Let a waiting request have a slot of another one, whose sequences the replica's engine runs in the others."""
        if waiting is not None:
            self.beneficiaries[waiting] = None
        attempt, streams = request.attempts[0], self.running[request.tier][request.tenant]
        attempt.slots -= 1
        attempt.replica.load.extra_slots -= 1
        request.slots -= 1
        streams.slots -= 1
        if streams.requests[request]:
            streams.fixed_slots -= 1
            self._update_hold(request.tier, request.tenant, streams)

    def running_requests(self) -> Iterator[PlacementRequest]:
        """Yield the requests that occupy slots."""
        for tenants in self.running:
            for streams in tenants.values():
                yield from streams.requests

    def count_running_by_tenant(self) -> dict[str, int]:
        """Return the number of requests of each tenant that occupy slots."""
        counts: dict[str, int] = {}
        for tenants in self.running:
            for tenant, streams in tenants.items():
                counts[tenant] = counts.get(tenant, 0) + len(streams.requests)
        return counts

    def _count_slots(self, now: float) -> list[int]:
        """Return the free slots for each tier, and apply the shares of tenants if the number of slots has changed."""
        free_slots, total_slots = self.pool.free_slots(now)
        if total_slots != self.total_slots:
            self.total_slots = total_slots
            for tier, tenants in enumerate(self.running):
                for name, streams in tenants.items():
                    if streams.fixed_slots:
                        self._update_hold(tier, name, streams)
        return free_slots

    def _update_hold(self, tier: int, tenant: str, streams: TenantStreams) -> None:
        """Let other tenants go first while a tenant holds too many slots with streams that cannot be paused."""
        settings = self.pool.giving_way
        is_held = (
            settings is not None
            and self.total_slots > 0
            and streams.fixed_slots >= max(1.0, settings.max_share * self.total_slots)
        )
        if is_held != streams.is_held:
            streams.is_held = is_held
            self.queue.hold_tenant(tier, tenant, is_held=is_held)

    def _charge(self, request: PlacementRequest, cost: float) -> None:
        if cost:
            self.queue.charge_tenant(request.tier, request.tenant, request.weight, cost)
