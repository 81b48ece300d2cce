"""Decision about the rollout of one pool, from its declaration, commands, observation and measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from argosy.policy.rollout.gate import GateVerdict
from argosy.policy.rollout.rollout_inputs import (
    CommandKind,
    RolloutCommand,
    RolloutObservation,
    order_commands,
)
from argosy.policy.rollout.rollout_outputs import (
    ReplicaSplit,
    build_route,
    candidate_share,
    is_shadow_step,
    split_replicas,
)
from argosy.policy.rollout.rollout_record import (
    MAX_TRANSITIONS,
    MAX_VERDICTS,
    PAUSED_STATES,
    TRAFFIC_STATES,
    DigestVerdict,
    PoolRollouts,
    RollbackCause,
    RolloutPlan,
    RolloutRecord,
    RolloutState,
    Transition,
)
from argosy.policy.rollout.rollout_rules import (
    Change,
    describe_wait,
    evidence_blocker,
    find_pause,
    find_progress,
    find_rollback,
    is_budget_spent,
    is_settled,
    next_step,
)
from argosy.policy.traffic import PoolRoute, UserTraffic, choose_salt, heavy_tenants

_RESUMABLE_STATES = PAUSED_STATES | {RolloutState.PLANNED}
_MAX_CHANGES = 2 * len(RolloutState)
"""Automatic transitions of one decision: the end of one rollout and the beginning of the next."""
_BUDGET_REFUSAL = "the error budget is spent; repeat it with force and a reason to go on"


class DeclaredVersion(msgspec.Struct, frozen=True, kw_only=True):
    """Version that is declared for a pool."""

    digest: str
    """Content digest of all settings that need a restart. Another setting changes no version."""
    plan: RolloutPlan


class GateStep(NamedTuple):
    """Step that the gate shall have open. See `RolloutGate.open_step`."""

    step: int
    share: float


class RolloutDecision(NamedTuple):
    """Result of `decide`."""

    rollouts: PoolRollouts
    """Record to store, with a larger version if it has changed."""
    route: PoolRoute | None
    """Route to store, if it differs from the observed one; None if it does not. A route that rolls back is stored
    before the record, so that it needs nothing else to succeed."""
    split: ReplicaSplit | None
    """Desired replicas; None before the first route is stored."""
    gate_step: GateStep | None
    """None if no step has traffic."""
    refusals: tuple[str, ...]
    """Commands that were not followed, and why."""
    status: str
    """State in one sentence."""


def decide(
    rollouts: PoolRollouts,
    declared: DeclaredVersion,
    observation: RolloutObservation,
    now: float,
    *,
    verdict: GateVerdict | None = None,
    commands: Sequence[RolloutCommand] = (),
    history: Sequence[UserTraffic] = (),
) -> RolloutDecision:
    """Decide about the rollout of one pool.

    The result depends on the arguments alone. The same arguments after its records were stored change nothing more.

    Args:
        rollouts: Stored record of the pool.
        declared: What is declared for it.
        observation: What exists.
        now: Seconds since the epoch.
        verdict: Verdict of the gate of the current rollout; None without measurements.
        commands: Commands since the last decision, oldest first. Pass each of them once.
        history: Recent traffic by sticky key, for the choice of a salt when a rollout starts.
    """
    route = observation.route
    if route is None:
        first = PoolRoute(pool=rollouts.pool, version=1, stable=declared.digest)
        split = ReplicaSplit(first.stable, observation.needed)
        return RolloutDecision(rollouts, first, split, None, (), "the first version is deployed")
    machine = _Machine(rollouts, declared, observation, now, verdict)
    machine.catch_up(route)
    machine.follow(order_commands(commands))
    machine.advance(history)
    return machine.decision(route)


class _Machine:
    """State of one decision."""

    def __init__(
        self,
        rollouts: PoolRollouts,
        declared: DeclaredVersion,
        observation: RolloutObservation,
        now: float,
        verdict: GateVerdict | None,
    ) -> None:
        self._stored = rollouts
        self._declared = declared
        self._observation = observation
        self._now = now
        self._verdict = verdict
        self._record = rollouts.current
        self._verdicts = rollouts.verdicts
        self._refusals: list[str] = []

    def catch_up(self, route: PoolRoute) -> None:
        """Retire the stable version if the stored route has given it up, but the record of that was lost."""
        record = self._record
        if record is None or record.has_ended or route.rollout != record.id:
            return
        if route.stable == record.candidate and record.state is not RolloutState.RETIRING:
            reason = "the route serves the new version only"
            self._change(Change(RolloutState.RETIRING, reason))

    def follow(self, commands: Sequence[RolloutCommand]) -> None:
        """Follow commands in their order. After an abort all others are refused."""
        for command in commands:
            refusal = self._follow(command)
            if refusal:
                self._refusals.append(f"{command.kind} by {command.by}: {refusal}")

    def _follow(self, command: RolloutCommand) -> str:
        """Return why a command is not followed; empty if it is."""
        record = self._record
        if record is None or record.has_ended:
            return self._permit_retry(command)
        if command.rollout and command.rollout != record.id:
            return f"it was given for the rollout {command.rollout}; the current one is {record.id}"
        if not record.can_roll_back:
            return f"the rollout is {record.state}: {record.reason}"
        reason = command.reason or f"{command.kind} by {command.by}"
        forced = msgspec.structs.replace(record, is_forced=record.is_forced or command.force)
        match command.kind:
            case CommandKind.ABORT:
                self._change(Change(RolloutState.ROLLING_BACK, reason, cause=RollbackCause.COMMAND))
            case CommandKind.PROMOTE:
                return self._promote(forced, reason)
            case CommandKind.PAUSE if record.state not in PAUSED_STATES:
                self._change(Change(RolloutState.PAUSED, reason))
            case CommandKind.RESUME if record.state in _RESUMABLE_STATES:
                return self._resume(forced, reason)
            case _:
                return f"the rollout is {record.state} already"
        return ""

    def _permit_retry(self, command: RolloutCommand) -> str:
        digest = self._declared.digest
        rejected = self._stored.verdict_on(digest)
        if command.kind is CommandKind.RESUME and rejected is not None:
            self._verdicts = tuple(each for each in self._verdicts if each.digest != digest)
            return ""
        return "no rollout is running"

    def _promote(self, record: RolloutRecord, reason: str) -> str:
        if record.active_state not in TRAFFIC_STATES:
            return f"the rollout is {record.active_state}; the candidate has not been checked yet"
        if is_budget_spent(record, self._observation):
            return _BUDGET_REFUSAL
        blocker = evidence_blocker(record, self._verdict)
        if blocker:
            return f"{blocker}; repeat it with force and a reason to go on without"
        change = next_step(record, self._observation, reason)
        if change is None:
            return "not all users get the candidate yet, because it has too few ready replicas"
        self._record = record
        self._change(change)
        return ""

    def _resume(self, record: RolloutRecord, reason: str) -> str:
        if is_budget_spent(record, self._observation):
            return _BUDGET_REFUSAL
        self._record = record
        self._change(Change(record.active_state, reason))
        return ""

    def advance(self, history: Sequence[UserTraffic]) -> None:
        """Follow the declaration, then make all automatic transitions that are due."""
        self._follow_declaration()
        for _ in range(_MAX_CHANGES):
            self._start(history)
            change = self._next_change()
            if change is None:
                break
            self._change(change)

    def _follow_declaration(self) -> None:
        record, digest = self._record, self._declared.digest
        if record is not None and record.can_roll_back and digest != record.candidate:
            if digest == record.stable:
                reason, cause = "the stable version is declared again", RollbackCause.REVERTED
            else:
                reason, cause = f"version {digest} is declared", RollbackCause.SUPERSEDED
            self._change(Change(RolloutState.ROLLING_BACK, reason, cause=cause))

    def _start(self, history: Sequence[UserTraffic]) -> None:
        """Start a rollout if another version is declared and none is running."""
        route, digest = self._observation.route, self._declared.digest
        if route is None or digest == route.stable or route.variants or route.shadow:
            return
        if self._record is not None and not self._record.has_ended:
            return
        if any(each.digest == digest for each in self._verdicts):
            return
        rollout = f"{self._stored.pool}-{self._stored.version + 1}"
        plan = self._declared.plan
        shares = [step.share for step in plan.steps if not step.is_shadow]
        choice = choose_salt(rollout, digest, history, shares)
        self._record = RolloutRecord(
            id=rollout,
            stable=route.stable,
            candidate=digest,
            plan=plan,
            salt=choice.salt,
            per_session_tenants=heavy_tenants(history),
            effective_users=choice.effective_users,
            state_since=self._now,
            started_at=self._now,
            reason=f"version {digest} is declared",
        )

    def _next_change(self) -> Change | None:
        record = self._record
        if record is None:
            return None
        if record.can_roll_back:
            change = find_rollback(record, self._observation, self._verdict, self._now)
            change = change or find_pause(record, self._observation, self._now)
            if change is not None or record.state in PAUSED_STATES:
                return change
        if (
            record.active_state in TRAFFIC_STATES
            and record.settled_at is None
            and is_settled(record, self._observation)
        ):
            record = self._record = msgspec.structs.replace(record, settled_at=self._now)
        return find_progress(record, self._observation, self._verdict, self._now)

    def _change(self, change: Change) -> None:
        record = self._record
        assert record is not None
        state, step = change.state, record.step if change.step is None else change.step
        is_pause = state in PAUSED_STATES
        is_same_step = is_pause or (state is record.active_state and step == record.step)
        cause = record.cause or change.cause
        transition = Transition(at=self._now, state=state, step=step, reason=change.reason)
        self._record = msgspec.structs.replace(
            record,
            state=state,
            state_since=self._now,
            step=step,
            settled_at=record.settled_at if is_same_step else None,
            resume_state=record.active_state if is_pause else None,
            reason=change.reason,
            cause=cause,
            transitions=(*record.transitions, transition)[-MAX_TRANSITIONS:],
        )
        is_final = state is RolloutState.ROLLING_BACK and cause not in {
            RollbackCause.SUPERSEDED,
            RollbackCause.REVERTED,
        }
        if is_final and cause is not None:
            rejected = DigestVerdict(
                digest=record.candidate,
                rollout=record.id,
                cause=cause,
                reason=change.reason,
                at=self._now,
            )
            self._verdicts = (*self._verdicts, rejected)[-MAX_VERDICTS:]

    def decision(self, route: PoolRoute) -> RolloutDecision:
        """Return the result."""
        record, observation = self._record, self._observation
        stored = self._stored
        rollouts = msgspec.structs.replace(stored, current=record, verdicts=self._verdicts)
        if rollouts != stored:
            rollouts = msgspec.structs.replace(rollouts, version=stored.version + 1)
        if record is None or record.has_ended:
            # Variants without a rollout remain if its record was lost.
            wanted = route.roll_back("no rollout is running", self._now)
            split = ReplicaSplit(route.stable, observation.needed)
        else:
            wanted = build_route(record, observation, route, self._now)
            split = split_replicas(record, observation)
        return RolloutDecision(
            rollouts=rollouts,
            route=None if wanted is route else wanted,
            split=split,
            gate_step=None if record is None else self._gate_step(record),
            refusals=tuple(self._refusals),
            status=self._describe(record),
        )

    def _gate_step(self, record: RolloutRecord) -> GateStep | None:
        if record.active_state not in TRAFFIC_STATES:
            return None
        if record.active_state is RolloutState.SOAKING:
            return GateStep(record.step, 1.0)
        share = record.plan.steps[record.step].share
        if not is_shadow_step(record):
            share = max(share, candidate_share(record, self._observation))
        return GateStep(record.step, share)

    def _describe(self, record: RolloutRecord | None) -> str:
        rejected = next((e for e in self._verdicts if e.digest == self._declared.digest), None)
        is_running = record is not None and not record.has_ended
        if rejected is not None and not is_running:
            return (
                f"version {rejected.digest} was rolled back ({rejected.reason}) and is not tried again;"
                " change it, or resume with a reason"
            )
        if record is None:
            return "no rollout"
        wait = describe_wait(record, self._observation, self._verdict, self._now)
        return f"{record.state}: {record.reason}" + (f"; {wait}" if wait else "")
