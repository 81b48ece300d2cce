"""A pool under a virtual clock: replicas that start and crash, gateways that follow the route, and the decisions.

After each decision the invariants of rollouts are checked.

Never compared with a real rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from argosy.policy.rollout import (
    ROLLBACK_STATES,
    CheckStatus,
    CommandKind,
    DeclaredVersion,
    GateResult,
    GateVerdict,
    PoolRollouts,
    RollbackCause,
    RolloutCommand,
    RolloutDecision,
    RolloutObservation,
    RolloutPlan,
    RolloutRecord,
    RolloutState,
    RolloutStep,
    VersionStatus,
    decide,
)
from argosy.policy.rollout.rollout_record import TERMINAL_STATES
from argosy.policy.traffic import PoolRoute

TICK_S = 5.0


@dataclass
class VirtualReplica:
    digest: str
    ready_at: float


@dataclass
class VirtualRollout:
    """Pool with its controller. Version v1 serves at first."""

    plan: RolloutPlan
    needed: int = 4
    start_s: float = 20.0
    gateway_lag_s: float = 5.0
    now: float = 1000.0
    declared: str = "v1"
    rollouts: PoolRollouts = field(default_factory=lambda: PoolRollouts(pool="p"))
    route: PoolRoute | None = None
    replicas: list[VirtualReplica] = field(default_factory=list)
    unstartable: set[str] = field(default_factory=set)
    """Versions whose replicas exit at once."""
    check: CheckStatus = CheckStatus.PASSED
    result: GateResult | None = GateResult.PROMOTE
    """Result of the gate; None without a verdict."""
    error_budget: float | None = None
    history: list[tuple[float, int]] = field(default_factory=list)
    """Times and versions of stored routes."""
    shares: list[float] = field(default_factory=list)
    """Share of the candidate after each decision."""

    def __post_init__(self) -> None:
        self.tick()
        self.run(self.start_s + 2 * TICK_S)

    @property
    def record(self) -> RolloutRecord:
        assert self.rollouts.current is not None
        return self.rollouts.current

    @property
    def stored_route(self) -> PoolRoute:
        assert self.route is not None
        return self.route

    @property
    def state(self) -> RolloutState:
        return self.record.state

    def ready(self, digest: str) -> int:
        return sum(each.digest == digest and each.ready_at <= self.now for each in self.replicas)

    def status(self, digest: str) -> VersionStatus:
        ready = self.ready(digest)
        return VersionStatus(
            existing=sum(each.digest == digest for each in self.replicas),
            serving=ready,
            ready=ready,
            check=self.check if ready else CheckStatus.PENDING,
        )

    @property
    def routed_version(self) -> int:
        return max(
            (version for at, version in self.history if at + self.gateway_lag_s <= self.now),
            default=0,
        )

    def observe(self) -> RolloutObservation:
        return RolloutObservation(
            route=self.route,
            routed_version=self.routed_version,
            needed=self.needed,
            versions={each.digest: self.status(each.digest) for each in self.replicas},
            error_budget=self.error_budget,
        )

    def verdict(self) -> GateVerdict | None:
        if self.result is None or self.rollouts.current is None:
            return None
        return GateVerdict(
            self.result, "the gate says so", self.record.id, self.record.step, 1.0, ()
        )

    def decide(self, commands: Sequence[RolloutCommand] = ()) -> RolloutDecision:
        return decide(
            self.rollouts,
            DeclaredVersion(digest=self.declared, plan=self.plan),
            self.observe(),
            self.now,
            verdict=self.verdict(),
            commands=commands,
        )

    def tick(
        self,
        *commands: RolloutCommand,
        seconds: float = TICK_S,
        loses_record: bool = False,
        loses_route: bool = False,
    ) -> RolloutDecision:
        """Advance the clock, decide, store and carry out.

        Args:
            commands: Commands of people.
            seconds: Time since the last decision.
            loses_record: Whether the controller crashes after it stored the route.
            loses_route: Whether it crashes after it stored the record.
        """
        self.now += seconds
        before = self.rollouts
        decision = self.decide(commands)
        if decision.route is not None and not loses_route:
            assert self.route is None or decision.route.version == self.route.version + 1
            self.route = msgspec.json.decode(msgspec.json.encode(decision.route), type=PoolRoute)
            self.history.append((self.now, self.route.version))
        if not loses_record:
            encoded = msgspec.json.encode(decision.rollouts)
            self.rollouts = msgspec.json.decode(encoded, type=PoolRollouts)
        if not (loses_record or loses_route):
            self._check(before, decision, commands)
            if before.current is not None:  # a lost record is replaced by two routes
                again = self.decide()
                assert (again.rollouts, again.route) == (self.rollouts, None)
            self._carry_out(decision)
        return decision

    def run(self, seconds: float) -> None:
        """Advance the clock without commands."""
        until = self.now + seconds
        while self.now < until:
            self.tick()

    def run_until(self, state: RolloutState, max_s: float = 2_000.0) -> None:
        """Advance the clock until the rollout is in a state."""
        until = self.now + max_s
        while self.rollouts.current is None or self.state is not state:
            assert self.now < until, self.rollouts.current
            self.tick()

    def run_until_step(self, step: int) -> None:
        """Advance the clock until a step has its share."""
        until = self.now + 2_000.0
        while not (
            self.rollouts.current is not None
            and self.record.step == step
            and self.record.settled_at is not None
        ):
            assert self.now < until, self.rollouts.current
            self.tick()

    def kill(self, digest: str, count: int = 99) -> None:
        """Lose ready replicas of a version."""
        for replica in [each for each in self.replicas if each.digest == digest][:count]:
            self.replicas.remove(replica)

    def _carry_out(self, decision: RolloutDecision) -> None:
        split = decision.split
        assert split is not None
        wanted = {split.stable: split.stable_replicas}
        if split.candidate is not None:
            wanted[split.candidate] = split.candidate_replicas
        for digest in {each.digest for each in self.replicas} - wanted.keys():
            wanted[digest] = 0
        for digest, count in wanted.items():
            existing = [each for each in self.replicas if each.digest == digest]
            for replica in existing[count:]:
                self.replicas.remove(replica)
            if digest not in self.unstartable:
                for _ in range(count - len(existing)):
                    self.replicas.append(VirtualReplica(digest, self.now + self.start_s))

    def _check(
        self, before: PoolRollouts, decision: RolloutDecision, commands: Sequence[RolloutCommand]
    ) -> None:
        record, previous = self.rollouts.current, before.current
        split, route = decision.split, self.stored_route
        assert split is not None
        assert before.version <= self.rollouts.version <= before.version + 1
        if record is None:
            return
        is_new = previous is None or previous.id != record.id
        self.shares.append(route.share_of(record.candidate) if record.cause is None else 0.0)
        if is_new:  # invariants 5 and 6
            has_ended = previous is None or previous.state in TERMINAL_STATES
            if not has_ended and previous is not None:
                is_done = route.stable == previous.candidate
                assert is_done or not self.status(previous.candidate).existing
            is_permitted = any(each.kind is CommandKind.RESUME for each in commands)
            assert before.verdict_on(record.candidate) is None or is_permitted
        if record.cause is not None:  # a rollback never removes what the route serves
            assert route.stable == split.stable
        if record.state not in TERMINAL_STATES:  # invariant 3
            share = route.share_of(record.candidate)
            is_retiring = record.state is RolloutState.RETIRING
            assert is_retiring or share * self.needed <= self.ready(record.candidate) + 1e-6
        is_kept = record.state is not RolloutState.RETIRING and not record.plan.replaces_in_place
        if is_kept or record.state in TERMINAL_STATES:  # invariant 2
            assert split.stable_replicas >= self.needed
        if record.plan.replaces_in_place and record.state not in ROLLBACK_STATES:
            assert split.stable_replicas + split.candidate_replicas == self.needed  # invariant 9
        bad = {RollbackCause.GATE, RollbackCause.CHECK, RollbackCause.FAILURE}
        if record.cause in bad:  # invariant 1
            assert route.stable == record.stable
            assert route.share_of(record.candidate) == 0.0
            assert route.shadow is None
        if not is_new and previous is not None and record.cause is None:  # invariant 4
            moved = record.step > previous.step or record.state is RolloutState.RETIRING
            had_traffic = previous.active_state in {RolloutState.STEP, RolloutState.SOAKING}
            is_caught_up = record.state is RolloutState.RETIRING and decision.route is None
            if moved and had_traffic and not is_caught_up:
                assert self.result is GateResult.PROMOTE or record.is_forced


def fast_plan(**fields: object) -> RolloutPlan:
    """Return a plan with short steps."""
    plan = RolloutPlan(min_step_s=10.0, soak_s=20.0, max_step_s=600.0)
    return msgspec.structs.replace(plan, **fields)


PLANS = {
    "canary": fast_plan(),
    "canary-in-place": fast_plan(max_surge=0),
    "rolling": fast_plan(strategy="rolling", steps=()),
    "rolling-in-place": fast_plan(strategy="rolling", steps=(), max_surge=0),
    "blue-green": fast_plan(strategy="blue_green", steps=()),
    "a-b": fast_plan(strategy="a_b", steps=(RolloutStep(share=0.5),)),
}
STATES_WITH_A_WAY_BACK = [
    RolloutState.STARTING,
    RolloutState.CHECKING,
    RolloutState.STEP,
    RolloutState.SOAKING,
    RolloutState.PAUSED,
    RolloutState.INCONCLUSIVE,
]


def command(kind: CommandKind, **fields: object) -> RolloutCommand:
    return msgspec.structs.replace(RolloutCommand(kind=kind, by="ann"), **fields)


ABORT = command(CommandKind.ABORT)
FORCED = command(CommandKind.PROMOTE, force=True, reason="hotfix")


def begin(plan: RolloutPlan | str = "canary", needed: int = 4) -> VirtualRollout:
    """Return a pool for which version v2 has just been declared."""
    pool = VirtualRollout(PLANS[plan] if isinstance(plan, str) else plan, needed)
    pool.declared = "v2"
    pool.tick()
    return pool


def bring_to(state: RolloutState, plan: str = "canary") -> VirtualRollout:
    """Return a pool whose rollout is in a state."""
    pool = begin(plan)
    if state is RolloutState.CHECKING:
        pool.check = CheckStatus.PENDING
    if state is RolloutState.INCONCLUSIVE:
        pool.result = GateResult.INCONCLUSIVE
    if state is RolloutState.PAUSED:
        pool.run_until(RolloutState.STEP)
        pool.tick(command(CommandKind.PAUSE))
    pool.run_until(state)
    return pool
