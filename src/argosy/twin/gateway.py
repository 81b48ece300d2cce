"""Gateway of a simulated fleet: drives the production's placement by events, and sends requests to replicas.

    arrive -> reserve limits -> PlacementCore -> replica -> tokens -> bill -> ledger

It performs what a gateway performs with sockets: it sends attempts to replicas, delivers their tokens, and reports how
attempts end. All decisions are those of `argosy.policy`.
"""

from __future__ import annotations

import array
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from argosy.bench import RequestRow
from argosy.engine import EngineRequest
from argosy.engine.scheduling import Sequence
from argosy.policy import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    AttemptOutcome,
    CacheHitReport,
    RequestStatus,
    WakeAt,
    compute_prefix_keys,
    weighted_tokens,
)
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
    Move,
    Pause,
    PlacementCore,
    PlacementLimits,
    PlacementPool,
    PlacementReplica,
    PlacementRequest,
    Refuse,
    RequestEnded,
    Send,
    Tick,
)
from argosy.protocol import SamplingParams
from argosy.twin.active_request import ActiveRequest, Call
from argosy.twin.metering import Metering
from argosy.twin.replica import SAMPLED_TOKEN, SimulatedReplica
from argosy.twin.rollout import SimulatedRollout, generation_of
from argosy.twin.simulation import Simulation, require, to_ns
from argosy.twin.workload import SimulatedRequest, Span, Tenant, prompt_tokens

ModelPool = PlacementPool[PlacementReplica]

CONNECT_TIMEOUT_S = 2.0
STALL_TIMEOUT_S = 10.0
"""Silence of a stream after which the gateway gives its replica up."""
PROGRESS_INTERVAL_S = 0.5
CANARY = -1
CANARY_TENANT = Tenant(name="\0canary")
CANARY_TOKENS = 4


class SimulatedGateway:
    """A gateway of one model, of which each version has a pool.

    Args:
        simulation: Clock and events.
        build_pool: Creates the pool of a version.
        rollout: Selects the version for each request, and counts its end.
        replicas: Processes of the fleet by name, which the fleet changes.
        requests: Requests that clients will send.
        duration_s: Time in which requests arrive. Later turns of sessions are left out.
        tenants: Tenants with their limits.
        placement_limits: Limits of queue and failover.
        request_s: Time until a request that is sent reaches the engine of its replica.
    """

    def __init__(
        self,
        simulation: Simulation,
        build_pool: Callable[[], ModelPool],
        rollout: SimulatedRollout,
        replicas: Mapping[str, SimulatedReplica],
        *,
        requests: Iterable[SimulatedRequest],
        duration_s: float,
        tenants: Iterable[Tenant],
        placement_limits: PlacementLimits,
        request_s: float,
    ) -> None:
        self.pools: dict[int, ModelPool] = {}
        """Pools by generation."""
        self.core = PlacementCore(placement_limits, simulation.stream("placement"))
        self.counts: Counter[str] = Counter()
        """Effects and ends by kind."""
        self.arrived_tokens = 0.0
        """Weighted tokens of the requests that have arrived."""
        self.served_tokens = 0.0
        self._simulation = simulation
        self._build_pool = build_pool
        self._rollout = rollout
        self._request_s = request_s
        self._wake_at = 0.0
        self._duration_s = duration_s
        self._replicas = replicas
        self._tenants = {tenant.name: tenant for tenant in (*tenants, CANARY_TENANT)}
        self.metering = Metering(simulation, self._tenants.values())
        self._active: dict[PlacementRequest, ActiveRequest] = {}
        self._calls: dict[str, Call] = {}
        self._turns: defaultdict[int, list[SimulatedRequest]] = defaultdict(list)
        self.num_expected = 0
        """Requests that have not ended and those whose time is known."""
        for request in requests:
            if request.after is None:
                self._expect(request, (), request.at_s or 0.0)
            else:
                self._turns[request.after].append(request)

    @property
    def rows(self) -> list[RequestRow]:
        """Measurements of the requests that have ended."""
        return self.metering.rows

    @property
    def active(self) -> Mapping[PlacementRequest, ActiveRequest]:
        """Requests that have not ended."""
        return self._active

    def pool_of(self, generation: int) -> ModelPool:
        """Return the pool of a version."""
        pool = self.pools.get(generation)
        if pool is None:
            pool = self.pools[generation] = self._build_pool()
        return pool

    def follow_route(self) -> None:
        """Let the pool of the stable version serve what those of other versions cannot or may not."""
        stable = self.pool_of(self._rollout.stable)
        for generation, pool in self.pools.items():
            pool.takeover = None if pool is stable else stable
            pool.is_withdrawn = pool is not stable and not self._rollout.has_share(generation)
        for pool in tuple(self.pools.values()):
            self.handle(CapacityChanged(pool))

    def send_canary(self) -> None:
        """Let a client without limits send a short request. Its number is `CANARY`."""
        prompt = (Span(0, CANARY_TOKENS),)
        planned = SimulatedRequest(
            number=CANARY, tenant=CANARY_TENANT.name, prompt=prompt, output_tokens=CANARY_TOKENS
        )
        self._expect(planned, (), 0.0)

    # --- requests of clients ---------------------------------------------------------------------

    def _expect(self, request: SimulatedRequest, history: tuple[int, ...], delay_s: float) -> None:
        self.num_expected += 1
        self._simulation.call_later(delay_s, partial(self._arrive, request, history), 1)

    def _arrive(self, planned: SimulatedRequest, history: tuple[int, ...]) -> None:
        simulation, tenant = self._simulation, self._tenants[planned.tenant]
        prompt = [*history, *prompt_tokens(planned.prompt)]
        tokens, domain = len(prompt), tenant.name.encode()
        self.arrived_tokens += weighted_tokens(tokens, planned.output_tokens)
        placement = PlacementRequest(
            id=f"q{planned.number}",
            prompt_tokens=tokens,
            compute_block_keys=partial(_block_keys, domain, prompt),
            compute_digest=partial(_digest, planned.number),
            tenant=tenant.name,
            tier=tenant.tier,
            weight=tenant.weight,
            cost_tokens=weighted_tokens(tokens, planned.output_tokens),
            max_output_tokens=planned.output_tokens,
            prompt_bytes=tokens * BLOCK_BYTES // BLOCK_TOKENS,
            size_bytes=4 * tokens,
        )
        simulation.trace(f"arrive {placement.id} {tokens}")
        choice = self._rollout.select(tenant.name, placement.id)
        request = ActiveRequest(planned, prompt, tenant, placement, choice, simulation.elapsed_s)
        if not self.metering.admit(request):
            self._settle(request, "refused", "limit")
            return
        self._active[placement] = request
        if planned.leave_s is not None:
            simulation.call_later(planned.leave_s, partial(self._leave, placement), 1)
        self.handle(Arrived(placement, self.pool_of(generation_of(choice.digest))))

    def _leave(self, placement: PlacementRequest) -> None:
        request = self._active.get(placement)
        if request is not None:
            for call in request.calls:
                call.replica.settle()  # the client has received the tokens so far
            self._finish(request, "cancelled", "left")

    # --- placement -------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Feed an event to the core, and perform the effects."""
        effects = self.core.handle(event, self._simulation.now)
        for effect in effects:
            self._perform(effect)
        for effect in effects:
            if isinstance(effect, Pause):
                self._end_attempt(effect.request, effect.attempt, AttemptEnding.PAUSED, None)
            elif isinstance(effect, Refuse):
                request = self._active[effect.request]
                status: RequestStatus = "failed" if request.num_calls else "refused"
                self._finish(request, status, effect.reason.name.lower())

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send(placement, attempt):
                self._send(self._active[placement], attempt)
            case Cancel(placement, attempt):
                self._drop(self._find_call(placement, attempt))
            case Move(placement, pool):
                self.counts["moved"] += 1
                self._simulation.trace(f"move {placement.id} {pool.model}")
            case WakeAt(at):
                self._wake_at = at
                self._simulation.call_at(to_ns(at), partial(self._tick, at))
            case Pause():
                self.counts["paused"] += 1
            case Refuse():
                pass

    def _tick(self, at: float) -> None:
        if at == self._wake_at:  # a later one does not count any more
            self.handle(Tick())

    def _send(self, request: ActiveRequest, attempt: Attempt) -> None:
        name, simulation = attempt.replica.name, self._simulation
        require(attempt.replica.health.is_schedulable, f"{name} drains and gets a request")
        require(
            attempt.record.delivered_tokens == request.delivered,
            f"{request.placement.id} would lose a token or get one twice",
        )
        request.num_calls += 1
        call = Call(
            f"{request.placement.id}.{request.num_calls}", request, attempt, self._replicas[name]
        )
        request.calls.append(call)
        self._calls[call.id] = call
        self.counts[attempt.mode.value] += 1
        simulation.trace(f"send {call.id} {name} {attempt.mode.value}")
        request.placement.record_sent(attempt, simulation.now)
        simulation.call_later(self._request_s, partial(self._receive, call), 1)

    def _receive(self, call: Call) -> None:
        """Let a request reach its replica."""
        if call.id not in self._calls:
            return
        request, replica = call.request, call.replica
        if replica.is_cut:
            self._simulation.call_later(
                CONNECT_TIMEOUT_S, partial(self._lose, call, "timeout", is_sent=False)
            )
        elif replica.state in {"down", "starting"}:
            self._lose(call, "connection refused", is_sent=False)
        elif replica.state == "draining":
            self._end_call(
                call, AttemptEnding.REFUSED, AttemptOutcome.BACKPRESSURE, "draining", 503
            )
        elif not replica.fits(len(request.prompt), request.planned.output_tokens):
            self._end_call(call, AttemptEnding.REFUSED, AttemptOutcome.SUCCESS, "too long", 400)
        else:
            replica.add(
                EngineRequest(
                    id=call.id,
                    prompt=request.prompt,
                    resumed_tokens=[SAMPLED_TOKEN] * request.delivered,
                    params=SamplingParams(max_tokens=request.planned.output_tokens),
                    cache_domain=request.tenant.name,
                    tenant=request.tenant.name,
                    tier=request.tenant.tier,
                    weight=request.tenant.weight,
                )
            )

    # --- tokens ----------------------------------------------------------------------------------

    def on_tokens(self, seq: Sequence, count: int, is_ended: bool) -> None:  # noqa: FBT001 - a callback
        """Receive new tokens of a sequence."""
        call = self._calls.get(seq.id)
        if call is None:
            return
        if call.replica.is_cut:
            call.withheld_tokens += count
            call.is_end_withheld |= is_ended
            return
        self._deliver(call, count, seq.hit_tokens)
        if is_ended and call.id in self._calls:
            self._complete(call)

    def _deliver(self, call: Call, count: int, cached_tokens: int) -> None:
        request, simulation, attempt = call.request, self._simulation, call.attempt
        placement, now = request.placement, simulation.now
        if not call.is_answered:
            call.is_answered = True
            self.handle(
                AttemptAnswered(
                    placement,
                    attempt,
                    is_stream=True,
                    arithmetic_id=attempt.replica.arithmetic_id,
                )
            )
            if call.id not in self._calls:
                return
            uncached = len(request.prompt) - cached_tokens
            report = CacheHitReport(
                placement.block_keys,
                attempt.chosen.cached_blocks,
                placement.prompt_blocks,
                len(request.prompt),
                cached_tokens,
                array.array("I"),
            )
            attempt.record_first_token(now, uncached, report, is_resumed=request.delivered > 0)
            if request.first_token_s is None:
                request.first_token_s = simulation.elapsed_s
                request.cached_tokens = cached_tokens
        request.delivered += count
        request.last_token_s = simulation.elapsed_s
        if now - request.reported_at >= PROGRESS_INTERVAL_S:
            self._report(request)

    def _report(self, request: ActiveRequest) -> None:
        """Report the tokens delivered since the last report."""
        uncached = len(request.prompt) - request.cached_tokens
        service = weighted_tokens(
            0 if request.is_prompt_charged else uncached, request.delivered - request.reported
        )
        request.is_prompt_charged, request.reported = True, request.delivered
        request.reported_at = self._simulation.now
        self.served_tokens += service
        self.core.record_progress(request.placement, request.delivered, service)

    def restore_link(self, replica: SimulatedReplica) -> None:
        """Deliver what the network withheld."""
        for call in tuple(self._calls.values()):
            if call.replica is replica and call.id in self._calls:
                tokens, is_ended = call.withheld_tokens, call.is_end_withheld
                call.withheld_tokens, call.is_end_withheld = 0, False
                if tokens:
                    self._deliver(call, tokens, 0)
                if is_ended and call.id in self._calls:
                    self._complete(call)

    # --- ends of attempts ------------------------------------------------------------------------

    def lose_replica(self, replica: SimulatedReplica, reason: str) -> None:
        """Let all attempts at a replica break off."""
        for call in tuple(self._calls.values()):
            if call.replica is replica:
                self._lose(call, reason)

    def expect_stall(self, replica: SimulatedReplica) -> None:
        """Give up the attempts at a replica that is cut off, if they stay silent."""
        for call in tuple(self._calls.values()):
            if call.replica is replica:
                self._simulation.call_later(STALL_TIMEOUT_S, partial(self._on_stall, call))

    def _on_stall(self, call: Call) -> None:
        if call.id in self._calls and call.replica.is_cut:
            self._lose(call, "stalled")

    def _lose(self, call: Call, reason: str, *, is_sent: bool = True) -> None:
        if call.id in self._calls:
            self._end_call(
                call, AttemptEnding.LOST, AttemptOutcome.FAILURE, reason, is_sent=is_sent
            )

    def _find_call(self, placement: PlacementRequest, attempt: Attempt) -> Call:
        return next(each for each in self._active[placement].calls if each.attempt is attempt)

    def _drop(self, call: Call) -> None:
        """Forget an attempt, and cancel it at its replica."""
        del self._calls[call.id]
        call.request.calls.remove(call)
        call.replica.cancel(call.id)

    def _end_attempt(
        self,
        placement: PlacementRequest,
        attempt: Attempt,
        ending: AttemptEnding,
        outcome: AttemptOutcome | None,
    ) -> None:
        if placement in self._active:
            self._end_call(self._find_call(placement, attempt), ending, outcome, ending.value)

    def _end_call(
        self,
        call: Call,
        ending: AttemptEnding,
        outcome: AttemptOutcome | None,
        reason: str,
        status: int = 0,
        *,
        is_sent: bool = True,
    ) -> None:
        request = call.request
        call.replica.settle()
        if call.id not in self._calls:
            return
        if request.delivered > request.reported:
            self._report(request)
        self._drop(call)
        self._simulation.trace(f"end {call.id} {ending.value} {request.delivered}")
        is_completed = ending is AttemptEnding.COMPLETED
        self.handle(
            AttemptEnded(
                request.placement,
                call.attempt,
                ending,
                outcome,
                reason,
                status=status,
                is_sent=is_sent,
                output_tokens=request.delivered,
                tokens_per_choice=request.delivered if is_completed else None,
            )
        )

    def _complete(self, call: Call) -> None:
        request = call.request
        self._end_call(call, AttemptEnding.COMPLETED, AttemptOutcome.SUCCESS, "completed")
        self._finish(request, "completed", "completed")

    # --- ends of requests ------------------------------------------------------------------------

    def _finish(self, request: ActiveRequest, status: RequestStatus, reason: str) -> None:
        """End a request, whatever its state."""
        for call in tuple(request.calls):
            self._drop(call)
        self.handle(RequestEnded(request.placement))
        del self._active[request.placement]
        self._settle(request, status, reason)

    def _settle(self, request: ActiveRequest, status: RequestStatus, reason: str) -> None:
        """Bill a request that has ended, and let the next turn follow."""
        planned, simulation, delivered = request.planned, self._simulation, request.delivered
        self.metering.settle(request, status, reason)
        self.counts[status] += 1
        self._rollout.record(
            request.choice, request.tenant.name, request.placement.records, status, delivered
        )
        simulation.trace(f"finish {request.placement.id} {status} {reason} {delivered}")
        self.num_expected -= 1
        turns = self._turns.pop(planned.number, ()) if status == "completed" else ()
        for turn in turns:
            if simulation.elapsed_s + turn.think_s < self._duration_s:
                history = (*request.prompt, *([SAMPLED_TOKEN] * delivered))
                self._expect(turn, history, turn.think_s)
        if not self.num_expected:
            simulation.stop()


def _block_keys(domain: bytes, prompt: list[int]) -> list[bytes]:
    """Return the keys of the prompt's blocks: four bytes for each token."""
    return compute_prefix_keys(domain, array.array("i", prompt).tobytes(), BLOCK_BYTES)


def _digest(number: int) -> bytes:
    return hashlib.blake2b(b"%d" % number, digest_size=16).digest()
