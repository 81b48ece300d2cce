"""Events of rollouts: in the fleet's event log, and in the log of the controller."""

from __future__ import annotations

import structlog

from argosy.deployment import ROLLOUT_REFUSED
from argosy.fleet.control.term_journal import TermJournal
from argosy.policy.rollout import GateVerdict, RolloutDecision, RolloutRecord, RolloutState

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.fleet")


class RolloutEvents:
    """Reports what changes in rollouts.

    Args:
        journal: The term, whose event log it writes.
    """

    def __init__(self, journal: TermJournal) -> None:
        self._journal = journal
        self._results: dict[str, tuple[str, int, str]] = {}
        """Rollout, step and last recommendation of the gate of each pool."""

    def report(
        self,
        pool: str,
        before: RolloutRecord | None,
        decision: RolloutDecision,
        verdict: GateVerdict | None,
    ) -> None:
        """Record changes of the state and of the gate, and refused commands.

        Args:
            pool: Name of the pool.
            before: Its rollout before the decision.
            decision: The decision, which is stored.
            verdict: Verdict of the gate that it rests on.
        """
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

    def report_end(self, pool: str) -> None:
        """Record that a pool declares no rollouts any more."""
        log.info("rollouts_ended", pool=pool)
        self._journal.record_event(
            "rollouts_ended", pool, reason="it declares none any more", outcome="ok"
        )
