"""Results of decisions about rollouts: documents in the store, in an order that survives a crash, and events."""

from __future__ import annotations

from functools import partial

import msgspec
import structlog

from argosy.deployment import (
    ROLLOUT_REFUSED,
    ROLLOUTS_PREFIX,
    ROUTE_PREFIX,
    RolloutDocuments,
    remove_commands,
)
from argosy.fleet.control.term_journal import TermJournal
from argosy.policy.rollout import (
    GateVerdict,
    PoolRollouts,
    RolloutDecision,
    RolloutRecord,
    RolloutState,
)
from argosy.policy.traffic import PoolRoute
from argosy.process import run_in_daemon_thread
from argosy.store import FleetDocument

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.fleet")


class RolloutWriter:
    """Writes the documents of a fleet's rollouts by compare-and-set, and events about what changes in them."""

    def __init__(self, journal: TermJournal) -> None:
        self._journal = journal
        self._store = journal.store.fleets
        self._fleet = journal.fleet
        self._results: dict[str, tuple[str, int, str]] = {}
        """Rollout, step and last recommendation of the gate of each pool."""

    async def write(
        self, stored: RolloutDocuments, route: PoolRoute | None, rollouts: PoolRollouts
    ) -> bool:
        """Write the result of a decision, and return whether no other process has changed the documents meanwhile.

        A rollback is written before the record, because it is valid without it. Any other route is written after the
        record that explains it. If only a part is written, the next decision writes the rest.

        With None for `route` the stored one is kept.
        """
        is_rollback = route is not None and route.rollback is not None
        if route is not None and is_rollback and not await self._write_route(stored, route):
            return False
        if rollouts != stored.rollouts:
            document = FleetDocument(rollouts.version, msgspec.json.encode(rollouts))
            name = f"{ROLLOUTS_PREFIX}{stored.pool}"
            if not await self._replace(name, document, stored.rollouts.version):
                return False
        return route is None or is_rollback or await self._write_route(stored, route)

    async def remove_commands(self, stored: RolloutDocuments) -> None:
        """Remove the commands that a decision was about."""
        if stored.commands:
            await run_in_daemon_thread(
                remove_commands, self._store, self._fleet, stored.pool, stored.commands
            )

    async def release(self, stored: RolloutDocuments, now: float) -> bool:
        """End the rollouts of a pool that declares none any more, and return whether that was written.

        The route remains, so that its next version is larger. It serves the stable version only.
        """
        route = stored.route
        if route is not None:
            changed = route.roll_back("the pool declares no rollout any more", now)
            if changed is not route and not await self._write_route(stored, changed):
                return False
        await self.remove_commands(stored)
        name = f"{ROLLOUTS_PREFIX}{stored.pool}"
        if not await self._replace(name, None, stored.rollouts.version):
            return False
        log.info("rollouts_ended", pool=stored.pool)
        self._journal.record_event(
            "rollouts_ended", stored.pool, reason="it declares none any more", outcome="ok"
        )
        return True

    async def _write_route(self, stored: RolloutDocuments, route: PoolRoute) -> bool:
        document = FleetDocument(route.version, msgspec.json.encode(route))
        after = 0 if stored.route is None else stored.route.version
        return await self._replace(f"{ROUTE_PREFIX}{stored.pool}", document, after)

    async def _replace(self, name: str, document: FleetDocument | None, after: int) -> bool:
        replace = partial(self._store.replace_document, after=after)
        return await run_in_daemon_thread(replace, self._fleet, name, document)

    def report(
        self,
        pool: str,
        before: RolloutRecord | None,
        decision: RolloutDecision,
        verdict: GateVerdict | None,
    ) -> None:
        """Record changes of the state and of the gate, and refused commands."""
        record = decision.rollouts.current
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
            if self._results.get(pool) != result:
                log.info(
                    "rollout_gate_changed",
                    pool=pool,
                    rollout=verdict.rollout,
                    step=verdict.step,
                    result=verdict.result,
                    reason=verdict.reason,
                )
                self._journal.record_event(
                    "rollout_gate", pool, reason=verdict.reason, outcome=verdict.result
                )
            self._results[pool] = result
        for refusal in decision.refusals:
            log.warning("rollout_command_refused", pool=pool, reason=refusal)
            self._journal.record_event(ROLLOUT_REFUSED, pool, reason=refusal, outcome="refused")

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
        self._journal.record_event("rollout_state", pool, reason=reason, outcome=state)
