"""Rollouts of a simulated fleet: the production's decisions, its gate, and the requests that the gate compares.

Requests are scored when they end. Gateways follow a route as soon as it is decided, and pinned prompts always pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from argosy.policy import AttemptOutcome, RequestStatus
from argosy.policy.placement import AttemptRecord
from argosy.policy.reconciliation import (
    LaunchState,
    ObservedReplica,
    RestartLimits,
    is_ready,
    parse_replica_name,
    plan_restart,
)
from argosy.policy.rollout import (
    Arm,
    CheckStatus,
    DeclaredVersion,
    GateResult,
    GateVerdict,
    OutcomeAggregator,
    OutcomeStatus,
    PoolRollouts,
    RequestOutcome,
    RollbackCause,
    RolloutDecision,
    RolloutGate,
    RolloutObservation,
    RolloutPlan,
    RolloutState,
    VersionStatus,
    decide,
    freeze_history,
)
from argosy.policy.traffic import PoolRoute, TrafficSubject, VersionChoice
from argosy.twin.simulation import Simulation, require

MAX_HISTORY = 5000
"""Requests of the stable version that are kept."""
GATEWAY = "gateway"
_BAD_CAUSES = (RollbackCause.GATE, RollbackCause.CHECK, RollbackCause.FAILURE)


def name_version(generation: int) -> str:
    """Return the digest of a generation."""
    return f"v{generation}"


def generation_of(digest: str) -> int:
    """Return the generation of a digest."""
    return int(digest[1:])


class SimulatedRollout:
    """Rollouts of the pool.

    Args:
        simulation: Clock and trace.
        pool: Name of the pool.
        plan: Plan of each rollout.
    """

    def __init__(self, simulation: Simulation, pool: str, plan: RolloutPlan) -> None:
        self.declared = 1
        """Generation that is declared."""
        self.route = PoolRoute(pool=pool, version=1, stable=name_version(1))
        self.split: Mapping[int, int] = {}
        """Desired replicas of each generation, the stable one first. Empty before the first decision."""
        self._simulation = simulation
        self._plan = plan
        self._rollouts = PoolRollouts(pool=pool, version=1)
        self._gate: RolloutGate | None = None
        self._aggregator: OutcomeAggregator | None = None
        self._step: int | None = None
        self._history: deque[RequestOutcome] = deque(maxlen=MAX_HISTORY)

    @property
    def state(self) -> str:
        """State of the current rollout; empty if there was none."""
        current = self._rollouts.current
        return "" if current is None else current.state.value

    @property
    def stable(self) -> int:
        """Generation that serves all other users."""
        return generation_of(self.route.stable)

    def has_share(self, generation: int) -> bool:
        """Return whether the route sends requests to a generation."""
        return self.route.share_of(name_version(generation)) > 0.0

    def select(self, tenant: str, request: str) -> VersionChoice:
        """Select the version for a request."""
        return self.route.select_version(TrafficSubject(tenant=tenant, request=request))

    # --- measurements ----------------------------------------------------------------------------

    def record(
        self,
        choice: VersionChoice,
        tenant: str,
        attempts: Sequence[AttemptRecord],
        status: RequestStatus,
        output_tokens: int,
    ) -> None:
        """Count a request that has ended.

        Args:
            choice: The version that it was assigned to.
            tenant: Its tenant.
            attempts: Its attempts.
            status: How it ended.
            output_tokens: Tokens that its client has received.
        """
        is_stable = choice.digest == self.route.stable
        outcome = _build_outcome(
            Arm.STABLE if is_stable else Arm.CANDIDATE,
            (tenant, ""),
            [each for each in attempts if _version_of(each.replica) == choice.digest],
            len(attempts),
            status,
            output_tokens,
        )
        if outcome is None:
            return
        if is_stable:
            self._history.append(outcome)
        if self._aggregator is not None and self._step is not None and choice.is_randomised:
            self._aggregator.record(outcome)

    # --- decisions -------------------------------------------------------------------------------

    def decide(
        self, replicas: Sequence[ObservedReplica], limits: RestartLimits, needed: int, now: float
    ) -> None:
        """Decide once, as a controller does at an interval, and follow the decision."""
        observation = RolloutObservation(
            route=self.route,
            routed_version=self.route.version,
            needed=needed,
            versions=_observe_versions(replicas, limits),
        )
        declared = DeclaredVersion(digest=name_version(self.declared), plan=self._plan)
        verdict = self._read_verdict(now)
        before = self._rollouts
        decision = decide(before, declared, observation, now, verdict=verdict)
        current, previous = decision.rollouts.current, before.current
        if current is not None and (previous is None or previous.id != current.id):
            baseline, rates = freeze_history(tuple(self._history))
            self._gate = RolloutGate.start(
                current.id, current.plan.gate, current.plan.num_gate_starts, baseline.miss_rate
            )
            self._aggregator = OutcomeAggregator(current.id, 0, GATEWAY, baseline, rates)
        self._rollouts = decision.rollouts
        self.route = decision.route or self.route
        self._follow_split(decision)
        self._open_step(decision, now)
        if self.state != ("" if previous is None else previous.state.value):
            self._simulation.trace(f"rollout {self.state} {current.reason if current else ''}")
        self._check(observation, verdict, before)

    def _read_verdict(self, now: float) -> GateVerdict | None:
        gate, aggregator = self._gate, self._aggregator
        if gate is None or aggregator is None or gate.record.step is None:
            return None
        batch = aggregator.take_batch(now) if self._step is not None else None
        if batch is not None:
            gate.add(batch)
        return gate.verdict(now)

    def _follow_split(self, decision: RolloutDecision) -> None:
        split = decision.split
        if split is None:
            return
        replicas = {generation_of(split.stable): split.stable_replicas}
        if split.candidate is not None:
            replicas[generation_of(split.candidate)] = split.candidate_replicas
        self.split = dict(sorted(replicas.items(), key=lambda each: each[0] != self.stable))

    def _open_step(self, decision: RolloutDecision, now: float) -> None:
        step = decision.gate_step
        self._step = None if step is None else step.step
        if step is not None and self._gate is not None and self._aggregator is not None:
            opened = self._gate.record.step
            if opened is None or opened.index != step.step:
                self._aggregator.start_step(step.step)
            self._gate.open_step(step.step, step.share, now)

    def _check(
        self,
        observation: RolloutObservation,
        verdict: GateVerdict | None,
        before: PoolRollouts,
    ) -> None:
        """Check the invariants of rollouts after a decision."""
        record, previous = self._rollouts.current, before.current
        if record is None:
            return
        name, share = record.candidate, self.route.share_of(record.candidate)
        is_rejected = verdict is not None and verdict.rejects(record.id)
        is_failed = bool(observation.status(name).failure)
        if (is_rejected or is_failed) and record.can_roll_back:
            state = record.state.value
            require(record.is_forced, f"version {name} is {state} although it is rejected")
        if record.cause is not None:  # one that is not bad may serve what the old one cannot yet
            is_old = self.route.stable == record.stable
            may_serve = record.cause not in _BAD_CAUSES
            require(
                is_old and (may_serve or not share), f"version {name} serves after its rollback"
            )
        elif not record.has_ended and record.state is not RolloutState.RETIRING:
            ready = observation.status(name).ready
            fits = share * observation.needed <= ready + 1e-6
            require(fits, f"version {name} has a share of {share} with {ready} replicas")
        if previous is not None and previous.id == record.id and record.step > previous.step:
            is_promoted = verdict is not None and verdict.result is GateResult.PROMOTE
            require(is_promoted, f"version {name} goes on without evidence")


def _version_of(replica: str) -> str:
    parsed = parse_replica_name(replica)
    return "" if parsed is None else name_version(parsed[1])


def _observe_versions(
    replicas: Sequence[ObservedReplica], limits: RestartLimits
) -> dict[str, VersionStatus]:
    """Return the replicas of each version, as a controller sees them."""
    grouped: dict[str, list[ObservedReplica]] = {}
    for replica in replicas:
        grouped.setdefault(name_version(replica.generation), []).append(replica)
    statuses = {}
    for digest, members in grouped.items():
        plans = [(plan_restart(each, limits), each) for each in members if not each.is_serving]
        failures = [
            f"replica {each.name}: {plan.reason}" for plan, each in plans if plan.has_failed
        ]
        statuses[digest] = VersionStatus(
            existing=len(members),
            serving=sum(each.is_serving and each.state is LaunchState.RUNNING for each in members),
            ready=sum(is_ready(each, requires_warm_up=False) for each in members),
            check=CheckStatus.PASSED,
            failure=failures[0] if failures else "",
        )
    return statuses


def _build_outcome(
    arm: Arm,
    key: tuple[str, str],
    own: Sequence[AttemptRecord],
    num_attempts: int,
    status: RequestStatus,
    output_tokens: int,
) -> RequestOutcome | None:
    """Return the outcome of a request at its version; None if the version has not processed it."""
    own = [each for each in own if each.sent_at is not None]
    if not own:
        return None
    first, last = own[0], own[-1]
    has_failed = any(each.outcome == AttemptOutcome.FAILURE.value for each in own)
    outcome = OutcomeStatus.COMPLETED
    if has_failed or len(own) < num_attempts or status == "failed":
        outcome = OutcomeStatus.FAILED
    elif status == "cancelled":
        outcome = OutcomeStatus.CANCELLED
    elif status == "refused":
        outcome = OutcomeStatus.REFUSED
    sent_at = first.sent_at or 0.0
    first_token_at = next((each.first_token_at for each in own if each.first_token_at), None)
    return RequestOutcome(
        arm=arm,
        key=key,
        status=outcome,
        age_s=max(0.0, (last.ended_at or sent_at) - sent_at),
        ttft_s=None if first_token_at is None else max(0.0, first_token_at - sent_at),
        output_tokens=output_tokens,
        uncached_tokens=first.uncached_tokens,
        in_flight=first.in_flight,
    )
