"""Rollouts of adapters: gateways compare a candidate with the version that answers, and change its share.

All gateways add their measurements to one record of evidence in the store, and any of them makes the change that
follows. So no controller is needed, and a gateway that restarts continues.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

import msgspec
import structlog

from argosy.gateway.adapter_keeper import AdapterKeeper
from argosy.gateway.model_registry import ModelRouter
from argosy.gateway.rollout_messages import OutcomeQuery
from argosy.gateway.version_comparison import AdapterMeter, publish_versions
from argosy.policy.rollout import (
    MIN_SAMPLES,
    SHADOW_FRACTION,
    SHARE_STEPS,
    Baseline,
    Comparison,
    GateRecord,
    GateSettings,
    GateVerdict,
    RolloutGate,
    ShareAction,
    ShareDecision,
    UserRates,
    decide_share,
    freeze_history,
)
from argosy.process import run_in_daemon_thread
from argosy.store import Adapter, Adapters, FleetDocument, NotFoundError, StoreError

CHECK_INTERVAL_S = 2.0
MAX_REASON_LENGTH = 500
SETTINGS = GateSettings(max_miss_rate=0.05)
"""At most 5 % of the requests of a candidate may fail."""
NUM_STEPS = 1 + len(SHARE_STEPS)
"""Steps that are measured: that with copies of requests is number 0, and the others have the number of their share."""
ACTOR = "adapter rollout"
"""Author of the changes in the audit log."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class AdapterEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Stored evidence of the rollout of one adapter."""

    rollout: str
    started_at: float
    """Seconds since the epoch."""
    gate: GateRecord
    baseline: Baseline = Baseline()
    """Thresholds and rates of the version that answers, frozen before the candidate has traffic."""
    rates: UserRates = UserRates()


def read_verdict(
    adapter: Adapter, document: FleetDocument | None, now: float
) -> GateVerdict | None:
    """Return the verdict on the candidate of an adapter; None if there is none, or it was not measured yet."""
    evidence = _decode(adapter, document)
    if evidence is None or adapter.candidate is None:
        return None
    return RolloutGate(evidence.gate).verdict(now)


def describe_rollout(adapter: Adapter, verdict: GateVerdict | None) -> str:
    """Return the state of a rollout in one sentence, as far as the store knows it. Empty if there never was one."""
    if adapter.candidate is None:
        return f"rolled back: {adapter.rejection}" if adapter.rejected else ""
    is_compared = verdict is not None and verdict.step is not None
    state = f"{adapter.candidate_percent} % of the users"
    if adapter.step_s is None:
        state += ", by hand"
    elif not adapter.candidate_percent:
        state = "loading, and measuring the version that answers"
        if is_compared:
            state = "answering copies of requests"
    return f"{state}: {verdict.reason}" if verdict is not None and is_compared else state


class AdapterRollouts:
    """Measures the versions of adapters and follows the evidence. Not thread-safe: use it from one event loop."""

    def __init__(
        self,
        adapters: Adapters,
        models: ModelRouter,
        meter: AdapterMeter,
        keeper: AdapterKeeper,
        on_changed: Callable[[], object],
        on_rolled_back: Callable[[str], object],
    ) -> None:
        """Create the component.

        Args:
            adapters: The registry.
            models: Models and adapters that the gateway knows.
            meter: Measures the requests of this gateway.
            keeper: Loads candidates.
            on_changed: Called after a change of the registry.
            on_rolled_back: Called with the base model of each rollback.
        """
        self._adapters = adapters
        self._models = models
        self._meter = meter
        self._keeper = keeper
        self._on_changed = on_changed
        self._on_rolled_back = on_rolled_back

    async def run(self) -> None:
        """Check often, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            await self.check()

    async def check(self) -> None:
        """Add the latest measurements of all rollouts to the evidence, and change the shares that it decides."""
        running = self._models.list_rollouts()
        names = {each.id for each in running}
        self._meter.end_comparisons(names)
        if not running:
            return
        try:
            documents = await run_in_daemon_thread(self._adapters.read_evidence, names)
            for adapter in running:
                await self._follow(adapter, documents.get(adapter.id))
        except StoreError as error:
            log.debug("adapter_rollouts_unreadable", reason=str(error))

    async def _follow(self, adapter: Adapter, document: FleetDocument | None) -> None:
        evidence = await self._add_measurements(adapter, document)
        if evidence is None:
            return
        now, gate, percent = time.time(), RolloutGate(evidence.gate), adapter.candidate_percent
        step = gate.record.step
        decision = decide_share(
            percent,
            adapter.step_s,
            gate.verdict(now),
            adapter.rollout,
            0.0 if step is None else now - step.opened_at,
            "" if percent or step is not None else self._find_blocker(adapter, evidence, now),
        )
        failure = self._keeper.find_failure(adapter.candidate or "")
        if not percent and failure is not None and failure.is_final:
            # A tenant reads the reason, whom the folders of a replica do not concern.
            words = [word for word in failure.reason.split() if "/" not in word]
            reason = f"it cannot be loaded: {' '.join(words)}"
            decision = ShareDecision(ShareAction.ROLL_BACK, reason)
        if decision.action is not ShareAction.WAIT:
            await self._change(adapter, decision)

    async def _add_measurements(
        self, adapter: Adapter, document: FleetDocument | None
    ) -> AdapterEvidence | None:
        """Add the measurements of this gateway to the evidence.

        Returns:
            The evidence. None if another gateway has replaced it, so that the next check adds them to that.
        """
        now, percent = time.time(), adapter.candidate_percent
        outcomes, evidence = self._meter.measure(adapter), _decode(adapter, document)
        has_changed = evidence is None
        if evidence is None:
            started = RolloutGate.start(adapter.rollout, SETTINGS, NUM_STEPS).record
            evidence = AdapterEvidence(rollout=adapter.rollout, started_at=now, gate=started)
        gate = RolloutGate(evidence.gate)
        is_compared = bool(percent) or (
            adapter.step_s is not None
            and (gate.record.step is not None or not self._find_blocker(adapter, evidence, now))
        )
        if is_compared:
            if gate.record.step is None:
                baseline, rates = await run_in_daemon_thread(freeze_history, outcomes.history)
                gate.record.baseline_miss_rate = baseline.miss_rate
                evidence = msgspec.structs.replace(evidence, baseline=baseline, rates=rates)
            if gate.record.step is None or gate.record.step.index != percent:
                gate.open_step(percent, percent / 100 or SHADOW_FRACTION, now)
                has_changed = True
        comparison = _build_comparison(adapter, evidence) if is_compared else None
        outcomes.apply(publish_versions(adapter, comparison), now)
        outcomes.score_running(time.monotonic())
        outcomes.take_batch(now)
        gateway = self._meter.gateway_id
        query = OutcomeQuery(
            model=adapter.id,
            rollout=adapter.rollout,
            gateway=gateway,
            after=gate.record.sequences.get(gateway, 0),
        )
        for batch in outcomes.build_report(query).batches:
            has_changed |= gate.add(batch)
        if has_changed:
            after = 0 if document is None else document.version
            replace = partial(self._adapters.replace_evidence, after=after)
            if not await run_in_daemon_thread(replace, adapter.id, msgspec.json.encode(evidence)):
                return None
        return evidence

    def _find_blocker(self, adapter: Adapter, evidence: AdapterEvidence, now: float) -> str:
        """Return why a candidate cannot answer copies of requests yet; empty if it can."""
        if not self._models.count_loaded(adapter.base_model, adapter.candidate or ""):
            return "no replica has loaded it yet"
        samples = len(self._meter.measure(adapter).history)
        if samples < MIN_SAMPLES and now - evidence.started_at < (adapter.step_s or 0.0):
            return "the version that answers is measured first"
        return ""

    async def _change(self, adapter: Adapter, decision: ShareDecision) -> None:
        percent = None if decision.action is ShareAction.PROMOTE else decision.percent
        reason = decision.reason[:MAX_REASON_LENGTH]
        follow = partial(self._adapters.follow_rollout, adapter, percent, reason, actor=ACTOR)
        try:
            changed = await run_in_daemon_thread(follow)
        except NotFoundError:
            return
        self._on_changed()
        if changed is None:
            return
        if decision.action is ShareAction.ROLL_BACK:
            self._on_rolled_back(adapter.base_model)
        log.info(
            "adapter_share_changed",
            adapter=adapter.name,
            id=adapter.id,
            candidate=adapter.candidate,
            action=decision.action,
            percent=changed.candidate_percent,
            reason=reason,
        )


def _decode(adapter: Adapter, document: FleetDocument | None) -> AdapterEvidence | None:
    """Return the evidence of the current rollout. None if there is none, or a later version wrote it."""
    if document is None:
        return None
    try:
        evidence = msgspec.json.decode(document.content, type=AdapterEvidence)
    except msgspec.MsgspecError as error:
        log.warning("adapter_evidence_invalid", adapter=adapter.id, reason=str(error))
        return None
    return evidence if evidence.rollout == adapter.rollout else None


def _build_comparison(adapter: Adapter, evidence: AdapterEvidence) -> Comparison:
    percent = adapter.candidate_percent
    return Comparison(
        rollout=adapter.rollout,
        candidate=adapter.candidate or "",
        step=percent,
        share=percent / 100 or SHADOW_FRACTION,
        num_gate_starts=NUM_STEPS,
        settings=SETTINGS,
        baseline=evidence.baseline,
        rates=evidence.rates,
    )
