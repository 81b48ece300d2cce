"""A fleet in a store during a rollout, without processes: its controller decides when a test says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from argosy.deployment import (
    REPLICA_PREFIX,
    ROLLOUT_STATUS_PREFIX,
    ROLLOUTS_PREFIX,
    ROUTE_PREFIX,
    ReplicaRecord,
    RolloutReport,
    describe_decision,
    read_rollouts,
    remove_commands,
)
from argosy.policy.reconciliation import ReplicaPhase
from argosy.policy.rollout import (
    CheckStatus,
    DeclaredVersion,
    OutcomeBatch,
    PoolRollouts,
    RolloutGate,
    RolloutObservation,
    RolloutPlan,
    RolloutState,
    VersionStatus,
    decide,
)
from argosy.policy.traffic import PoolRoute
from argosy.store import FleetDocument, FleetLease, FleetStore
from tests.support.waiting import wait_for

POOL = "chat"
OLD, NEW = "1" * 64, "2" * 64
DECLARATION = b"""{
    "fleet": "demo",
    "models": [{"name": "chat", "source": "argosy-mini"}],
    "gateways": 0,
    "pools": [{"name": "chat", "model": "chat", "replicas": 2, "rollout": {}}]
}"""
READY = VersionStatus(existing=2, serving=2, ready=2, check=CheckStatus.PASSED)
READY_ALONE = VersionStatus(existing=1, serving=1, ready=1, check=CheckStatus.PASSED)


class StoredRollout:
    """A fleet in a store during a rollout, whose controller decides when `decide_once` is called."""

    def __init__(self, store: FleetStore) -> None:
        self.store = store
        for digest in (OLD, NEW):
            after = 0 if digest == OLD else 1
            store.apply("demo", DECLARATION, {POOL: digest}, author="test", after=after)
        lease = store.acquire_lease("controller/1/1", store.read_lease("demo"))
        assert lease is not None
        self.lease: FleetLease = lease
        self.gate: RolloutGate | None = None
        self.candidate = READY_ALONE
        self._replace(ROUTE_PREFIX, PoolRoute(pool=POOL, version=1, stable=OLD), after=0)
        self.decide_once()
        while self.state is not RolloutState.STEP:
            self.decide_once()

    @property
    def report(self) -> RolloutReport:
        return read_rollouts(self.store, "demo")[0]

    @property
    def state(self) -> RolloutState:
        current = self.report.rollouts.current
        assert current is not None
        return current.state

    def release(self) -> None:
        """End the controller."""
        self.store.release_lease(self.lease)

    def measure(self) -> None:
        """Record measurements of both versions, without any bad event."""
        assert self.gate is not None
        self.gate.add(
            OutcomeBatch(
                rollout=self.gate.record.rollout,
                gateway="g",
                sequence=1,
                step=0,
                ended_at=time.time(),
                candidate_requests=5,
                stable_requests=50,
            )
        )

    def decide_once(self) -> None:
        """Do what a controller does in one round."""
        report = self.report
        observation = RolloutObservation(
            route=report.route,
            routed_version=0 if report.route is None else report.route.version,
            needed=2,
            versions={OLD: READY, NEW: self.candidate},
        )
        now = time.time()
        verdict = None if self.gate is None else self.gate.verdict(now)
        decision = decide(
            report.rollouts,
            DeclaredVersion(digest=NEW, plan=RolloutPlan()),
            observation,
            now,
            verdict=verdict,
            commands=report.commands,
        )
        if decision.rollouts.version > report.rollouts.version:
            self._replace(ROLLOUTS_PREFIX, decision.rollouts, after=report.rollouts.version)
        if decision.route is not None and report.route is not None:
            self._replace(ROUTE_PREFIX, decision.route, after=report.route.version)
        if decision.gate_step is not None and decision.rollouts.current is not None:
            current = decision.rollouts.current
            self.gate = self.gate or RolloutGate.start(current.id, current.plan.gate, 5)
            self.gate.open_step(*decision.gate_step, now)
        status = describe_decision(decision, verdict, observation, NEW, decision.refusals)
        replica = ReplicaRecord(
            name="chat-1-0",
            pool=POOL,
            generation=1,
            ordinal=0,
            launcher="local",
            phase=ReplicaPhase.READY,
        )
        records = {
            ROLLOUT_STATUS_PREFIX + POOL: msgspec.json.encode(status),
            REPLICA_PREFIX + replica.name: msgspec.json.encode(replica),
        }
        self.store.save_records(self.lease, records)
        remove_commands(self.store, "demo", POOL, report.commands)

    def _replace(self, prefix: str, document: PoolRoute | PoolRollouts, *, after: int) -> None:
        stored = FleetDocument(document.version, msgspec.json.encode(document))
        assert self.store.replace_document("demo", prefix + POOL, stored, after=after)

    @contextmanager
    def controller(self) -> Iterator[None]:
        """Follow the next command from another thread."""

        def follow() -> None:
            wait_for(lambda: self.report.commands)
            self.decide_once()

        thread = threading.Thread(target=follow)
        thread.start()
        yield
        thread.join()
