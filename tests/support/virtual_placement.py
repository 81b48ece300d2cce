"""A driver of the placement core with a virtual clock, which checks its invariants after every event.

`PlacementWorld` performs effects on virtual replicas and feeds the core what its caller makes happen.
`PlacementSimulation` lets all of it happen by itself, from a seed.

Never compared with a gateway.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from argosy.policy import BATCH_TIER, AttemptOutcome, Hedging, WakeAt, weighted_tokens
from argosy.policy.placement import (
    Arrived,
    Attempt,
    AttemptAnswered,
    AttemptEnded,
    AttemptEnding,
    Cancel,
    CapacityChanged,
    Effect,
    Event,
    GivingWay,
    Move,
    Pause,
    PlacementCore,
    PlacementLimits,
    PlacementPool,
    PlacementPreview,
    PlacementReplica,
    PlacementRequest,
    PoolQueue,
    QueueLimits,
    Refuse,
    RequestEnded,
    RequestState,
    Send,
    Tick,
)
from argosy.policy.placement.attempt import kept_costs

WAITING = {RequestState.WAITING, RequestState.PAUSED}
PLACED = {RequestState.SENT, RequestState.STREAMING, RequestState.DISPLACED}
SWEEP_INTERVAL = 50
"""Events between two checks of all requests."""
_OF_A_REQUEST = (
    Arrived,
    AttemptAnswered,
    AttemptEnded,
    RequestEnded,
    Cancel,
    Move,
    Pause,
    Refuse,
    Send,
)


@dataclass(eq=False)
class VirtualRequest:
    """Request as its driver sees it."""

    request: PlacementRequest
    target: int
    """Output tokens of the whole response."""
    pool: PlacementPool[PlacementReplica]
    delivered: int = 0
    reported: int = 0
    charged_prompt: bool = False
    calls: list[Attempt] = field(default_factory=list)
    """Attempts that were sent and not cancelled."""
    losses: int = 0
    """Replicas lost since the last token."""
    end: str = ""


class PlacementWorld:
    """A pool of virtual replicas and the core that places requests there.

    With `num_stable_replicas`, another pool takes over what this one cannot serve.
    """

    def __init__(
        self,
        num_replicas: int,
        slots: int,
        seed: int,
        *,
        giving_way: GivingWay | None = None,
        hedge_after_s: float | None = None,
        limits: PlacementLimits | None = None,
        num_stable_replicas: int = 0,
    ) -> None:
        self.now = 0.0
        self.previews = False
        """Whether each arrival is previewed, and compared with what happens then."""
        self.random = random.Random(seed)
        self.limits = limits or PlacementLimits(QueueLimits(timeout_s=60.0))
        self.core = PlacementCore(self.limits, random.Random(seed))
        self.replicas: list[PlacementReplica] = []
        self.pools: list[PlacementPool[PlacementReplica]] = []
        for letter, count in (("r", num_replicas), ("s", num_stable_replicas)):
            replicas = [
                PlacementReplica(f"{letter}{i:03}", arithmetic_id="same") for i in range(count)
            ]
            for replica in replicas:
                replica.load.max_seqs = slots
                replica.load.reported_at = math.inf
                replica.health.on_reported_state("ready", 0.0)
            self.replicas += replicas
            hedging = None if hedge_after_s is None else Hedging(hedge_after_s)
            self.pools.append(PlacementPool("m", replicas, "least-cost", hedging, giving_way))
        self.pool, stable = self.pools
        self.pool.takeover = stable if num_stable_replicas else None
        self.requests: dict[PlacementRequest, VirtualRequest] = {}
        self.ended: list[VirtualRequest] = []
        self.wake_at = math.inf
        self.on_send: Callable[[VirtualRequest, Attempt], None] = _leave_alone
        self.num_events = 0
        self.log: list[str] = []
        """All effects, to compare two runs."""
        self.counts: Counter[str] = Counter()
        self.in_flight: Counter[PlacementReplica] = Counter()
        """Attempts that run at each replica."""
        self._streams: Counter[tuple[object, int, str]] = Counter()
        """Streams by pool, tier and tenant, after the pauses of the last event and the starts that these permit."""
        self._numbers = itertools.count()

    # --- what the caller makes happen ------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Feed an event to the core, perform the effects, and check the invariants."""
        effects = self.core.handle(event, self.now)
        self.num_events += 1
        self._streams.clear()
        for effect in effects:
            self._perform(effect)
        self.check(event, effects)
        for effect in effects:
            if isinstance(effect, Pause):
                self.end(effect.request, effect.attempt, AttemptEnding.PAUSED)
            elif isinstance(effect, Refuse):
                self.finish(effect.request, f"refused: {effect.reason.name}")
            elif isinstance(effect, Send):
                each = self.requests[effect.request]
                if effect.attempt in each.calls:
                    effect.request.record_sent(effect.attempt, self.now)
                    self.on_send(each, effect.attempt)

    def arrive(
        self,
        tenant: str,
        tier: int,
        target: int,
        *,
        weight: float = 1.0,
        is_stream: bool = True,
        sequences: int = 1,
    ) -> PlacementRequest:
        number = next(self._numbers)
        request = PlacementRequest(
            f"q{number}",
            100,
            tenant=tenant,
            tier=tier,
            weight=weight,
            compute_block_keys=lambda: [b"%16d" % (number % 7)],
            compute_digest=lambda: b"%d" % number,
            max_output_tokens=2 * target,
            is_stream=is_stream,
            size_bytes=1000,
            choice_count=sequences,
            sequence_count=sequences,
        )
        self.requests[request] = VirtualRequest(request, target, self.pool)
        preview = self.core.preview(request, self.pool, self.now) if self.previews else None
        num_logged = len(self.log)
        self.handle(Arrived(request, self.pool))
        if preview is not None:
            self._check_preview(preview, request, self.log[num_logged:])
        return request

    def _check_preview(
        self, preview: PlacementPreview, request: PlacementRequest, log: Sequence[str]
    ) -> None:
        """Check that what happened to a request that arrived is what its preview said."""
        selection, refusal = preview.selection, preview.refusal
        assert (f"move {request.id} {preview.takeover_reason}" in log) == bool(
            preview.takeover_reason
        )
        if selection is not None:
            replica = selection.chosen.load.name
            assert f"send {request.id} {replica} first" in log
            assert request.records[0].candidate_costs == kept_costs(selection.candidates)
            self.counts["previewed"] += 1
        elif refusal is not None:
            assert f"refuse {request.id} {refusal[0].name}" in log
        elif request.is_queued:
            assert request.queued_ahead == preview.queued_ahead

    def answer(self, request: PlacementRequest, attempt: Attempt) -> None:
        """Let the first content of a response arrive."""
        each = self.requests[request]
        self.handle(AttemptAnswered(request, attempt, arithmetic_id="same", is_stream=True))
        attempt.record_first_token(self.now, is_resumed=each.delivered > 0)
        self.deliver(request, 1)

    def deliver(self, request: PlacementRequest, tokens: int) -> None:
        each = self.requests[request]
        each.delivered = min(each.target, each.delivered + tokens)
        each.losses = 0

    def report(self, request: PlacementRequest) -> None:
        """Report the tokens delivered since the last report."""
        each = self.requests[request]
        service = weighted_tokens(
            0 if each.charged_prompt else request.prompt_tokens, each.delivered - each.reported
        )
        each.charged_prompt, each.reported = True, each.delivered
        self.core.record_progress(request, each.delivered, service)

    def end(
        self, request: PlacementRequest, attempt: Attempt, ending: AttemptEnding, status: int = 0
    ) -> None:
        """Let an attempt end."""
        each = self.requests[request]
        outcome = {
            AttemptEnding.COMPLETED: AttemptOutcome.SUCCESS,
            AttemptEnding.LOST: AttemptOutcome.FAILURE,
        }.get(ending)
        if ending is AttemptEnding.REFUSED:
            outcome = (
                AttemptOutcome.BACKPRESSURE if status in {429, 503} else AttemptOutcome.FAILURE
            )
        if each.delivered:
            self.report(request)
        each.losses += ending is AttemptEnding.LOST
        each.calls.remove(attempt)
        self.in_flight[attempt.replica] -= 1
        self.handle(
            AttemptEnded(
                request,
                attempt,
                ending,
                outcome,
                ending.value,
                status=status,
                output_tokens=each.delivered,
                tokens_per_choice=each.delivered if outcome is AttemptOutcome.SUCCESS else None,
            )
        )
        if ending is AttemptEnding.COMPLETED:
            self.finish(request, "completed")

    def finish(self, request: PlacementRequest, end: str) -> None:
        """End a request, whatever its state."""
        each = self.requests[request]
        each.end = end
        self.in_flight.subtract(attempt.replica for attempt in each.calls)
        each.calls.clear()
        self.counts[end] += 1
        self.handle(RequestEnded(request))
        del self.requests[request]
        self.ended.append(each)

    def report_state(self, replica: PlacementReplica, state: str) -> None:
        replica.health.on_reported_state(state, self.now)
        self.handle(CapacityChanged(self.pool_of(replica)))

    def pool_of(self, replica: PlacementReplica) -> PlacementPool[PlacementReplica]:
        return next(pool for pool in self.pools if replica.name in pool.replicas)

    def withdraw(self, *, is_withdrawn: bool) -> None:
        """Give the version of the first pool no share, or one again."""
        self.pool.is_withdrawn = is_withdrawn
        self.handle(CapacityChanged(self.pool))
        if is_withdrawn:
            left = [each for each, queue in self.core.requests.items() if queue.pool is self.pool]
            assert not any(each.state in WAITING and not each.output_tokens for each in left)

    def advance(self, seconds: float) -> None:
        """Let time pass, with the core's timers."""
        until = self.now + seconds
        while self.wake_at <= until:
            self.now, self.wake_at = max(self.now, self.wake_at), math.inf
            self.handle(Tick())
        self.now = until

    # --- effects and invariants ------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send(request, attempt):
                each = self.requests[request]
                assert attempt.replica.health.is_schedulable, (
                    "a request was sent to a draining replica"
                )
                assert attempt.record.delivered_tokens == each.delivered, "a token is lost or twice"
                limit = max(2, self.limits.max_failed_attempts)
                assert each.losses < limit, "a request cost too many replicas"
                assert attempt.replica.name in each.pool.replicas, "it is in another queue"
                each.calls.append(attempt)
                self.in_flight[attempt.replica] += 1
                self.counts[attempt.mode.value] += 1
                self.log.append(f"send {request.id} {attempt.replica.name} {attempt.mode.value}")
            case Cancel(request, attempt):
                self.requests[request].calls.remove(attempt)
                self.in_flight[attempt.replica] -= 1
                self.log.append(f"cancel {request.id} {attempt.replica.name}")
            case Pause(request, attempt):
                self._check_pause(effect)
                self.counts["drained" if effect.waiting is None else "paused"] += 1
                self.log.append(f"pause {request.id}")
            case Move(request, pool):
                each = self.requests[request]
                assert not each.calls, "a running request moved"
                assert each.pool.takeover is pool
                each.pool = pool
                self.counts["moved"] += 1
                self.counts["moved streams"] += bool(each.delivered)
                self.log.append(f"move {request.id} {effect.reason}")
            case Refuse(request):
                self.log.append(f"refuse {request.id} {effect.reason.name}")
            case WakeAt(at):
                self.wake_at = at

    def _check_pause(self, pause: Pause) -> None:
        """Check that a stream pauses only for a request with a better claim to its slot."""
        victim, waiting = pause.request, pause.waiting
        if waiting is None:
            if pause.attempt.replica.health.is_schedulable:
                queue = self.core.queues[self.requests[victim].pool]
                assert victim.tier == BATCH_TIER
                assert queue.queue.highest_tier is not None, "a batch paused for nobody"
            return
        pool = self.requests[victim].pool
        assert self.requests[waiting].pool is pool
        giving_way, streams = pool.giving_way, self._streams
        assert giving_way is not None
        assert self.now - (pause.attempt.record.first_token_at or 0.0) >= giving_way.min_slice_s
        if waiting.state is RequestState.SENT:
            return  # later in this event it got a slot that was reserved until then
        assert waiting.state in WAITING
        if not streams:
            for each in self.requests.values():
                streams[each.pool, each.request.tier, each.request.tenant] += each.request.slots
        losing = pool, victim.tier, victim.tenant
        gaining = pool, waiting.tier, waiting.tenant
        if victim.tier == waiting.tier:
            remaining, claimed = streams[losing] - 1, streams[gaining] + 1
            assert remaining * waiting.weight >= claimed * victim.weight, "unfair pause"
        else:
            assert victim.tier > waiting.tier, "a higher tier paused for a lower one"
        assert losing != gaining
        streams[losing] -= 1
        streams[gaining] += 1

    def check(self, event: Event, effects: Sequence[Effect]) -> None:
        """Assert the invariants: of the touched requests and of all sums, and now and then of every request."""
        touched = {
            each.request for each in (event, *effects) if isinstance(each, _OF_A_REQUEST)
        } & self.requests.keys()
        is_sweep = self.num_events % SWEEP_INTERVAL == 0
        for request in self.requests if is_sweep else touched:
            self._check_request(self.requests[request])
        for replica in self.replicas:
            load = replica.load
            assert 0 <= load.in_flight == self.in_flight[replica] <= load.slots_in_use
            assert load.slots_in_use <= replica.slots or not replica.is_native
        for queue in self.core.queues.values() if is_sweep else ():
            self._check_sums(queue)
        if isinstance(event, AttemptEnded):
            self._check_dispatched(self.pool_of(event.attempt.replica))
        elif isinstance(event, CapacityChanged):
            self._check_dispatched(event.pool)

    def _check_dispatched(self, pool: PlacementPool[PlacementReplica]) -> None:
        """Check that no request waits for a slot that is free, after an event that dispatches requests."""
        queue = self.core.queues.get(pool)
        if queue:
            free_slots, total_slots = pool.free_slots(self.now)
            lowest = queue.lowest_admissible_tier(free_slots, total_slots, self.now)
            busy = [tier for tier in range(4) if queue.queue.next_requests(tier)]
            assert busy[0] > lowest, "a request waits while it may use a free slot"

    def _check_request(self, each: VirtualRequest) -> None:
        request, state = each.request, each.request.state
        assert request.attempts == each.calls or state is RequestState.REFUSED
        assert request.is_queued == (state in WAITING)
        assert request.displaced_key is None or state is RequestState.DISPLACED
        assert request.is_placed or state not in PLACED
        match state:
            case RequestState.SENT:
                assert 1 <= len(request.attempts) <= 2
            case RequestState.STREAMING:
                assert len(request.attempts) == 1
            case _:
                assert not request.attempts

    def _check_sums(self, queue: PoolQueue) -> None:
        requests = {
            request: each for request, each in self.requests.items() if each.pool is queue.pool
        }
        assert all(self.core.requests.get(request, queue) is queue for request in requests)
        assert len(queue) == sum(request.state in WAITING for request in requests)
        in_order = [each for group in queue.displaced.values() for each in group]
        assert set(in_order) == {each for each in requests if each.displaced_key is not None}
        placed = Counter(request.tier for request in requests if request.is_placed)
        assert queue.running_by_tier == [placed[tier] for tier in range(4)]
        occupied = [
            each for tier in queue.running for name in tier.values() for each in name.requests
        ]
        assert set(occupied) == {each.request for each in requests.values() if each.calls}
        for tenants in queue.running:
            for streams in tenants.values():
                assert streams.slots == sum(each.slots for each in streams.requests)
                assert all(each.slots >= 1 for each in streams.requests)
        for replica in queue.pool.replicas.values():
            calls = [
                (each.request, call)
                for each in self.requests.values()
                for call in each.calls
                if call.replica is replica
            ]
            assert replica.load.slots_in_use == sum(call.slots for _, call in calls)
            sequences: Counter[str] = Counter()
            for request, _ in calls:
                sequences[request.tenant] += request.sequence_count
            demands = replica.load.demand_by_tenant
            assert sequences == {name: count for name, (count, _) in demands.items()}


def _leave_alone(each: VirtualRequest, attempt: Attempt) -> None:
    """Let the caller decide what becomes of the attempt."""


class PlacementSimulation(PlacementWorld):
    """A world in which requests arrive and replicas answer, stall, fail and drain from a seed."""

    def __init__(
        self,
        num_requests: int,
        num_replicas: int,
        slots: int,
        seed: int,
        num_stable: int = 0,
        limits: PlacementLimits | None = None,
    ) -> None:
        super().__init__(
            *(num_replicas, slots, seed),
            giving_way=GivingWay(),
            hedge_after_s=1.0,
            limits=limits,
            num_stable_replicas=num_stable,
        )
        self.on_send = self._serve
        self.leave_share = 0.05
        """Part of the clients that leave within 5 s."""
        self.fault_interval_s = 4.0
        """Longest time between two faults."""
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._down: set[PlacementReplica] = set()
        self._silent: set[PlacementReplica] = set()
        self._poison: set[str] = set()
        """Requests that make every replica crash."""
        self._num_requests = self._to_come = num_requests
        self._later(0.0, self._flood)
        self._later(3.0, self._next_arrival)
        self._later(5.0, self._next_fault)

    def run(self) -> None:
        """Run until every request has ended, and every slot is free."""
        while self._agenda or self.requests:
            at, _, action = self._agenda[0] if self._agenda else (math.inf, 0, None)
            if self.wake_at < at:
                self.advance(self.wake_at - self.now)
                continue
            assert action is not None, "requests are left and no timer runs"
            heapq.heappop(self._agenda)
            self.advance(at - self.now)
            action()
        assert len(self.ended) == self._num_requests
        assert not self.core.requests
        assert not self.in_flight.total()
        for queue in self.core.queues.values():
            self._check_sums(queue)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + seconds, next(self._order), action))

    def _next_arrival(self) -> None:
        if not self._to_come:
            return
        draw = self.random.random
        self._to_come -= 1
        tier = (0, 1, 1, 2, 2, 3)[int(draw() * 6)]
        long = tier >= 2 and draw() < 0.15
        tenant = int(draw() * 4)
        request = self.arrive(
            f"t{tier}{tenant}",
            tier,
            1 + int(draw() * (2000 if long else 40)),
            weight=1.0 if tenant else 2.0,
            is_stream=draw() < 0.8,
            sequences=1 + int(draw() * 12) if draw() < 0.1 else 1,
        )
        if draw() < 0.005:
            self._poison.add(request.id)
        if request in self.requests and draw() < self.leave_share:
            self._later(draw() * 5.0, partial(self._leave, request))
        self._later(draw() * (0.03 if self._is_busy else 0.12), self._next_arrival)

    @property
    def _is_busy(self) -> bool:
        """Whether more requests arrive than the replicas can answer, as in the first two thirds."""
        return self._to_come > self._num_requests // 3

    def _flood(self) -> None:
        """Let one tenant take all slots with long streams, if no others run."""
        for _ in range(min(120, self._to_come // 3)):
            self._to_come -= 1
            self.arrive("flood", 2, 1500)

    def _leave(self, request: PlacementRequest) -> None:
        if request in self.requests:
            self.finish(request, "left")

    def _next_fault(self) -> None:
        draw = self.random.random
        replica = self.replicas[int(draw() * len(self.replicas))]
        kind, pause = draw(), 1.0 + draw() * 8.0
        if kind < 0.05 and self._is_busy:
            self._flood()
        elif kind < 0.1 and self.pool.takeover is not None:
            self.withdraw(is_withdrawn=not self.pool.is_withdrawn)
        elif replica in self._down | self._silent or not replica.health.is_schedulable:
            pass
        elif kind < 0.4:
            self._down.add(replica)
            for each in tuple(self.requests.values()):
                for attempt in tuple(each.calls):
                    if attempt.replica is replica and attempt in each.calls:
                        self.end(each.request, attempt, AttemptEnding.LOST)
            self._later(pause, partial(self._recover, replica))
        elif kind < 0.7:
            self._silent.add(replica)
            self._later(pause, partial(self._silent.discard, replica))
        else:
            self.report_state(replica, "draining" if kind < 0.9 else "starting")
            self._later(pause, partial(self._recover, replica))
        if self._to_come > 0:
            self._later(draw() * self.fault_interval_s, self._next_fault)

    def _recover(self, replica: PlacementReplica) -> None:
        self._down.discard(replica)
        if not replica.health.breaker.is_closed:
            replica.health.breaker.record_probe_outcome(AttemptOutcome.SUCCESS, self.now)
        self.report_state(replica, "ready")

    def _serve(self, each: VirtualRequest, attempt: Attempt) -> None:
        draw = self.random.random
        request, replica, kind = each.request, attempt.replica, draw()
        if request.id in self._poison:
            self._later(0.05, partial(self._end, each, attempt, AttemptEnding.LOST, 0))
        elif replica in self._down:
            self._later(0.001, partial(self._end, each, attempt, AttemptEnding.LOST, 0))
        elif replica in self._silent:
            self._later(4.0, partial(self._end, each, attempt, AttemptEnding.LOST, 0))
        elif kind < 0.02:
            status = (429, 500)[int(draw() * 2)]
            self._later(0.01, partial(self._end, each, attempt, AttemptEnding.REFUSED, status))
        elif kind < 0.025 and not each.delivered:
            self._later(0.01, partial(self._end, each, attempt, AttemptEnding.UNSUITABLE, 0))
        else:
            self._later(0.02 + draw() * 0.2, partial(self._begin, each, attempt))

    def _begin(self, each: VirtualRequest, attempt: Attempt) -> None:
        if attempt in each.calls:
            self.answer(each.request, attempt)
            self._later(0.5, partial(self._stream, each, attempt))

    def _stream(self, each: VirtualRequest, attempt: Attempt) -> None:
        """Deliver tokens in batches of half a second, as a driver reports them."""
        if attempt not in each.calls:
            return
        if attempt.replica in self._silent:
            self._later(0.5, partial(self._stream, each, attempt))
            return
        self.deliver(each.request, 25)
        if each.delivered >= each.target:
            self.end(each.request, attempt, AttemptEnding.COMPLETED)
        else:
            self.report(each.request)
            self._later(0.5, partial(self._stream, each, attempt))

    def _end(
        self, each: VirtualRequest, attempt: Attempt, ending: AttemptEnding, status: int
    ) -> None:
        if attempt in each.calls:
            self.end(each.request, attempt, ending, status)
