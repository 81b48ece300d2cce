"""The placement core: the life of every request between its admission and the end of its response.

    events  --->  PlacementCore  --->  effects

A request waits in the queue of its pool, is sent to a replica, and streams. If its replica fails or drains, it is
displaced to another one; if others have waited too long, it pauses and resumes later. The core decides all of this from
the events that a driver feeds it, at the times that come with them. The same events give the same effects.

The driver owns sockets, journals and timers. A simulator drives the same core with a virtual clock.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from argosy.policy.breaker import AttemptOutcome
from argosy.policy.placement.attempt import (
    Attempt,
    AttemptEnding,
    AttemptMode,
    AttemptRecord,
    kept_costs,
)
from argosy.policy.placement.failures import record_failure, upstream_failed
from argosy.policy.placement.messages import (
    Arrived,
    AttemptAnswered,
    AttemptEnded,
    Cancel,
    CapacityChanged,
    Effect,
    Event,
    Move,
    PoolRemoved,
    RefusalReason,
    Refuse,
    RequestEnded,
    Send,
    Tick,
)
from argosy.policy.placement.pool import NONE_LEFT, PlacementPool, RandomSource, Selection
from argosy.policy.placement.pool_queue import PoolQueue, QueueLimits
from argosy.policy.placement.preview import PlacementPreview, preview_placement
from argosy.policy.placement.request import PlacementRequest, RequestState
from argosy.policy.placement.stream_pauser import StreamPauser
from argosy.policy.placement.timers import Timers
from argosy.policy.retries import backoff_s
from argosy.policy.wake_at import WakeAt

POLL_INTERVAL_S = 1.0
"""How often a pool with waiting requests or draining replicas is looked at, because some capacity returns with time
alone (backoff, probes)."""

_Pool = PlacementPool[Any]


class PlacementLimits(msgspec.Struct, frozen=True):
    """Limits that all pools share."""

    queue: QueueLimits = QueueLimits()
    failover_timeout_s: float = 30.0
    """How long a request whose replica failed waits for another one."""
    max_failed_attempts: int = 4
    """Maximum error responses of live replicas, or replicas lost without progress, before the request fails."""


class PlacementCore:
    """Places the requests of all pools of one gateway."""

    def __init__(self, limits: PlacementLimits, random_source: RandomSource) -> None:
        """Create a core without requests.

        Args:
            limits: Limits that all pools share.
            random_source: Source of all random numbers.
        """
        self._limits = limits
        self._random = random_source
        self._queues: dict[_Pool, PoolQueue] = {}
        """Queues of the pools that have received requests."""
        self._requests: dict[PlacementRequest, PoolQueue] = {}
        """The requests that have not ended, with the queues of their pools."""
        self._timers = Timers()
        self._wake_at = math.inf
        """The time of the last `WakeAt`, unless it has passed."""
        self._effects: list[Effect] = []
        self._pauser = StreamPauser(self._timers, self._emit, self._dispatch)
        self._handlers: Mapping[type[Event], Callable[[Any, float], None]] = {
            Arrived: self._on_arrived,
            AttemptAnswered: self._on_attempt_answered,
            AttemptEnded: self._on_attempt_ended,
            RequestEnded: self._on_request_ended,
            CapacityChanged: self._on_capacity_changed,
            PoolRemoved: self._on_pool_removed,
            Tick: self._on_tick,
        }

    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        """Apply an event, and return what the driver has to do, in this order.

        Raises:
            PlacementError: The event does not fit the state of its request.
        """
        self._handlers[type(event)](event, now)
        next_at = self._timers.next_at
        if next_at < self._wake_at:
            self._wake_at = next_at
            self._emit(WakeAt(next_at))
        if not self._effects:
            return ()
        effects, self._effects = self._effects, []
        return effects

    def _emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    @property
    def queues(self) -> Mapping[_Pool, PoolQueue]:
        """Queues of the pools that have received requests."""
        return self._queues

    @property
    def requests(self) -> Mapping[PlacementRequest, PoolQueue]:
        """The requests that have not ended, with the queues of their pools."""
        return self._requests

    def preview(self, request: PlacementRequest, pool: _Pool, now: float) -> PlacementPreview:
        """Return what would happen to a request that arrived at a pool now, and change nothing.

        The random numbers are those that the next request gets.
        """

        def find_queue(pool: _Pool) -> PoolQueue:
            queue = self._queues.get(pool)
            return PoolQueue(pool, self._limits.queue) if queue is None else queue

        return preview_placement(request, pool, find_queue, now, copy.copy(self._random))

    def record_progress(
        self, request: PlacementRequest, output_tokens: int, service: float
    ) -> None:
        """Record that tokens were delivered since the last call, in batches and not for each token.

        Args:
            request: The request.
            output_tokens: Output tokens of the whole response so far.
            service: Service since the last call (see `weighted_tokens`); negative to correct an estimate.
        """
        request.output_tokens = output_tokens
        self._requests[request].record_service(request, service)

    # --- arrival and queue -----------------------------------------------------------------------

    def _on_arrived(self, event: Arrived, now: float) -> None:
        self._arrive(event.request, event.pool, now)

    def _arrive(self, request: PlacementRequest, pool: _Pool, now: float) -> None:
        queue = self._requests[request] = self._get_queue(pool)
        takeover_reason = pool.find_takeover_reason(now)
        if pool.takeover is not None and takeover_reason:
            self._emit(Move(request, pool.takeover, takeover_reason))
            self._arrive(request, pool.takeover, now)
            return
        queue.record_arrival(request, now)
        select = partial(pool.select_replica, request, frozenset(), now, self._random)
        arrival = queue.decide_arrival(request, now, select)
        if arrival.selected is not None:
            self._place(request, arrival.selected, queue, now)
            return
        if arrival.refusal is not None and arrival.takes_over is not None:
            self._emit(Move(request, arrival.takes_over, arrival.refusal[0].value))
            self._arrive(request, arrival.takes_over, now)
            return
        if arrival.refusal is not None:
            self._refuse(Refuse(request, *arrival.refusal))
            return
        request.move_to(RequestState.WAITING)
        queue.has_fallbacks |= request.can_fall_back is not None
        queue.push(request, now)
        self._set_wait_timer(request, pool, now)
        self._pauser.watch(queue, request.tier, now)
        self._dispatch(queue, now)

    def _get_queue(self, pool: _Pool) -> PoolQueue:
        queue = self._queues.get(pool)
        if queue is None:
            queue = self._queues[pool] = PoolQueue(pool, self._limits.queue)
        return queue

    def _set_wait_timer(self, request: PlacementRequest, pool: _Pool, now: float) -> None:
        # The time is checked at least this often, because a start may end and a request may move meanwhile.
        check_at = min(self._find_wait_end(request, pool), now + self._limits.queue.timeout_s)
        request.timer = self._timers.add(check_at, partial(self._on_queue_timeout, request))

    def _find_wait_end(self, request: PlacementRequest, pool: _Pool) -> float:
        """Return until when a request may wait. The limit of the queue does not include the start of the pool."""
        queued_at = request.queued_at or 0.0
        if pool.is_starting:
            return queued_at + request.start_wait_s
        return max(queued_at, pool.started_at) + self._limits.queue.timeout_s

    def _on_queue_timeout(self, request: PlacementRequest, now: float) -> None:
        queue = self._requests[request]
        pool = queue.pool
        if now < self._find_wait_end(request, pool):
            self._set_wait_timer(request, pool, now)
            return
        queue.withdraw(request)
        reason = RefusalReason.STARTING
        if not pool.is_starting:
            is_available = pool.is_available()
            reason = RefusalReason.QUEUE_TIMEOUT if is_available else RefusalReason.NO_REPLICA
        self._refuse(Refuse(request, reason))

    def _dispatch(self, queue: PoolQueue, now: float) -> None:
        """Assign free slots to displaced and queued requests."""
        if queue.is_idle:
            return
        pool = queue.pool
        takeover_reason = pool.find_takeover_reason(now)
        if takeover_reason:
            self._move_waiting(queue, takeover_reason, now)
        if queue.displaced:
            self._dispatch_displaced(queue, now)
        if queue.has_fallbacks and queue.queue and not pool.has_ready(now):
            self._release_to_fallbacks(queue, now)
        while queue.queue:
            request = queue.pop(now)
            if request is None:
                if not pool.may_recover(now):
                    self._refuse_waiting(queue, now)
                break
            selection = pool.select_replica(request, self._excluded(request), now, self._random)
            if selection is not None:
                self._place(request, selection, queue, now)
            else:  # a slot is free, but not where the stream can resume
                queue.start(request)
                request.move_to(RequestState.DISPLACED)
                self._seek_replica(request, queue, now)
        if not queue.is_idle:
            self._schedule_poll(queue, now)

    def _dispatch_displaced(self, queue: PoolQueue, now: float) -> None:
        """Assign free slots to displaced requests, oldest failure first."""
        for request, excluded in queue.displaced_in_order():
            if not any(queue.pool.free_slots(now)[0]):
                return
            selection = queue.pool.select_replica(request, excluded, now, self._random)
            if selection is not None:
                queue.withdraw_displaced(request)
                self._start_attempt(request, selection, queue, now)

    def _move_waiting(self, queue: PoolQueue, reason: str, now: float) -> None:
        """Move the requests without a running attempt to the pool that takes over."""
        moving = [
            request
            for request, its_queue in self._requests.items()
            if its_queue is queue
            and (request.is_queued or request.displaced_key is not None)
            and queue.pool.may_move(request, now)
        ]
        for request in moving:
            self._move(request, queue, reason, now)
        if moving:
            self._dispatch(self._requests[moving[0]], now)

    def _move(self, request: PlacementRequest, queue: PoolQueue, reason: str, now: float) -> None:
        """Move a request without a running attempt to the pool that takes over, where the caller dispatches it."""
        takeover = queue.pool.takeover
        assert takeover is not None
        queue.withdraw(request)
        queue.stop(request)
        target = self._requests[request] = self._get_queue(takeover)
        target.record_arrival(request, now)
        self._emit(Move(request, takeover, reason))
        if request.state is RequestState.DISPLACED:
            self._timers.cancel(request.timer)
            request.displaced_number = 0
            target.start(request)
            self._seek_replica(request, target, now)
        else:
            is_paused = request.state is RequestState.PAUSED
            waits_since = now if is_paused else request.queued_at or now
            target.push(request, waits_since, is_paused=is_paused)
            self._pauser.watch(target, request.tier, now)

    def _release_to_fallbacks(self, queue: PoolQueue, now: float) -> None:
        """Refuse the queued requests that other models can answer, because no replica is ready."""
        for request, its_queue in self._requests.items():
            if its_queue is not queue or not request.is_queued:
                continue
            if request.can_fall_back is None or request.output_tokens:
                continue
            if not request.can_fall_back():
                return  # nor can the others, whose fallbacks are mostly the same
            queue.withdraw(request)
            self._refuse(upstream_failed(queue.pool, request, now))

    def _refuse_waiting(self, queue: PoolQueue, now: float) -> None:
        """Refuse all queued requests, because no replica is expected to recover."""
        while (request := queue.pop_any(now)) is not None:
            paused = request.state is RequestState.PAUSED
            reason = RefusalReason.UPSTREAM_FAILED if paused else RefusalReason.NO_REPLICA
            self._refuse(Refuse(request, reason))

    def _excluded(self, request: PlacementRequest) -> set[str]:
        """Return the replicas that cannot resume a paused request. A new request may go to any replica."""
        if request.state is not RequestState.PAUSED:
            return set()
        replicas = self._requests[request].pool.replicas.values()
        return request.unsuitable | {
            replica.name
            for replica in replicas
            if not replica.has_arithmetic(request.arithmetic_id)
        }

    # --- attempts --------------------------------------------------------------------------------

    def _place(
        self, request: PlacementRequest, selection: Selection, queue: PoolQueue, now: float
    ) -> None:
        """Start the first attempt of a request, or resume a paused one."""
        if request.state is not RequestState.PAUSED:
            queue.pool.on_dispatched(now)
        queue.start(request)
        self._start_attempt(request, selection, queue, now)

    def _start_attempt(
        self,
        request: PlacementRequest,
        selection: Selection,
        queue: PoolQueue,
        now: float,
        *,
        is_hedge: bool = False,
    ) -> None:
        replica, chosen = selection.replica, selection.chosen
        sequences = request.sequence_count
        slots = 1 if sequences == 1 else replica.count_slots_for(sequences, request.tier, now)
        kv_tokens = request.prompt_tokens + selection.output_tokens
        replica.on_request_sent(chosen.uncached_tokens, slots)
        replica.load.add_demand(request.tenant, sequences, kv_tokens)
        mode = AttemptMode.RETRY if request.records else AttemptMode.FIRST
        if is_hedge or request.output_tokens:
            mode = AttemptMode.HEDGE if is_hedge else AttemptMode.RESUME
        attempt = Attempt(
            replica,
            chosen,
            mode,
            AttemptRecord(
                replica.name,
                now,
                request.output_tokens,
                kept_costs(selection.candidates),
                is_hedge=is_hedge,
                uncached_tokens=chosen.uncached_tokens,
                in_flight=replica.load.in_flight,
            ),
            not replica.health.is_ejected,
            slots,
            kv_tokens,
        )
        request.add_attempt(attempt)
        if not is_hedge:
            if request.timer:
                self._timers.cancel(request.timer)
            request.last_attempt = attempt
            request.move_to(RequestState.SENT)
            if request.pauses and request.pauses[-1][1] is None:
                request.pauses[-1] = (request.pauses[-1][0], now)
            queue.occupy_slot(request, attempt)
            hedging = queue.pool.hedging
            if hedging is not None and not request.output_tokens and request.uses_stream(replica):
                attempt.may_be_hedged = True
                request.timer = self._timers.add(
                    now + hedging.after_s, partial(self._on_silence, request, attempt)
                )
        self._emit(Send(request, attempt))

    def _on_silence(self, request: PlacementRequest, first: Attempt, now: float) -> None:
        """Start a second attempt if the replica of the first one is silent and capacity can be spared."""
        if request.attempts != [first]:
            return
        queue = self._requests[request]
        selection = queue.select_hedge(request, first.replica, now, self._random)
        if selection is not None:
            self._start_attempt(request, selection, queue, now, is_hedge=True)

    def _on_attempt_answered(self, event: AttemptAnswered, now: float) -> None:
        request, attempt = event.request, event.attempt
        if attempt.is_ended:
            return
        queue = self._requests[request]
        is_room_new = attempt.replica.health.on_response_started(now)
        if event.is_response:
            if request.timer:
                self._timers.cancel(request.timer)
            if len(request.attempts) > 1:
                (other,) = (each for each in request.attempts if each is not attempt)
                self._finish_attempt(request, other, None, "no longer needed", now)
                self._emit(Cancel(request, other))
                is_room_new = True
            request.last_attempt, attempt.is_stream = attempt, event.is_stream
            if not request.output_tokens:
                request.arithmetic_id = event.arithmetic_id
            request.move_to(RequestState.STREAMING)
            if attempt.mode is AttemptMode.HEDGE:
                queue.vacate_slot(request)
                queue.occupy_slot(request, attempt)
        if is_room_new:
            self._dispatch(queue, now)

    def _finish_attempt(
        self,
        request: PlacementRequest,
        attempt: Attempt,
        outcome: AttemptOutcome | None,
        reason: str,
        now: float,
        retry_after_s: float | None = None,
        *,
        is_sent: bool = True,
    ) -> None:
        """Record the end of an attempt at the replica and in the request."""
        record, replica = attempt.record, attempt.replica
        attempt.is_ended = True
        request.attempts.remove(attempt)
        record.ended_at, record.reason = now, reason
        record.outcome = "ended" if outcome is None else outcome.value
        if outcome is AttemptOutcome.FAILURE and not is_sent:
            replica.health.on_unreachable(now)
        if record.first_token_at is None:
            replica.on_prefill_done(attempt.chosen.uncached_tokens, record.chosen_at)
        replica.load.add_demand(request.tenant, -request.sequence_count, -attempt.kv_tokens)
        replica.on_request_ended(outcome, now, retry_after_s, reason, slots=attempt.slots)
        if not request.attempts:
            if request.timer:
                self._timers.cancel(request.timer)
            self._requests[request].vacate_slot(request)

    def _on_attempt_ended(self, event: AttemptEnded, now: float) -> None:
        request, attempt = event.request, event.attempt
        if attempt.is_ended:
            return
        queue = self._requests[request]
        new_tokens = event.output_tokens - attempt.record.delivered_tokens
        request.output_tokens = event.output_tokens
        self._finish_attempt(
            request,
            attempt,
            event.outcome,
            event.reason,
            now,
            event.retry_after_s,
            is_sent=event.is_sent,
        )
        if event.received_at is not None:
            attempt.record.first_token_at = event.received_at
        if request.attempts:
            self._on_hedged_attempt_failed(event)
        else:
            if new_tokens > 0 and event.ending is not AttemptEnding.COMPLETED:
                request.record_progress(new_tokens)
            self._continue(event, queue, now)
        self._dispatch(queue, now)

    def _on_hedged_attempt_failed(self, event: AttemptEnded) -> None:
        """Go on with the other attempt of a hedged request."""
        request = event.request
        request.failed.add(event.attempt.replica.name)
        if event.ending is AttemptEnding.LOST:
            request.replica_losses += event.is_sent
        (request.last_attempt,) = request.attempts

    def _continue(self, event: AttemptEnded, queue: PoolQueue, now: float) -> None:
        """Decide how a request goes on whose last running attempt has ended."""
        request, pool, replica = event.request, queue.pool, event.attempt.replica
        if event.ending is AttemptEnding.COMPLETED or event.is_complete:
            if len(pool.poison_requests):
                pool.poison_requests.clear(request.compute_digest())
            if event.tokens_per_choice is not None:
                pool.on_completed(event.tokens_per_choice)
            request.move_to(RequestState.FINISHED)
            return
        match event.ending:
            case AttemptEnding.PAUSED if (
                event.attempt.is_pausing and not replica.health.must_move_streams(now)
            ):
                event.attempt.record.outcome = "paused"
                request.move_to(RequestState.PAUSED)
                request.pauses.append((now, None))
                queue.stop(request)
                queue.push(request, now, is_paused=True)
                self._pauser.watch(queue, request.tier, now)
                return
            case AttemptEnding.PAUSED:
                request.failed.add(replica.name)
            case AttemptEnding.UNSUITABLE if event.is_restarted:
                request.arithmetic_id = ""
            case AttemptEnding.UNSUITABLE:
                request.unsuitable.add(replica.name)
                if not (pool.can_resume(request, now) or pool.can_be_taken_over(request, now)):
                    self._refuse(Refuse(request, RefusalReason.INTERRUPTED))
                    return
            case _:
                refusal = record_failure(pool, event, self._limits.max_failed_attempts, now)
                if refusal is not None:
                    self._refuse(refusal)
                    return
        request.move_to(RequestState.DISPLACED)
        self._seek_replica(request, queue, now)

    def _seek_replica(self, request: PlacementRequest, queue: PoolQueue, now: float) -> None:
        """Let a displaced request wait for another replica, for a short backoff time."""
        request.failing_since = min(request.failing_since, now)
        pool = queue.pool
        if pool.can_be_taken_over(request, now) and not pool.has_replica_left(request):
            self._move(request, queue, NONE_LEFT, now)
            self._dispatch(self._requests[request], now)
            return
        if self._must_fall_back(request, pool, now):
            self._refuse(upstream_failed(pool, request, now))
            return
        timeout_s = backoff_s(request.failed_attempts, self._random.random())
        if not request.must_wait_for_budget or (
            pool.has_healthy(request.tier, now) or pool.retry_budget.try_acquire(now)
        ):
            request.must_wait_for_budget = False
            queue.add_displaced(request)
        request.timer = self._timers.add(
            now + timeout_s, partial(self._on_replica_not_found, request)
        )

    def _must_fall_back(self, request: PlacementRequest, pool: _Pool, now: float) -> bool:
        """Whether another model answers a displaced request without output, because its own cannot now."""
        if request.can_fall_back is None or request.output_tokens:
            return False
        excluded = request.failed | request.unsuitable
        return not pool.has_ready(now, excluded) and request.can_fall_back()

    def _on_replica_not_found(self, request: PlacementRequest, now: float) -> None:
        """Give a displaced request up, or let it wait for any replica, also those that failed it."""
        queue = self._requests[request]
        pool = queue.pool
        queue.withdraw_displaced(request)
        if pool.can_be_taken_over(request, now):
            self._move(request, queue, NONE_LEFT, now)
            self._dispatch(self._requests[request], now)
            return
        give_up_at = request.failing_since + self._limits.failover_timeout_s
        is_too_late = now + pool.retry_after_s(now) > give_up_at
        if is_too_late or not (request.has_reached_replica or pool.may_recover(now)):
            if request.output_tokens and request.unsuitable:
                self._refuse(Refuse(request, RefusalReason.INTERRUPTED))
            else:
                self._refuse(upstream_failed(pool, request, now))
            return
        request.failed.clear()
        self._seek_replica(request, queue, now)
        self._dispatch(queue, now)

    # --- ends ------------------------------------------------------------------------------------

    def _refuse(self, refusal: Refuse) -> None:
        request = refusal.request
        self._timers.cancel(request.timer)
        request.move_to(RequestState.REFUSED)
        self._emit(refusal)

    def _on_request_ended(self, event: RequestEnded, now: float) -> None:
        request = event.request
        queue = self._requests[request]
        if request.timer:
            self._timers.cancel(request.timer)
        queue.withdraw(request)
        running = tuple(request.attempts)
        for attempt in running:
            self._finish_attempt(request, attempt, None, "", now)
        queue.stop(request)
        request.move_to(RequestState.ENDED)
        del self._requests[request]
        if running:
            self._dispatch(queue, now)

    # --- capacity and time -----------------------------------------------------------------------

    def _on_capacity_changed(self, event: CapacityChanged, now: float) -> None:
        queue = self._queues.get(event.pool)
        if queue is not None:
            self._dispatch(queue, now)
            self._schedule_poll(queue, now)

    def _on_pool_removed(self, event: PoolRemoved, now: float) -> None:
        del now
        self._queues.pop(event.pool, None)

    def _on_tick(self, event: Tick, now: float) -> None:
        del event
        self._wake_at = math.inf
        self._timers.fire(now)

    def _schedule_poll(self, queue: PoolQueue, now: float) -> None:
        if queue.poll_at == math.inf:
            queue.poll_at = now + POLL_INTERVAL_S
            self._timers.add(queue.poll_at, partial(self._poll, queue))

    def _poll(self, queue: PoolQueue, now: float) -> None:
        """Look for capacity that returned with time alone, and for streams to move off draining replicas."""
        queue.poll_at = math.inf
        self._dispatch(queue, now)
        if self._pauser.move_streams(queue, now):
            self._schedule_poll(queue, now)
