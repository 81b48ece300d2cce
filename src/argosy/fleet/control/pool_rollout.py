"""Rollouts of one pool: observes both versions, decides, stores the decision, and divides the pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import structlog

from argosy.deployment import (
    ROLLOUT_STATUS_PREFIX,
    PoolConfig,
    RolloutDocuments,
    describe_decision,
)
from argosy.fleet.control.declared_fleet import DeclaredFleet, VersionTarget
from argosy.fleet.control.fleet_observer import FleetObserver
from argosy.fleet.control.gateway_publisher import GatewayPublisher
from argosy.fleet.control.pinned_prompts import (
    CheckResult,
    PinnedPromptCheck,
    check_pinned_prompts,
)
from argosy.fleet.control.quality_check import check_quality
from argosy.fleet.control.rollout_evidence import (
    ErrorBudgetReader,
    OutcomePoller,
    RolloutEvidence,
    TrafficHistory,
    summarise_history,
)
from argosy.fleet.control.rollout_writer import RolloutWriter
from argosy.fleet.control.term_journal import TermJournal
from argosy.fleet.control.version_observer import (
    EjectionWatch,
    divide_pool,
    find_crash_loop,
    observe_version,
)
from argosy.policy.reconciliation import ObservedReplica, is_ready
from argosy.policy.rollout import (
    TRAFFIC_STATES,
    CheckStatus,
    Comparison,
    DeclaredVersion,
    RolloutDecision,
    RolloutObservation,
    RolloutRecord,
    RolloutState,
    decide,
)
from argosy.policy.traffic import PoolRoute
from argosy.process import run_in_daemon_thread

HISTORY_MAX_AGE_S = 60.0
"""Age from which the history of requests for a rollout that has not started is read again."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.fleet")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutMeans:
    """Means of a controller for the rollouts of its pools."""

    journal: TermJournal
    observer: FleetObserver
    publisher: GatewayPublisher
    writer: RolloutWriter
    poller: OutcomePoller
    budgets: ErrorBudgetReader


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSnapshot:
    """All that one decision about a pool rests on."""

    declared: DeclaredFleet
    """The declaration in force."""
    pool: PoolConfig
    stored: RolloutDocuments
    replicas: Sequence[ObservedReplica]
    """Replicas of the pool."""
    needed: int
    """Replicas that the whole demand needs."""
    now: float
    """Seconds since the epoch."""


class PoolRollout:
    """Rollouts of one pool. Not thread-safe: use it from one event loop."""

    def __init__(self, pool: str, means: RolloutMeans) -> None:
        self._name = pool
        self._means = means
        self.evidence = RolloutEvidence(means.journal.records, pool)
        self.route: PoolRoute | None = None
        """Stored route, as of the last decision that was stored."""
        self.record: RolloutRecord | None = None
        self.targets: list[VersionTarget] = []
        """Desired replicas of each version; empty before the first decision that was stored."""
        self.comparison: Comparison | None = None
        """Measurements that the gateways shall make."""
        self.check = PinnedPromptCheck(pool, means.journal.wake)
        self._ejections = EjectionWatch()
        self._history: TrafficHistory | None = None
        self._history_read_at = float("-inf")
        self._history_digest = ""
        self._refusals: tuple[str, ...] = ()

    @property
    def is_running(self) -> bool:
        """Whether a rollout has begun and not ended."""
        return self.record is not None and not self.record.has_ended

    async def decide(self, snapshot: PoolSnapshot) -> None:
        """Decide once, and store the decision.

        Raises:
            StoreError: The store cannot be used. The next call continues.
        """
        begun = await self._begin(snapshot)
        if begun is None:
            self._means.journal.wake.set()  # another process has changed the documents; decide again
            return
        snapshot = replace(snapshot, stored=begun)
        stored, evidence, now = begun, self.evidence, snapshot.now
        history = await self._read_history(snapshot)
        current, running = stored.rollouts.current, stored.rollouts.running
        if running is not None and not evidence.has(running.id):
            evidence.start(running, history)  # its record was lost
        verdict = None
        if current is not None and evidence.has(current.id):
            verdict = evidence.verdict(now)
        observation = await self._observe(snapshot)
        declared = DeclaredVersion(
            digest=snapshot.declared.digest(self._name),
            plan=snapshot.declared.rollout_plan(snapshot.pool),
        )
        make_decision = partial(
            decide,
            stored.rollouts,
            declared,
            observation,
            now,
            verdict=verdict,
            commands=stored.commands,
        )
        if history is None:
            decision = make_decision()
        else:  # the choice of a salt takes long
            decision = await run_in_daemon_thread(partial(make_decision, history=history.traffic))
        record = decision.rollouts.current
        if record is not None and (current is None or record.id != current.id):
            evidence.start(record, history)
            await self._means.journal.save()  # first, since no record is without its baseline
        if not await self._means.writer.write(stored, decision.route, decision.rollouts):
            self._means.journal.wake.set()
            return
        self.route, self.record = decision.route or stored.route, record
        self._divide(snapshot, decision)
        self._measure(snapshot, decision)
        self._means.writer.report(self._name, stored.rollouts.current, decision, verdict)
        if stored.commands:
            self._refusals = decision.refusals
        status = describe_decision(decision, verdict, observation, declared.digest, self._refusals)
        encoded = msgspec.json.encode(status)
        self._means.journal.records.rollouts[f"{ROLLOUT_STATUS_PREFIX}{self._name}"] = encoded
        if stored.commands:
            await self._means.journal.save()
            await self._means.writer.remove_commands(stored)
        self._run_check(snapshot)

    async def _begin(self, snapshot: PoolSnapshot) -> RolloutDocuments | None:
        """Return the documents with a route and a record, which are written if the pool has none.

        The version that serves now is the stable one. Returns None if they have to be read
        again.
        """
        declared, stored, now = snapshot.declared, snapshot.stored, snapshot.now
        pool, route = stored.pool, stored.route
        latest = self._means.publisher.latest_version(pool)
        if route is not None and latest > route.version:
            # A gateway has rolled it back without the store, or the store has lost a route.
            reason = "a gateway follows a later route than the stored one"
            healed = msgspec.structs.replace(route.roll_back(reason, now), version=latest + 1)
            await self._means.writer.write(stored, healed, stored.rollouts)
            return None
        if route is not None and stored.rollouts.version:
            return stored
        serving = Counter(each.generation for each in snapshot.replicas if each.in_rotation)
        stable = None if route is None else declared.find_generation(pool, route.stable)
        digest = declared.digest(pool)
        if stable is not None and serving[stable] and route is not None:
            digest = route.stable
        elif serving and not serving[declared.generation(pool)]:
            digest = declared.find_digest(pool, serving.most_common(1)[0][0]) or digest
        version = latest if route is None else route.version
        changed = None
        if route is None or route.stable != digest:
            changed = PoolRoute(pool=pool, version=version + 1, stable=digest)
        rollouts = stored.rollouts
        if not rollouts.version:
            rollouts = msgspec.structs.replace(rollouts, version=1)
        if not await self._means.writer.write(stored, changed, rollouts):
            return None
        return msgspec.structs.replace(stored, route=changed or route, rollouts=rollouts)

    async def _read_history(self, snapshot: PoolSnapshot) -> TrafficHistory | None:
        """Return recent requests if a rollout may start, or if what it is compared with was lost; otherwise None."""
        declared, stored, now = snapshot.declared, snapshot.stored, snapshot.now
        digest, running, route = declared.digest(self._name), stored.rollouts.running, stored.route
        if running is not None and running.candidate == digest:
            if self.evidence.has(running.id):
                return None
        elif route is None or digest == route.stable or stored.rollouts.verdict_on(digest):
            return None
        is_fresh = now - self._history_read_at < HISTORY_MAX_AGE_S
        if not is_fresh or self._history_digest != digest:
            outcomes = await self._means.poller.read_history(snapshot.pool.model)
            summarise = partial(summarise_history, outcomes, declared.config.objectives)
            self._history = await run_in_daemon_thread(summarise)
            self._history_read_at, self._history_digest = now, digest
        return self._history

    async def _observe(self, snapshot: PoolSnapshot) -> RolloutObservation:
        declared, pool, stored = snapshot.declared, snapshot.pool, snapshot.stored
        route, current = stored.route, stored.rollouts.current
        grouped: dict[str, list[ObservedReplica]] = {}
        for replica in snapshot.replicas:
            version = declared.find_digest(self._name, replica.generation)
            if version is not None:
                grouped.setdefault(version, []).append(replica)
        versions = {}
        for digest, members in grouped.items():
            check, problem = CheckResult(CheckStatus.PENDING, ""), ""
            if current is not None and digest == current.candidate:
                check = self.check.result(current.id)
                stable = grouped.get(current.stable, ())
                problem = find_crash_loop(members, stable, current.started_at)
                if current.active_state in TRAFFIC_STATES and not problem:
                    problem = self._ejections.find_problem(
                        current.id, members, stable, snapshot.now
                    )
            versions[digest] = observe_version(
                members,
                declared.restart_limits(pool),
                check,
                requires_warm_up=pool.warm_up,
                problem=problem,
            )
        return RolloutObservation(
            route=route,
            routed_version=0 if route is None else self._means.publisher.routed_version(route),
            needed=snapshot.needed,
            versions=versions,
            error_budget=await self._means.budgets.read(
                pool.model,
                declared.config.objectives,
                declared.rollout_plan(pool).gate.max_miss_rate,
                snapshot.now,
            ),
            longest_request_s=self._means.poller.longest_request_s(pool.model),
        )

    def _divide(self, snapshot: PoolSnapshot, decision: RolloutDecision) -> None:
        declared, pool = snapshot.declared, snapshot.pool
        split, route = decision.split, self.route
        assert split is not None  # noqa: S101 - the pool has a route
        assert route is not None  # noqa: S101
        stable = declared.find_generation(pool.name, split.stable)
        candidate = None
        if split.candidate is not None:
            candidate = declared.find_generation(pool.name, split.candidate)
        if stable is None:
            log.error("rollout_version_unknown", pool=pool.name, version=split.stable)
            return
        self.targets = divide_pool(
            split,
            self.record,
            snapshot.replicas,
            (stable, candidate),
            pool.count_spares(split.stable_replicas + split.candidate_replicas),
            stable=route.stable,
        )

    def _measure(self, snapshot: PoolSnapshot, decision: RolloutDecision) -> None:
        """Let the gateways measure the current step."""
        record, evidence, model = decision.rollouts.current, self.evidence, snapshot.pool.model
        self.comparison = None
        self._means.poller.sources.pop(model, None)
        if record is not None and decision.gate_step is not None:
            self.comparison = evidence.open_step(
                record, decision.gate_step, snapshot.declared.config.objectives, snapshot.now
            )
            self._means.poller.sources[model] = record.id, evidence
        evidence.encode()

    def _run_check(self, snapshot: PoolSnapshot) -> None:
        """Send the pinned prompts and the golden sets to a candidate that waits for them."""
        declared, pool, record = snapshot.declared, snapshot.pool, self.record
        if record is None or record.has_ended or record.state is RolloutState.INCONCLUSIVE:
            self.check.cancel()  # after an inconclusive one it is repeated when a person resumes
        if record is None or record.state is not RolloutState.CHECKING or pool.rollout is None:
            return
        names = {
            digest: [
                each.name
                for each in snapshot.replicas
                if each.generation == declared.find_generation(pool.name, digest)
                and is_ready(each, requires_warm_up=pool.warm_up)
            ]
            for digest in (record.stable, record.candidate)
        }
        records = self._means.journal.records.replicas
        stable_url = next((records[name].url for name in names[record.stable]), None)
        candidate_urls = [records[name].url for name in names[record.candidate]]
        rollout, quality = pool.rollout, self._means.journal.store.quality
        same_weights = self._have_same_weights(
            declared, record, [*names[record.stable], *names[record.candidate]]
        )

        async def send() -> CheckResult:
            result = await check_pinned_prompts(
                stable_url, candidate_urls, pool.model, rollout.prompts, same_weights=same_weights
            )
            if result.status is CheckStatus.PASSED:
                return await check_quality(
                    quality, rollout.quality, stable_url, candidate_urls, pool.model
                )
            return result

        self.check.run(record.id, send)

    def _have_same_weights(
        self,
        declared: DeclaredFleet,
        record: RolloutRecord,
        replicas: Sequence[str],
    ) -> bool:
        """Return whether both versions must give the same bytes."""
        if declared.check_paths(self._name).load is None:
            return declared.has_same_computation(self._name, record.stable, record.candidate)
        readings = [self._means.observer.reading(name) for name in replicas]
        identities = {
            "" if reading is None or reading.load is None else reading.load.arithmetic_id
            for reading in readings
        }
        return len(identities) == 1 and "" not in identities
