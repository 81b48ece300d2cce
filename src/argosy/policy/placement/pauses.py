"""Choice of the streams that pause for requests that have waited too long (see `giving_way`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from argosy.policy.fair_queue import BATCH_TIER, LOWEST_TIER
from argosy.policy.placement.attempt import Attempt
from argosy.policy.placement.giving_way import GivingWay, is_pausable_at
from argosy.policy.placement.messages import Pause
from argosy.policy.placement.pool_queue import PoolQueue
from argosy.policy.placement.replica import TIER_RANKS
from argosy.policy.placement.request import PlacementRequest, RequestState


def expected_remaining_tokens(request: PlacementRequest, expected_tokens: int) -> float:
    """Estimate how many more tokens a response will have of which `expected_tokens` were expected at first.

    A response that is longer than expected is assumed to have half of its tokens.
    """
    done, limit = request.output_tokens, request.max_output_tokens
    remaining = expected_tokens - done if done < expected_tokens else done
    return (
        remaining if limit is None else min(remaining, max(0, limit * request.choice_count - done))
    )


def choose_pauses(
    queue: PoolQueue, settings: GivingWay, max_pauses: int, now: float
) -> list[Pause]:
    """Choose the streams of a pool that pause now.

    Of each waiting tenant the next request counts. Higher tiers come first, then tenants with few streams per weight.
    """
    waiting = [
        queued
        for tier in TIER_RANKS
        for queued in queue.queue.next_requests(tier)
        if now - queued.arrived_at >= settings.after_s[tier] and queued not in queue.beneficiaries
    ]
    if not (waiting and max_pauses):
        return []
    plan = PausePlan(queue, settings, now)
    waiting.sort(key=lambda each: (each.tier, plan.load(each.tier, each.tenant), each.arrived_at))

    def may_wait(queued: PlacementRequest) -> bool:
        """Whether an expected slot may still come. It has not if the request has waited for twice the time."""
        return now - queued.arrived_at < 2 * settings.after_s[queued.tier]

    tiers = {queued.tier for queued in waiting}
    expected_slots = _count_expected_slots(
        queue, {queued.tier for queued in waiting if may_wait(queued)}, settings.after_s, now
    )
    num_expected = len(queue.beneficiaries)  # other streams pause for these
    pauses: list[Pause] = []
    for request in waiting:
        tier = request.tier
        if may_wait(request) and num_expected < expected_slots[tier]:
            num_expected += 1
            continue
        pause = plan.choose(request) if tier in tiers else None
        if pause is not None:
            pauses.append(pause)
            if len(pauses) == max_pauses:
                break
        elif not (request.arithmetic_id or request.unsuitable):
            tiers.discard(tier)  # the tenants that follow have even less of a claim
    return pauses


def choose_batch_pauses(queue: PoolQueue, now: float) -> list[Pause]:
    """Choose the streams of batches that pause now: one for each waiting request above batches without a free slot.

    Those with the fewest tokens to compute again come first.
    """
    running = [
        request
        for streams in queue.running[BATCH_TIER].values()
        for request in streams.requests
        if request.state is RequestState.STREAMING and request.attempts[0].is_stream
    ]
    pausing = sum(request.attempts[0].is_pausing for request in running)
    candidates = [
        request
        for request in running
        if not request.attempts[0].is_pausing
        and request.attempts[0].slots == 1
        and request.attempts[0].replica.health.is_schedulable
        and is_pausable_at(request, request.attempts[0].replica)
    ]
    candidates.sort(key=_pause_cost)
    free_slots, _ = queue.pool.free_slots(now)
    count = max(0, queue.queue.count_up_to(LOWEST_TIER) - pausing - free_slots[LOWEST_TIER])
    return [Pause(request, request.attempts[0], None) for request in candidates[:count]]


def _count_expected_slots(
    queue: PoolQueue, tiers: Collection[int], within_s: Sequence[float], now: float
) -> dict[int, int]:
    """Count the slots that are expected to become free for each of `tiers` within its time by themselves.

    Slots of higher tiers do not count, because the next requests of these tiers take them. In a pool of a thousand
    replicas this takes milliseconds, so it is called only for tiers whose requests may still wait.
    """
    counts = {tier: -missing for tier, missing in queue.missing_slots(tiers, now).items()}
    expected_output_tokens = queue.pool.expected_output_tokens
    for running_tier, tenants in enumerate(queue.running):
        profiting = [tier for tier in tiers if tier <= running_tier]
        for streams in tenants.values() if profiting else ():
            for request in streams.requests:
                attempt = request.attempts[0]
                if attempt.record.first_token_at is None or attempt.is_pausing:
                    continue
                expected = expected_output_tokens(request)
                tokens = expected_remaining_tokens(request, expected) / request.choice_count
                end_s = tokens * attempt.replica.load.inter_token_s
                for tier in profiting:
                    counts[tier] += request.slots * (end_s <= within_s[tier])
    return counts


class PausePlan:
    """The streams that are to pause at one moment, chosen one after the other.

    Args:
        queue: Requests that wait and run.
        settings: The pool's settings.
        now: Monotonic time.
    """

    def __init__(self, queue: PoolQueue, settings: GivingWay, now: float) -> None:
        self._settings = settings
        self._running = queue.running
        self._now = now
        weights = {
            (tier, name): streams.weight
            for tier, tenants in enumerate(queue.running)
            for name, streams in tenants.items()
        }
        self._counts = {(tier, name): queue.running[tier][name].slots for tier, name in weights}
        """Slots of each tenant after the pauses chosen so far and the starts that these permit."""
        for tier in TIER_RANKS:
            for queued in queue.queue.next_requests(tier):
                weights.setdefault((tier, queued.tenant), queued.weight)
        self._slots_per_weight = queue.total_slots / sum(weights.values())
        self._weights = weights
        for request in queue.beneficiaries:
            key = request.tier, request.tenant
            self._counts[key] = self._counts.get(key, 0) + 1
        self._chosen: set[PlacementRequest] = set()
        self._freed: dict[str, int] = {}
        """Slots that the pauses chosen so far free at each replica."""
        self._given_up: dict[PlacementRequest, int] = {}
        """Slots that requests with several have to give up so far."""

    def load(self, tier: int, tenant: str) -> float:
        """Return the slots that a tenant takes per weight, with those for which others pause already."""
        return self._counts.get((tier, tenant), 0) / self._weights[tier, tenant]

    def choose(self, waiting: PlacementRequest) -> Pause | None:
        """Choose the stream that pauses for a waiting request, or none if no stream has to."""
        for tier in range(BATCH_TIER, waiting.tier - 1, -1):
            tenants = self._running[tier]
            for name in sorted(tenants, key=lambda name: self.load(tier, name), reverse=True):
                if not self._may_lose(tier, name, waiting):
                    continue
                candidates = [
                    request
                    for request in tenants[name].requests
                    if self._is_pausable(request, waiting)
                ]
                if candidates:
                    victim = min(
                        candidates,
                        key=lambda each: (-self._remaining_slots(each), *_pause_cost(each)),
                    )
                    return self._pause(victim, tier, waiting)
        return None

    def _pause(self, victim: PlacementRequest, tier: int, waiting: PlacementRequest) -> Pause:
        attempt = victim.attempts[0]
        if self._remaining_slots(victim) > 1:
            self._given_up[victim] = self._given_up.get(victim, 0) + 1
        else:
            self._chosen.add(victim)
        self._counts[tier, victim.tenant] -= 1
        key = waiting.tier, waiting.tenant
        self._counts[key] = self._counts.get(key, 0) + 1
        name = attempt.replica.name
        self._freed[name] = self._freed.get(name, 0) + 1
        return Pause(victim, attempt, waiting)

    def _may_lose(self, tier: int, name: str, waiting: PlacementRequest) -> bool:
        """Whether a tenant may lose one of its streams to the waiting request."""
        count, weight = self._counts[tier, name], self._weights[tier, name]
        if tier > waiting.tier:
            return count > 1 or self._slots_per_weight * weight < 1.0
        own = self._counts.get((tier, waiting.tenant), 0)
        return name != waiting.tenant and (count - 1) * waiting.weight >= (own + 1) * weight

    def _remaining_slots(self, request: PlacementRequest) -> int:
        """Return the slots of a request after the pauses chosen so far. One is left in the end, or paused."""
        slots = min(request.slots, request.attempts[0].slots)
        return slots - self._given_up.get(request, 0)

    def _is_pausable(self, request: PlacementRequest, waiting: PlacementRequest) -> bool:
        """Whether the waiting request can use a slot that the request gives up, or leaves when it pauses."""
        attempt = request.attempts[0]
        replica = attempt.replica
        if request in self._chosen or attempt.is_pausing:
            return False
        can_give_up = replica.is_native and self._remaining_slots(request) > 1
        if not (can_give_up or self._can_pause(request, attempt)):
            return False
        return (
            replica.health.is_schedulable
            and replica.has_arithmetic(waiting.arithmetic_id)
            and replica.name not in waiting.unsuitable
            and replica.load.slots_in_use - self._freed.get(replica.name, 0)
            <= replica.slot_share(waiting.tier, self._now)
        )

    def _can_pause(self, request: PlacementRequest, attempt: Attempt) -> bool:
        """Whether a stream can be resumed, and has had its slice, or has waited as long in the replica's own queue."""
        if request.state is RequestState.STREAMING and attempt.is_stream:
            began_at = attempt.record.first_token_at
        elif attempt.replica.load.waiting and len(request.attempts) == 1:
            began_at = attempt.record.sent_at
        else:
            return False
        return (
            began_at is not None
            and self._now - began_at >= self._settings.min_slice_s
            and is_pausable_at(request, attempt.replica)
        )


def _pause_cost(request: PlacementRequest) -> tuple[bool, float]:
    """Return what a pause costs: tokens to compute again, or nothing, most likely, for those that were sent last."""
    if request.state is RequestState.STREAMING:
        return True, request.prompt_tokens + request.output_tokens
    return False, -(request.attempts[0].record.sent_at or 0.0)
