"""Carries out what a reconciliation has decided: starts, warm-ups, changes of the rotation, drains and removals."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import partial

import msgspec
import structlog

from argosy.deployment import ReplicaRecord
from argosy.fleet.control.declared_fleet import DeclaredFleet
from argosy.fleet.control.fleet_observer import FleetObserver
from argosy.fleet.control.replica_log_recorder import ReplicaLogRecorder
from argosy.fleet.control.replica_monitor import warm_up_replica
from argosy.fleet.control.term_journal import TermJournal
from argosy.fleet.launchers import LaunchError
from argosy.policy.reconciliation import (
    MAX_PAST_RUNS,
    MAX_REFUSAL_DELAY_S,
    Action,
    Admit,
    Drain,
    Remove,
    ReplicaRun,
    Start,
    Stop,
    Warm,
    WarmUpState,
    Withdraw,
)
from argosy.store import DeposedError, FleetLease, StoreError

PREPARATION_INTERVAL_S = 600.0
"""Time after which `Launcher.prepare_pool` is called again, since others may delete what it has created."""


class Prepare(Action, frozen=True, kw_only=True):
    """Call `Launcher.prepare_pool` with the specification of the replica."""

    generation: int
    ordinal: int


_NOUNS: dict[type[Action], str] = {
    Prepare: "disruption budget",
    Drain: "drain",
    Stop: "stop",
    Remove: "removal",
}

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.fleet")


class ReplicaActions:
    """Actions of a leading controller. Not thread-safe: use it from one event loop.

    Args:
        journal: The term, whose records it updates, and which is woken when actions have ended.
        logs: Recorder of the logs of ended runs, which a start or a removal waits for.
    """

    def __init__(
        self, journal: TermJournal, observer: FleetObserver, logs: ReplicaLogRecorder
    ) -> None:
        self._journal = journal
        self._records = journal.records
        self._observer = observer
        self._logs = logs
        self._pending: dict[str, asyncio.Task[None]] = {}
        """Running actions of each pool. Until they end, the pool gets no others, since it is not as it was observed."""
        self._warm_ups: dict[str, asyncio.Task[None]] = {}
        self._refusals: dict[tuple[str, type[Action]], tuple[int, float, str]] = {}
        """Refused preparations, drains, stops and removals: how often in a row, when to try again, and why."""
        self._prepared: dict[str, tuple[int, float]] = {}
        """Pools that this term has prepared, each with the revision and the time."""

    async def close(self) -> None:
        """End the running actions."""
        tasks = [*self._pending.values(), *self._warm_ups.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def busy_pools(self) -> frozenset[str]:
        """Pools with running actions."""
        return frozenset(self._pending)

    def start(
        self, actions: Sequence[Action], declared: DeclaredFleet, busy_pools: frozenset[str]
    ) -> None:
        """Start the actions of all pools but the busy ones, in their order.

        `busy_pools` are those before the observation. It may miss what their actions have done since. Refused actions
        wait 1 s, 2 s, 4 s and so on.
        """
        now = self._journal.clock()
        actions = [*self._list_unprepared(declared.number, now), *actions]
        wanted = {(action.replica, type(action)) for action in actions}
        self._refusals = {key: each for key, each in self._refusals.items() if key in wanted}
        by_pool: dict[str, list[Action]] = {}
        for action in actions:
            if isinstance(action, Warm):
                self._start_warm_up(action, declared)
            elif action.pool not in busy_pools and self._retry_at(action) <= now:
                by_pool.setdefault(action.pool, []).append(action)
        for pool, pool_actions in by_pool.items():
            task = asyncio.create_task(
                self._run_actions(pool_actions, declared), name=f"actions-{pool}"
            )
            self._pending[pool] = task
            task.add_done_callback(partial(self._on_actions_ended, pool))

    def describe_refusal(self, replica: str) -> str:
        """Return what completes the reason of a replica's phase: the action that is refused; empty without one."""
        return "".join(
            f"; its {_NOUNS[kind]} was refused{f' {tries} times' * (tries > 1)}: {reason}"
            for (name, kind), (tries, _, reason) in self._refusals.items()
            if name == replica
        )

    def _list_unprepared(self, revision: int, now: float) -> list[Prepare]:
        """Return the preparations that are due, each by the latest replica of its pool."""
        latest = dict[str, ReplicaRecord]()
        for record in self._records.replicas.values():
            if record.launcher != "kubernetes":
                continue  # elsewhere the replicas of a pool share nothing
            if latest.get(record.pool, record).generation <= record.generation:
                latest[record.pool] = record
        return [
            Prepare(
                pool=pool,
                replica=record.name,
                launcher=record.launcher,
                reason="its disruption budget may be missing",
                generation=record.generation,
                ordinal=record.ordinal,
            )
            for pool, record in latest.items()
            for prepared, at in [self._prepared.get(pool, (0, now))]
            if prepared != revision or now - at >= PREPARATION_INTERVAL_S
        ]

    def _retry_at(self, action: Action) -> float:
        refusal = self._refusals.get((action.replica, type(action)))
        return -math.inf if refusal is None else refusal[1]

    def _on_actions_ended(self, pool: str, task: asyncio.Task[None]) -> None:
        self._pending.pop(pool, None)
        self._journal.on_task_ended(task)

    async def _run_actions(self, actions: list[Action], declared: DeclaredFleet) -> None:
        for action in actions:
            outcome = "ok"
            key = action.replica, type(action)
            tries, _, last_reason = self._refusals.get(key, (0, 0.0, ""))
            try:
                await self._run_action(action, declared)
            except DeposedError:
                raise
            except (LaunchError, OSError, StoreError) as error:
                outcome = str(error)
                log.error("action_failed", replica=action.replica, reason=outcome)  # noqa: TRY400 - the reason suffices
                if type(action) in _NOUNS:  # failed starts are runs in the record
                    delay_s = min(2.0**tries, MAX_REFUSAL_DELAY_S)
                    self._refusals[key] = tries + 1, self._journal.clock() + delay_s, outcome
                    if outcome == last_reason:
                        continue  # the event is in the log
            else:
                if not self._refusals.pop(key, None):
                    if isinstance(action, Prepare):
                        continue  # usually nothing was missing
                else:
                    outcome = f"ok after {tries} refusal{'s' * (tries > 1)}"
            kind = f"replica_{type(action).__name__.lower()}"
            self._journal.record_event(
                kind, action.pool, action.replica, reason=action.reason, outcome=outcome
            )

    async def _run_action(self, action: Action, declared: DeclaredFleet) -> None:
        """Carry out an action.

        Raises:
            LaunchError, OSError, StoreError: It failed. It is decided again by what is observed then.
            DeposedError, StaleEpochError: Another controller leads by now.
        """
        lease = self._journal.leadership.lease
        launcher = self._observer.launcher(action.launcher)
        match action:
            case Prepare(pool=pool, generation=generation, ordinal=ordinal):
                spec = declared.launch_spec(pool, generation, ordinal)
                await launcher.prepare_pool(spec, lease.epoch)
                self._prepared[pool] = declared.number, self._journal.clock()
            case Start():
                await self._start_replica(action, declared, lease)
            case Admit():
                self._update(action.replica, in_rotation=True)
            case Withdraw():
                self._update(action.replica, in_rotation=False)
            case Drain():
                await launcher.drain(action.replica, lease.epoch)
            case Stop():
                self._update(action.replica, stop_reason=action.reason)
                await launcher.stop(action.replica, lease.epoch)
            case Remove():
                await self._logs.wait_for_end(action.replica)
                await launcher.remove(action.replica, lease.epoch)
                self._records.replicas.pop(action.replica, None)
                self._observer.forget(action.launcher, action.replica)

    async def _start_replica(
        self, action: Start, declared: DeclaredFleet, lease: FleetLease
    ) -> None:
        record = self._records.replicas.get(action.replica) or ReplicaRecord(
            name=action.replica,
            pool=action.pool,
            generation=action.generation,
            ordinal=action.ordinal,
            launcher=action.launcher,
        )
        ended = action.ended_run
        if ended is not None and all(run.attempt != ended.attempt for run in record.past_runs):
            record = _append_run(record, ended)
        self._records.replicas[action.replica] = record
        await self._journal.save()  # before the start, after which the ended run cannot be observed
        if ended is not None:
            await self._logs.wait_for_end(action.replica)
            log.warning("replica_restarting", replica=action.replica, reason=action.reason)
        try:
            spec = declared.launch_spec(action.pool, action.generation, action.ordinal)
            await self._observer.launcher(action.launcher).start(spec, lease.epoch)
        except LaunchError as error:
            now = self._journal.clock()
            failed = ReplicaRun(
                attempt=record.attempt + 1,
                started_at=now,
                exited_at=now,
                reason=str(error),
                was_refused=True,
            )
            self._records.replicas[action.replica] = _append_run(record, failed)
            raise

    def _start_warm_up(self, action: Warm, declared: DeclaredFleet) -> None:
        record = self._records.replicas.get(action.replica)
        model = declared.model_name(action.pool)
        if action.replica in self._warm_ups or record is None or model is None:
            return
        self._update(action.replica, warm_up=WarmUpState.RUNNING)
        task = asyncio.create_task(self._warm_up(action, record, model))
        self._warm_ups[action.replica] = task
        task.add_done_callback(lambda _: self._warm_ups.pop(action.replica, None))

    async def _warm_up(self, action: Warm, record: ReplicaRecord, model: str) -> None:
        state, reason = WarmUpState.SUCCEEDED, ""
        try:
            await warm_up_replica(record.url, model)
        except RuntimeError as error:
            state, reason = WarmUpState.FAILED, str(error)
        current = self._records.replicas.get(record.name)
        if current is not None and current.attempt == record.attempt:
            self._update(record.name, warm_up=state, warm_up_error=reason)
        outcome = reason or "ok"
        self._journal.record_event(
            "replica_warm", action.pool, action.replica, reason=action.reason, outcome=outcome
        )
        self._journal.wake.set()

    def _update(self, replica: str, **fields: object) -> None:
        record = self._records.replicas.get(replica)
        if record is not None:
            self._records.replicas[replica] = msgspec.structs.replace(record, **fields)


def _append_run(record: ReplicaRecord, run: ReplicaRun) -> ReplicaRecord:
    runs = (*record.past_runs, run)[-MAX_PAST_RUNS:]
    return msgspec.structs.replace(record, past_runs=runs)
