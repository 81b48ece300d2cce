"""Rollouts of the pools of a fleet: observes both versions, decides, stores the decision, and divides the pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import structlog

from argosy.fleet.control.declared_fleet import DeclaredFleet, RoutedMember, VersionTarget
from argosy.fleet.control.fleet_observer import FleetObserver
from argosy.fleet.control.fleet_records import FleetRecords
from argosy.fleet.control.gateway_publisher import GatewayPublisher
from argosy.fleet.control.outcome_poller import OutcomePoller
from argosy.fleet.control.pinned_prompts import CheckResult, check_pinned_prompts
from argosy.fleet.control.rollout_checks import RolloutChecks
from argosy.fleet.control.rollout_documents import RolloutDocuments, read_rollout_documents
from argosy.fleet.control.rollout_evidence import (
    RolloutEvidence,
    TrafficHistory,
    summarise_history,
)
from argosy.fleet.control.rollout_status import (
    ROLLOUT_REFUSED,
    ROLLOUT_STATUS_PREFIX,
    describe_decision,
)
from argosy.fleet.control.rollout_writer import RolloutWriter
from argosy.fleet.control.version_observer import divide_pool, is_ready, observe_version
from argosy.fleet.declaration import PoolConfig
from argosy.gateway import PublishedVersions
from argosy.policy.reconciliation import ObservedReplica
from argosy.policy.rollout import (
    TERMINAL_STATES,
    CheckStatus,
    Comparison,
    DeclaredVersion,
    GateVerdict,
    PoolRollouts,
    RolloutDecision,
    RolloutObservation,
    RolloutRecord,
    RolloutState,
    decide,
)
from argosy.policy.traffic import PoolRoute
from argosy.process import run_in_daemon_thread
from argosy.store import FleetStore

HISTORY_MAX_AGE_S = 60.0
"""Age from which the history of requests for a rollout that has not started is read again."""

EventCallback = Callable[[str, str, str, str], None]
"""Records an event: its kind, the pool, the reason and the outcome."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.fleet")


@dataclass(slots=True)
class _PoolMemory:
    """A pool with rollouts as this controller knows it."""

    evidence: RolloutEvidence
    route: PoolRoute | None = None
    """Stored route, as of the last decision that was stored."""
    record: RolloutRecord | None = None
    targets: list[VersionTarget] = field(default_factory=list)
    """Desired replicas of each version; empty before the first decision that was stored."""
    comparison: Comparison | None = None
    history: TrafficHistory | None = None
    history_read_at: float = float("-inf")
    history_digest: str = ""
    refusals: tuple[str, ...] = ()
    result: tuple[str, int, str] | None = None
    """Rollout, step and last recommendation of the gate."""


class FleetRollouts:
    """Rollouts of the pools that declare them. Not thread-safe: use it from one event loop.

    Args:
        store: Store of the fleet.
        fleet: Name of the fleet.
        records: Memory of the controllers, which it updates.
        observer: Source of the loads of replicas.
        publisher: Source of the routes that the gateways follow.
        save: Saves the records at once.
        on_event: Records an event.
        on_changed: Called when another decision may give another result.
    """

    def __init__(
        self,
        store: FleetStore,
        fleet: str,
        records: FleetRecords,
        observer: FleetObserver,
        publisher: GatewayPublisher,
        *,
        save: Callable[[], Awaitable[None]],
        on_event: EventCallback,
        on_changed: Callable[[], None],
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._records = records
        self._observer = observer
        self._publisher = publisher
        self._save = save
        self._on_event = on_event
        self._on_changed = on_changed
        self._writer = RolloutWriter(store, fleet)
        self._checks = RolloutChecks(on_changed)
        self._poller = OutcomePoller(publisher, on_changed)
        self._pools: dict[str, _PoolMemory] = {}
        self._invalid_documents = ""

    @property
    def targets(self) -> Mapping[str, Sequence[VersionTarget]]:
        """Desired replicas of each version of the pools that have rollouts."""
        return {name: memory.targets for name, memory in self._pools.items() if memory.targets}

    @property
    def undecided(self) -> Collection[str]:
        """Pools about which nothing is known yet. Their replicas stay as they are, and nothing is published."""
        return {name for name, memory in self._pools.items() if not memory.targets}

    @property
    def running(self) -> Mapping[str, bool]:
        """Whether a rollout runs, for each pool that has rollouts."""
        return {
            name: memory.record is not None and memory.record.state not in TERMINAL_STATES
            for name, memory in self._pools.items()
        }

    async def run(self) -> None:
        """Read the measurements of the gateways until cancelled."""
        await self._poller.run()

    async def close(self) -> None:
        """End all checks."""
        await self._checks.close()

    def on_saved(self) -> None:
        """Record that the store has the evidence that the last decisions rest on."""
        for memory in self._pools.values():
            memory.evidence.on_saved()

    # --- decisions -------------------------------------------------------------------------------

    async def decide(
        self,
        declared: DeclaredFleet,
        replicas: Sequence[ObservedReplica],
        counts: Mapping[str, int],
        now: float,
    ) -> None:
        """Decide about all pools, and store the decisions.

        Args:
            declared: The declaration in force.
            replicas: All replicas.
            counts: Number of replicas of the pools for which an autoscaler decides.
            now: Seconds since the epoch.

        Raises:
            StoreError: The store cannot be used. The next call continues.
        """
        pools = {pool.name: pool for pool in declared.config.pools if pool.rollout is not None}
        for name in self._pools.keys() - pools.keys():
            self._forget(name)
        for name in pools.keys() - self._pools.keys():
            self._pools[name] = _PoolMemory(RolloutEvidence(self._records, name))
        try:
            documents = await run_in_daemon_thread(read_rollout_documents, self._store, self._fleet)
        except ValueError as error:
            if self._invalid_documents != str(error):
                log.error("rollout_documents_invalid", reason=str(error))  # noqa: TRY400 - the reason suffices
            self._invalid_documents = str(error)
            return
        self._invalid_documents = ""
        for name, stored in documents.items():
            if name not in pools and stored.rollouts.version:
                await self._release(stored, now)
        for name, pool in pools.items():
            stored = documents.get(name) or RolloutDocuments(
                pool=name, rollouts=PoolRollouts(pool=name)
            )
            members = [each for each in replicas if each.pool == name]
            needed = counts.get(name, pool.initial_replicas)
            await self._decide_pool(declared, pool, stored, members, needed, now)

    async def _decide_pool(
        self,
        declared: DeclaredFleet,
        pool: PoolConfig,
        stored: RolloutDocuments,
        replicas: Sequence[ObservedReplica],
        needed: int,
        now: float,
    ) -> None:
        memory = self._pools[pool.name]
        begun = await self._begin(declared, stored, replicas, now)
        if begun is None:
            return
        stored = begun
        route, current = stored.route, stored.rollouts.current
        digest = declared.digest(pool.name)
        history = await self._read_history(declared, pool, stored, memory, now)
        is_running = current is not None and current.state not in TERMINAL_STATES
        if current is not None and is_running and not memory.evidence.has(current.id):
            memory.evidence.start(current, history)  # its record was lost
        verdict = None
        if current is not None and memory.evidence.has(current.id):
            verdict = memory.evidence.verdict(now)
        observation = self._observe(declared, pool, stored, replicas, needed)
        make_decision = partial(
            decide,
            stored.rollouts,
            DeclaredVersion(digest=digest, plan=declared.rollout_plan(pool)),
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
            memory.evidence.start(record, history)
            await self._save()  # before the record, which is never without its baseline
        if not await self._writer.write(stored, decision.route, decision.rollouts):
            self._on_changed()  # another process has changed the documents; decide again
            return
        memory.route, memory.record = decision.route or route, record
        self._divide(declared, pool, decision, memory, replicas)
        self._measure(declared, pool, decision, memory, now)
        self._report(pool.name, stored, decision, verdict, memory)
        if stored.commands:
            memory.refusals = decision.refusals
        status = describe_decision(decision, verdict, observation, digest, memory.refusals)
        self._records.rollouts[f"{ROLLOUT_STATUS_PREFIX}{pool.name}"] = msgspec.json.encode(status)
        if stored.commands:
            await self._save()
            await self._writer.remove_commands(stored)
        self._check(declared, pool, record, replicas)

    async def _begin(
        self,
        declared: DeclaredFleet,
        stored: RolloutDocuments,
        replicas: Sequence[ObservedReplica],
        now: float,
    ) -> RolloutDocuments | None:
        """Return the documents with a route and a record, which are written if the pool has none.

        The version that serves now is the stable one. Returns None if another process changes the documents.
        """
        pool, route = stored.pool, stored.route
        latest = self._publisher.latest_version(pool)
        if route is not None and latest > route.version:
            # A gateway has rolled it back without the store, or the store has lost a route.
            reason = "a gateway follows a later route than the stored one"
            healed = msgspec.structs.replace(route.roll_back(reason, now), version=latest + 1)
            await self._writer.write(stored, healed, stored.rollouts)
            self._on_changed()
            return None
        if route is not None and stored.rollouts.version:
            return stored
        serving = Counter(each.generation for each in replicas if each.in_rotation)
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
        if not await self._writer.write(stored, changed, rollouts):
            self._on_changed()
            return None
        return msgspec.structs.replace(stored, route=changed or route, rollouts=rollouts)

    async def _read_history(
        self,
        declared: DeclaredFleet,
        pool: PoolConfig,
        stored: RolloutDocuments,
        memory: _PoolMemory,
        now: float,
    ) -> TrafficHistory | None:
        """Return recent requests if a rollout may start, or if what it is compared with was lost; otherwise None."""
        digest, current, route = declared.digest(pool.name), stored.rollouts.current, stored.route
        is_running = current is not None and current.state not in TERMINAL_STATES
        if is_running and current is not None and current.candidate == digest:
            if memory.evidence.has(current.id):
                return None
        elif route is None or digest == route.stable or stored.rollouts.verdict_on(digest):
            return None
        is_fresh = now - memory.history_read_at < HISTORY_MAX_AGE_S
        if not is_fresh or memory.history_digest != digest:
            outcomes = await self._poller.read_history(pool.model)
            summarise = partial(summarise_history, outcomes, declared.config.objectives)
            memory.history = await run_in_daemon_thread(summarise)
            memory.history_read_at, memory.history_digest = now, digest
        return memory.history

    def _observe(
        self,
        declared: DeclaredFleet,
        pool: PoolConfig,
        stored: RolloutDocuments,
        replicas: Sequence[ObservedReplica],
        needed: int,
    ) -> RolloutObservation:
        route, current = stored.route, stored.rollouts.current
        versions = {}
        for generation in {each.generation for each in replicas}:
            digest = declared.find_digest(pool.name, generation)
            if digest is not None:
                is_candidate = current is not None and digest == current.candidate
                check = CheckResult(CheckStatus.PENDING, "")
                if is_candidate and current is not None:
                    check = self._checks.result(pool.name, current.id)
                versions[digest] = observe_version(
                    [each for each in replicas if each.generation == generation],
                    declared.restart_limits(pool),
                    check,
                    requires_warm_up=pool.warm_up,
                )
        return RolloutObservation(
            route=route,
            routed_version=0 if route is None else self._publisher.routed_version(route),
            needed=needed,
            versions=versions,
            longest_request_s=self._poller.longest_request_s(pool.model),
        )

    def _divide(
        self,
        declared: DeclaredFleet,
        pool: PoolConfig,
        decision: RolloutDecision,
        memory: _PoolMemory,
        replicas: Sequence[ObservedReplica],
    ) -> None:
        split, route = decision.split, memory.route
        assert split is not None  # noqa: S101 - the pool has a route
        assert route is not None  # noqa: S101
        stable = declared.find_generation(pool.name, split.stable)
        candidate = None
        if split.candidate is not None:
            candidate = declared.find_generation(pool.name, split.candidate)
        if stable is None:
            log.error("rollout_version_unknown", pool=pool.name, version=split.stable)
            return
        memory.targets = divide_pool(
            split,
            memory.record,
            replicas,
            (stable, candidate),
            pool.count_spares(split.stable_replicas + split.candidate_replicas),
            stable=route.stable,
        )

    def _measure(
        self,
        declared: DeclaredFleet,
        pool: PoolConfig,
        decision: RolloutDecision,
        memory: _PoolMemory,
        now: float,
    ) -> None:
        """Let the gateways measure the current step."""
        record, evidence = decision.rollouts.current, memory.evidence
        memory.comparison = None
        self._poller.sources.pop(pool.model, None)
        if record is not None and decision.gate_step is not None:
            memory.comparison = evidence.open_step(
                record, decision.gate_step, declared.config.objectives, now
            )
            self._poller.sources[pool.model] = record.id, evidence
        evidence.encode()

    def _check(
        self,
        declared: DeclaredFleet,
        pool: PoolConfig,
        record: RolloutRecord | None,
        replicas: Sequence[ObservedReplica],
    ) -> None:
        """Send the pinned prompts to a candidate that waits for them."""
        if record is None or record.state in TERMINAL_STATES:
            self._checks.forget(pool.name)
        if record is None or record.state is not RolloutState.CHECKING or pool.rollout is None:
            return
        ready = {
            digest: [
                each
                for each in replicas
                if each.generation == declared.find_generation(pool.name, digest)
                and is_ready(each, requires_warm_up=pool.warm_up)
            ]
            for digest in (record.stable, record.candidate)
        }
        urls = {
            digest: [self._records.replicas[each.name].url for each in members]
            for digest, members in ready.items()
        }
        names = [each.name for members in ready.values() for each in members]
        send = partial(
            check_pinned_prompts,
            next(iter(urls[record.stable]), None),
            urls[record.candidate],
            pool.model,
            pool.rollout.prompts,
            same_weights=self._have_same_weights(declared, pool, record, names),
        )
        self._checks.run(pool.name, record.id, send)

    def _have_same_weights(
        self,
        declared: DeclaredFleet,
        pool: PoolConfig,
        record: RolloutRecord,
        replicas: Sequence[str],
    ) -> bool:
        """Return whether both versions must give the same bytes."""
        if declared.check_paths(pool.name).load is None:
            return declared.has_same_computation(pool.name, record.stable, record.candidate)
        readings = [self._observer.reading(name) for name in replicas]
        identities = {
            "" if reading is None or reading.load is None else reading.load.arithmetic_id
            for reading in readings
        }
        return len(identities) == 1 and "" not in identities

    # --- results ---------------------------------------------------------------------------------

    def publish(
        self, declared: DeclaredFleet, members: Sequence[RoutedMember]
    ) -> tuple[list[RoutedMember], list[PublishedVersions]]:
        """Return the members of the rotation that serve by default, and the versions of all pools with rollouts.

        The replicas of a version that a rollout adds or removes are part of its version only. All others serve by
        default, also those that are replaced without a rollout.
        """
        default = list(members)
        published = []
        for name, memory in sorted(self._pools.items()):
            pool, route, record = declared.config.find_pool(name), memory.route, memory.record
            if pool is None or route is None:
                continue
            digests = {variant.digest for variant in route.variants}
            if record is not None:
                digests |= {record.stable, record.candidate}
            versions = {}
            for digest in sorted(digests - {route.stable}):
                generation = declared.find_generation(name, digest)
                own = [
                    each for each in members if each.pool == name and each.generation == generation
                ]
                if own:
                    versions[digest] = [declared.published_replica(each) for each in own]
                    default = [each for each in default if each not in own]
            published.append(
                PublishedVersions(
                    model=pool.model,
                    route=route,
                    replicas=versions,
                    comparison=memory.comparison,
                )
            )
        return default, published

    def _report(
        self,
        pool: str,
        stored: RolloutDocuments,
        decision: RolloutDecision,
        verdict: GateVerdict | None,
        memory: _PoolMemory,
    ) -> None:
        """Record changes of the state and of the gate, and refused commands, as events."""
        before, record = stored.rollouts.current, decision.rollouts.current
        if record is not None:
            is_new = before is None or before.id != record.id
            known = () if is_new or before is None else before.transitions
            if is_new:
                declared = f"version {record.candidate} is declared"
                self._report_state(pool, record, RolloutState.PLANNED, 0, declared)
            for transition in record.transitions:
                if transition not in known:
                    self._report_state(
                        pool, record, transition.state, transition.step, transition.reason
                    )
        if verdict is not None and verdict.step is not None:
            result = verdict.rollout, verdict.step, verdict.result.value
            if memory.result != result:
                log.info(
                    "rollout_gate_changed",
                    pool=pool,
                    rollout=verdict.rollout,
                    step=verdict.step,
                    result=verdict.result,
                    reason=verdict.reason,
                )
                self._on_event("rollout_gate", pool, verdict.reason, verdict.result)
            memory.result = result
        for refusal in decision.refusals:
            log.warning("rollout_command_refused", pool=pool, reason=refusal)
            self._on_event(ROLLOUT_REFUSED, pool, refusal, "refused")

    def _report_state(
        self, pool: str, record: RolloutRecord, state: RolloutState, step: int, reason: str
    ) -> None:
        log.info(
            "rollout_state_changed",
            pool=pool,
            rollout=record.id,
            version=record.candidate,
            state=state,
            step=step,
            reason=reason,
        )
        self._on_event("rollout_state", pool, reason, state)

    async def _release(self, stored: RolloutDocuments, now: float) -> None:
        """End the rollouts of a pool that declares none any more."""
        if await self._writer.release(stored, now):
            self._forget(stored.pool)
            log.info("rollouts_ended", pool=stored.pool)
            self._on_event("rollouts_ended", stored.pool, "it declares none any more", "ok")
        else:
            self._on_changed()

    def _forget(self, pool: str) -> None:
        memory = self._pools.pop(pool, None)
        self._checks.forget(pool)
        for model, (_, evidence) in list(self._poller.sources.items()):
            if memory is not None and evidence is memory.evidence:
                del self._poller.sources[model]
        for name in [each for each in self._records.rollouts if each.partition("/")[2] == pool]:
            del self._records.rollouts[name]
