"""Pauses of running streams: off draining replicas, and for requests that have waited too long."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from argosy.policy.fair_queue import BATCH_TIER
from argosy.policy.placement.attempt import Attempt
from argosy.policy.placement.messages import Pause
from argosy.policy.placement.pauses import choose_batch_pauses, choose_pauses
from argosy.policy.placement.pool_queue import PoolQueue
from argosy.policy.placement.replica import PlacementReplica
from argosy.policy.placement.request import PlacementRequest, RequestState
from argosy.policy.placement.timers import Timers

GIVE_WAY_INTERVAL_S = 0.1
"""How often streams are looked for that give way to waiting requests."""
MAX_PAUSES_AT_ONCE = 8
"""Maximum pauses each time. In a pool of a thousand replicas, the placement that follows each takes milliseconds."""


class StreamPauser:
    """Decides which streams pause, and when to look again.

    Args:
        timers: Timers of the core.
        emit: Receives the effects.
        dispatch: Assigns the slots that requests have given up.
    """

    def __init__(
        self,
        timers: Timers,
        emit: Callable[[Pause], None],
        dispatch: Callable[[PoolQueue, float], None],
    ) -> None:
        self._timers = timers
        self._emit = emit
        self._dispatch = dispatch

    def watch(self, queue: PoolQueue, tier: int, now: float) -> None:
        """Let streams give way once a request of this tier, which waits from now on, has waited long enough."""
        at = now + self._pause_batches(queue, now)
        settings = queue.pool.giving_way
        if settings is not None:
            at = min(at, now + settings.after_s[tier])
        if at < queue.give_way_at:
            self._timers.cancel(queue.give_way_timer)
            self._schedule(queue, at)

    def _schedule(self, queue: PoolQueue, at: float) -> None:
        queue.give_way_at = at
        queue.give_way_timer = self._timers.add(at, partial(self._give_way, queue))

    def _give_way(self, queue: PoolQueue, now: float) -> None:
        """Let streams pause for requests that have waited too long."""
        queue.give_way_at = math.inf
        again_after_s = self._pause_batches(queue, now)
        settings = queue.pool.giving_way
        if settings is None or not queue.queue:
            if again_after_s < math.inf:
                self._schedule(queue, now + again_after_s)
            return
        budget = queue.pause_budget.refill(settings.max_paused_share * queue.total_slots, now)
        max_pauses = min(budget, MAX_PAUSES_AT_ONCE)
        pauses = choose_pauses(queue, settings, max_pauses, now)
        gives_up = any(pause.attempt.slots > 1 for pause in pauses)
        for pause in pauses:
            if pause.attempt.slots > 1:
                queue.give_up_slot(pause.request, pause.waiting)
            elif (
                not gives_up
            ):  # else they follow after the next look, which sees who has got a slot
                self._pause(queue, pause)
        self._schedule(queue, now + GIVE_WAY_INTERVAL_S)
        if gives_up:
            self._dispatch(queue, now)

    def _pause_batches(self, queue: PoolQueue, now: float) -> float:
        """Let streams of batches pause for requests of other tiers. Returns the seconds until the next look."""
        if not (queue.running[BATCH_TIER] and queue.queue.highest_tier is not None):
            return math.inf
        for pause in choose_batch_pauses(queue, now):
            self._pause(queue, pause)
        return GIVE_WAY_INTERVAL_S

    def move_streams(self, queue: PoolQueue, now: float) -> bool:
        """Move streams off draining replicas, as far as other replicas of their arithmetic have room.

        Streams that would not be resumed exactly stay.

        Returns:
            Whether replicas that get no new requests still run some, so that it has to be called again.
        """
        pool = queue.pool
        leaving: list[PlacementReplica] = [
            replica
            for replica in pool.replicas.values()
            if replica.load.in_flight and not replica.health.is_schedulable
        ]
        sources = {
            replica
            for replica in leaving
            if replica.resumes_exactly and replica.health.must_move_streams(now)
        }
        room: dict[str, int] = {}
        for request in queue.running_requests() if sources else ():
            attempt = request.attempts[0]
            if attempt.replica in sources and _can_pause(request, attempt):
                arithmetic_id = attempt.replica.arithmetic_id
                if arithmetic_id not in room:
                    pools = (pool,) if pool.takeover is None else (pool, pool.takeover)
                    room[arithmetic_id] = sum(
                        each.count_room_for_moves(arithmetic_id, now) for each in pools
                    )
                if room[arithmetic_id] > 0:
                    room[arithmetic_id] -= 1
                    self._pause(queue, Pause(request, attempt, None))
        return bool(leaving)

    def _pause(self, queue: PoolQueue, pause: Pause) -> None:
        pause.attempt.is_pausing = True
        if pause.waiting is not None:
            queue.pause_budget.spend()
            queue.beneficiaries[pause.waiting] = None
        self._emit(pause)


def _can_pause(request: PlacementRequest, attempt: Attempt) -> bool:
    """Whether the attempt is a stream that runs and does not pause already."""
    return request.state is RequestState.STREAMING and attempt.is_stream and not attempt.is_pausing
